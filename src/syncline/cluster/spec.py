"""The specification of an emulated cluster: hosts, links, and the ranks of each host."""

from __future__ import annotations

import re
from dataclasses import dataclass

from syncline.errors import UsageError

MAX_HOSTS = 250  # their addresses are in one /24 network
MAX_RANKS = 1000  # each is a process with a pipe to the launching process
MAX_RATE_BPS = 34_000_000_000  # the kernel's filter has 32 bits for bytes per second

_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kmg]?)(bit|bps|bit/s)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_rate(text: str, *, fastest_bps: int = MAX_RATE_BPS) -> int:
    """Parse a rate such as `"200mbit"`; return bits per second. Units are decimal; a number without a unit is bits per
    second.

    Args:
        fastest_bps: Largest rate that is accepted. Default: the fastest link that can be emulated.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"rate {text!r} is not a rate: write 200mbit, 1gbit or 2.5gbit")
    rate_bps = round(float(match["number"]) * _UNITS[match["unit"].lower()])
    use = "emulated" if fastest_bps == MAX_RATE_BPS else "predicted"
    if rate_bps > fastest_bps:
        raise UsageError(f"rate {text!r} is over {format_rate(fastest_bps)}, the fastest link that can be {use}")
    if rate_bps < 100_000:
        if text.strip() == match["number"]:
            raise UsageError(f"rate {text!r} has no unit: add one, as in 10gbit")
        raise UsageError(f"rate {text!r} is under 100kbit, the slowest link that can be {use}")
    return rate_bps


def format_rate(rate_bps: int) -> str:
    """Format bits per second, for example as `"200mbit"`."""
    for unit in ("g", "m", "k"):
        if rate_bps >= _UNITS[unit]:
            return f"{rate_bps / _UNITS[unit]:g}{unit}bit"
    return f"{rate_bps}bit"


def parse_per_host(text: str, hosts: int) -> tuple[int, ...]:
    """Parse ranks per host: `"2"` for every host, or one number for each, as in `"3,1,2"`."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--per-host {text!r}: write one number, or one for each host, as in 3,1,2") from None
    return counts * hosts if len(counts) == 1 else counts


@dataclass(frozen=True)
class ClusterSpec:
    """Hosts behind one switch, or in racks whose switches are connected by trunks."""

    hosts: int = 4
    per_host: tuple[int, ...] = ()
    """Ranks on each host; empty means one each."""
    rate_bps: int = 200_000_000
    """Rate of each host's link, in each direction."""
    racks: int = 1
    trunk_rate_bps: int | None = None
    """Rate of each rack's trunk, in each direction; required with more than one rack."""
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
            raise UsageError(f"racks is {self.racks}: must be 1 to {self.hosts}, the number of hosts")
        if self.racks > 1 and self.trunk_rate_bps is None:
            raise UsageError("racks need a trunk rate: add --trunk-rate, for example --trunk-rate 100mbit")
        if self.racks == 1 and self.trunk_rate_bps is not None:
            raise UsageError("a trunk rate needs racks: add --racks 2 or more")
        if self.rank_order not in ("host", "scrambled"):
            raise UsageError(f"rank order {self.rank_order!r} is unknown: use host or scrambled")
        if self.device not in ("cpu", "cuda"):
            raise UsageError(f"device {self.device!r} is unknown: use cpu or cuda")

    @property
    def world_size(self) -> int:
        return sum(self.per_host)

    def rack_of(self, host: int) -> int:
        """Return the rack of a host. Hosts fill the racks in order, as evenly as possible."""
        return host * self.racks // self.hosts

    def ranks_of(self, host: int) -> tuple[int, ...]:
        slots = [(owner, turn) for owner, count in enumerate(self.per_host) for turn in range(count)]
        if self.rank_order == "scrambled":
            slots.sort(key=lambda slot: slot[1])
        return tuple(rank for rank, (owner, _) in enumerate(slots) if owner == host)

    def describe(self) -> str:
        ranks = ",".join(map(str, self.per_host if len(set(self.per_host)) > 1 else self.per_host[:1]))
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        text = f"{hosts} × {ranks} {'rank' if ranks == '1' else 'ranks'}, {format_rate(self.rate_bps)} links"
        if self.trunk_rate_bps is not None:
            text += f", {self.racks} racks behind {format_rate(self.trunk_rate_bps)} trunks"
        return text
