"""The parts of a network: links, and the measured cost of collectives. `network` defines the time they add up to."""

from __future__ import annotations

import itertools
from typing import Annotated

import msgspec
from msgspec.structs import replace

from syncline.exchange import WORLD, wire
from syncline.records.fields import MOST, Amount, Count, PositiveAmount, PositiveCount, Seconds, one_of

LINKS = ("local", "host", "rack")
"""Kinds of links, from the inside out: shared memory of a host, the uplink of a host, the uplink of a rack."""
LEVELS = (WORLD, "hosts", "local")
"""All ranks, one rank of each host, the ranks of a host."""
ETHERNET_EFFICIENCY = 1448 / 1538
"""Payload of a full frame over its size on the wire."""
_ROUNDING = 1e-9
_Ranks = Annotated[int, msgspec.Meta(ge=2, le=MOST)]


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All links of one kind: their rate and burst in each direction."""

    name: Annotated[str, one_of(*LINKS)]
    bytes_per_s: PositiveAmount
    """Rate of payload."""
    low_bytes_per_s: PositiveAmount
    high_bytes_per_s: PositiveAmount
    """Upper end of the 90 % confidence interval, which begins at `low_bytes_per_s`."""
    burst_bytes: Amount = 0.0
    """Bytes that an idle link carries before its rate applies: the credit of a traffic shaper."""
    nominal_bps: PositiveCount | None = None
    """Advertised rate in bits per second, if known."""

    def __post_init__(self) -> None:
        _check_interval(self, "low_bytes_per_s", "bytes_per_s", "high_bytes_per_s")

    def times(self, factor: float) -> Link:
        """Return the link with its rates multiplied by `factor`."""
        rates = {name: getattr(self, name) * factor for name in ("bytes_per_s", "low_bytes_per_s", "high_bytes_per_s")}
        nominal_bps = None if self.nominal_bps is None else round(self.nominal_bps * factor)
        return replace(self, nominal_bps=nominal_bps, **rates)

    def at(self, rate_bps: int) -> Link:
        """Return the link with another nominal rate, of which headers take the same share as now."""
        share = self.bytes_per_s * 8 / self.nominal_bps if self.nominal_bps else ETHERNET_EFFICIENCY
        return replace(self.times(share * rate_bps / 8 / self.bytes_per_s), nominal_bps=rate_bps)


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The measured times of one size of a collective."""

    bytes: Count
    """Size of the buffer."""
    sent_bytes: Count
    """Bytes sent by the busiest rank."""
    low_s: Seconds
    median_s: Seconds
    high_s: Seconds
    fitted_s: Seconds
    repeats: Count


class Switch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A protocol that applies from `from_bytes` sent bytes on, with a longer start-up and less time per byte."""

    from_bytes: Count
    startup_s: Seconds
    own_s_per_byte: Seconds


class Collective(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cost of one kind of collective among the ranks of one level."""

    level: Annotated[str, one_of(*LEVELS)]
    kind: Annotated[str, one_of(*wire.KINDS, wire.PACED, wire.REDUCE_SCATTER)]
    ranks: _Ranks
    startup_s: Seconds
    startup_low_s: Seconds
    startup_high_s: Seconds
    own_s_per_byte: Seconds
    """Time per byte that the busiest rank sends, on infinitely fast links."""
    serial_s: Seconds
    """The part of the start-up that does not overlap with the transfer."""
    load: PositiveAmount = 1.0
    """Time that it occupies a link, divided by the time of its bytes: flows of an all-to-all slow each other down."""
    residual: Amount = 0.0
    """Root mean square of the fit's relative errors."""
    breakpoint_bytes: Count | None = None
    """Sent bytes from which the link decides, not the start-up; null if one line fits all sizes."""
    switches: tuple[Switch, ...] = ()
    """Changes of protocol, sorted by `from_bytes`."""
    points: tuple[Point, ...] = ()

    def least_s(self, sent_bytes: float) -> float:
        """Return the time of this collective alone, on infinitely fast links."""
        line: Collective | Switch = self
        for switch in self.switches:
            if sent_bytes >= switch.from_bytes:
                line = switch
        return line.startup_s + line.own_s_per_byte * sent_bytes

    def scaled(self, low: float, expected: float, high: float) -> Collective:
        """Return the collective with its start-ups multiplied: lower end, expected value and upper end."""
        return replace(
            self,
            startup_s=self.startup_s * expected,
            startup_low_s=self.startup_low_s * low,
            startup_high_s=self.startup_high_s * high,
            serial_s=self.serial_s * expected,
            switches=tuple(replace(switch, startup_s=switch.startup_s * expected) for switch in self.switches),
        )

    def without_software(self) -> Collective:
        """Return the collective as if bytes took only their time on links."""
        switches = tuple(replace(switch, own_s_per_byte=0.0) for switch in self.switches)
        return replace(self, own_s_per_byte=0.0, switches=switches)

    def __post_init__(self) -> None:
        _check_interval(self, "startup_low_s", "startup_s", "startup_high_s")
        if any(before.from_bytes >= after.from_bytes for before, after in itertools.pairwise(self.switches)):
            raise ValueError("switches: must be sorted by from_bytes, without repetitions")


class Overlap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How several concurrent collectives, each with its own connections, slow each other down."""

    streams: PositiveCount
    slowdown: float
    """Time of their start-ups, divided by the time of one alone."""
    crowding: Annotated[float, msgspec.Meta(ge=1, le=MOST)] = 1.0
    """Time of their bytes on a full link, divided by the time if the collectives ran one after the other."""

    def __post_init__(self) -> None:
        if not 1 <= self.slowdown <= self.streams:
            raise ValueError(f"slowdown: must be between 1 and streams ({self.streams}), not {self.slowdown}")


class Beside(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How collectives inside hosts and between hosts slow each other down: time while both run, divided by the time
    alone. They share no link, but processors and, on a GPU, its memory and queues."""

    inside: Annotated[float, msgspec.Meta(ge=1, le=MOST)]
    between: Annotated[float, msgspec.Meta(ge=1, le=MOST)]


class Startup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The time of a tiny all-reduce among some of the hosts. It shows how start-ups grow with the number of hosts."""

    ranks: _Ranks
    seconds: Seconds


def _check_interval(struct: msgspec.Struct, low: str, middle: str, high: str) -> None:
    bottom, value, top = (getattr(struct, field) for field in (low, middle, high))
    if bottom > value * (1 + _ROUNDING):
        raise ValueError(f"{low}: is {bottom}, above {middle} ({value})")
    if top < value * (1 - _ROUNDING):
        raise ValueError(f"{high}: is {top}, below {middle} ({value})")
