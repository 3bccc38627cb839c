"""Networks built from typical figures, for clusters that have not been probed."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence

from syncline.exchange import WORLD, wire
from syncline.records.link_costs import ETHERNET_EFFICIENCY, Collective, Link
from syncline.records.network import Network

ASSUMED_RATE_BPS = 10_000_000_000


def assumed_network(hosts: int, per_host: int, rate_bps: int, backend: str = "nccl") -> Network:
    """Return a network of equal hosts, whose ranks are numbered host by host."""
    return assumed_links([host for host in range(hosts) for _ in range(per_host)], rate_bps, backend)


def assumed_links(host_of_rank: Sequence[int], rate_bps: int = ASSUMED_RATE_BPS, backend: str = "nccl") -> Network:
    """Return a network with Ethernet links of the given rate, and typical start-ups for the backend."""
    hosts, ranks = max(host_of_rank) + 1, len(host_of_rank)
    fullest = max(collections.Counter(host_of_rank).values())
    goodput = rate_bps / 8 * ETHERNET_EFFICIENCY
    hop_s, local_hop_s, rate = (25e-6, 5e-6, 20e9) if backend == "nccl" else (60e-6, 20e-6, 2e9)
    ranks_at = {WORLD: ranks} if 1 in (hosts, fullest) else {WORLD: ranks, "hosts": hosts, "local": fullest}
    low, high = 0.8 * goodput, goodput
    links = [Link(name="host", bytes_per_s=goodput, low_bytes_per_s=low, high_bytes_per_s=high, nominal_bps=rate_bps)]
    if fullest > 1:
        links.append(Link(name="local", bytes_per_s=rate, low_bytes_per_s=rate / 3, high_bytes_per_s=rate * 3))
    collectives = []
    for (level, size), kind in itertools.product(ranks_at.items(), wire.KINDS):
        if size > 1:
            each_s = local_hop_s if level == "local" or hosts == 1 else hop_s
            startup_s = each_s * wire.hops(kind, size, backend)
            collectives.append(
                Collective(
                    level=level,
                    kind=kind,
                    ranks=size,
                    startup_s=startup_s,
                    startup_low_s=startup_s / 3,
                    startup_high_s=startup_s * 3,
                    own_s_per_byte=0.0,
                    serial_s=startup_s,
                )
            )
    return Network(
        backend=backend,
        device="cuda" if backend == "nccl" else "cpu",
        host_of_rank=tuple(host_of_rank),
        rack_of_host=(0,) * hosts,
        links=tuple(links),
        collectives=tuple(collectives),
        in_flight=1 if backend == "nccl" else 2,
        measured=False,
        how=f"assumed: {rate_bps / 1e9:g} Gbit/s at {ETHERNET_EFFICIENCY:.0%}, {hop_s * 1e6:.0f} µs per message",
    )
