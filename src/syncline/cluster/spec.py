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
    """Parse a rate such as `"200mbit"`, with a decimal unit or none; return bits per second, up to `fastest_bps`."""
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
    return counts * min(hosts, MAX_HOSTS + 1) if len(counts) == 1 else counts  # `ClusterSpec` refuses more


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
        if not self.per_host:
            object.__setattr__(self, "per_host", (1,) * min(self.hosts, MAX_HOSTS + 1))
        hosts, racks, trunk, counts = self.hosts, self.racks, self.trunk_rate_bps, self.per_host
        problems = {
            f"hosts is {hosts}: an emulated cluster has 1 to {MAX_HOSTS}": not 1 <= hosts <= MAX_HOSTS,
            f"per-host lists {len(counts)} hosts, but there are {hosts}": len(counts) != hosts,
            "per-host has a host without ranks: each needs at least one": any(count < 1 for count in counts),
            f"there would be {sum(counts)} ranks: one machine emulates up to {MAX_RANKS}": sum(counts) > MAX_RANKS,
            f"racks is {racks}: must be 1 to {hosts}, the number of hosts": not 1 <= racks <= hosts,
            "racks need a trunk rate: add --trunk-rate, for example --trunk-rate 100mbit": racks > 1 and trunk is None,
            "a trunk rate needs racks: add --racks 2 or more": racks == 1 and trunk is not None,
        }
        for name, known in (("rank_order", ("host", "scrambled")), ("device", ("cpu", "cuda"))):
            value = getattr(self, name)
            problems[f"{name.replace('_', ' ')} {value!r} is unknown: use {' or '.join(known)}"] = value not in known
        for problem, is_there in problems.items():
            if is_there:
                raise UsageError(problem)

    @property
    def world_size(self) -> int:
        return sum(self.per_host)

    def rack_of(self, host: int) -> int:
        """Return the rack of a host. Hosts fill the racks in order, as evenly as possible."""
        return host * self.racks // self.hosts

    @property
    def slots(self) -> list[tuple[int, int]]:
        """The host and the local rank of each rank."""
        slots = [(host, local_rank) for host, count in enumerate(self.per_host) for local_rank in range(count)]
        return slots if self.rank_order == "host" else sorted(slots, key=lambda slot: slot[1])

    def ranks_of(self, host: int) -> tuple[int, ...]:
        return tuple(rank for rank, (owner, _) in enumerate(self.slots) if owner == host)

    def describe(self) -> str:
        ranks = ",".join(map(str, self.per_host if len(set(self.per_host)) > 1 else self.per_host[:1]))
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        text = f"{hosts} × {ranks} {'rank' if ranks == '1' else 'ranks'}, {format_rate(self.rate_bps)} links"
        if self.trunk_rate_bps is not None:
            text += f", {self.racks} racks behind {format_rate(self.trunk_rate_bps)} trunks"
        return text
