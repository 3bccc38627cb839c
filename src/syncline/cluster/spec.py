"""What an emulated cluster looks like: hosts, ranks on them, links, and who has which rank."""

from __future__ import annotations

import re
from dataclasses import dataclass

from syncline.errors import UsageError

MAX_HOSTS = 250  # one /24 of addresses, one veth pair each

MAX_RANKS = 1000  # each is a process with a pipe to the one that launched it

MAX_RATE_BPS = 34_000_000_000  # the kernel's filter counts bytes per second in 32 bits

_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kmg]?)(bit|bps|bit/s)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_rate(text: str, *, fastest_bps: int = MAX_RATE_BPS) -> int:
    """`"200mbit"` → 200000000 bits per second. Units are decimal, as networks count.

    `fastest_bps`: by default what a link can be shaped to.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"rate {text!r} is not a rate: write it like 200mbit, 1gbit or 2.5gbit")
    rate_bps = round(float(match["number"]) * _UNITS[match["unit"].lower()])
    if rate_bps > fastest_bps:
        limit = "the fastest that a link can be shaped to" if fastest_bps == MAX_RATE_BPS else "faster than any link"
        raise UsageError(f"rate {text!r} is over {format_rate(fastest_bps)}, {limit}")
    if rate_bps < 100_000:
        raise UsageError(f"rate {text!r} is under 100kbit, the slowest link that is emulated")
    return rate_bps


def format_rate(rate_bps: int) -> str:
    """200000000 → `"200mbit"`."""
    for unit in ("g", "m", "k"):
        if rate_bps >= _UNITS[unit]:
            return f"{rate_bps / _UNITS[unit]:g}{unit}bit"
    return f"{rate_bps}bit"


def parse_per_host(text: str, hosts: int) -> tuple[int, ...]:
    """`"2"` → the same on every host; `"3,1,2"` → one number per host."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--per-host {text!r}: write one number, or one per host like 3,1,2") from None
    return counts * hosts if len(counts) == 1 else counts


@dataclass(frozen=True)
class ClusterSpec:
    """Hosts behind one switch, or in racks whose switches meet in a core behind slower trunks."""

    hosts: int = 4
    per_host: tuple[int, ...] = ()
    """Ranks on each host; empty means one each."""
    rate_bps: int = 200_000_000
    """What each host's link carries, in each direction."""
    racks: int = 1
    trunk_rate_bps: int | None = None
    """What each rack's uplink carries, in each direction; required with more than one rack."""
    rank_order: str = "host"
    """`host`: ranks are numbered host by host, as torchrun does. `scrambled`: dealt round-robin over the hosts."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise UsageError(f"hosts is {self.hosts}: an emulated cluster has 1 to {MAX_HOSTS}")
        if not self.per_host:
            object.__setattr__(self, "per_host", (1,) * self.hosts)
        if len(self.per_host) != self.hosts:
            raise UsageError(f"per-host lists {len(self.per_host)} hosts, but there are {self.hosts}")
        if min(self.per_host) < 1:
            raise UsageError("per-host has a host without ranks: each needs at least one")
        if self.world_size > MAX_RANKS:
            raise UsageError(f"there would be {self.world_size} ranks: one machine emulates up to {MAX_RANKS}")
        if not 1 <= self.racks <= self.hosts:
            raise UsageError(f"racks is {self.racks}: there must be 1 to {self.hosts}, one host each at least")
        if self.racks > 1 and self.trunk_rate_bps is None:
            raise UsageError("racks need a trunk rate: add --trunk-rate, for example --trunk-rate 100mbit")
        if self.racks == 1 and self.trunk_rate_bps is not None:
            raise UsageError("a trunk rate needs racks: add --racks 2 or more")
        if self.rank_order not in ("host", "scrambled"):
            raise UsageError(f"rank order {self.rank_order!r} is unknown: host or scrambled")
        if self.device not in ("cpu", "cuda"):
            raise UsageError(f"device {self.device!r} is unknown: cpu or cuda")

    @property
    def world_size(self) -> int:
        return sum(self.per_host)

    def rack_of(self, host: int) -> int:
        """Hosts fill the racks in order, as evenly as they go."""
        return host * self.racks // self.hosts

    def ranks_of(self, host: int) -> tuple[int, ...]:
        return self._placement()[host]

    def _placement(self) -> list[tuple[int, ...]]:
        placed: list[list[int]] = [[] for _ in range(self.hosts)]
        if self.rank_order == "host":
            order = [host for host, count in enumerate(self.per_host) for _ in range(count)]
        else:
            rounds = range(max(self.per_host))
            order = [host for turn in rounds for host, count in enumerate(self.per_host) if turn < count]
        for rank, host in enumerate(order):
            placed[host].append(rank)
        return [tuple(ranks) for ranks in placed]

    def describe(self) -> str:
        per_host = {*self.per_host}
        ranks = f"{self.per_host[0]}" if len(per_host) == 1 else ",".join(map(str, self.per_host))
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        text = f"{hosts} × {ranks} {'rank' if ranks == '1' else 'ranks'}, {format_rate(self.rate_bps)} links"
        if self.trunk_rate_bps is not None:
            text += f", {self.racks} racks behind {format_rate(self.trunk_rate_bps)} trunks"
        return text
