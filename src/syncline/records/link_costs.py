"""The parts of a network: links, and the measured cost of collectives. `network` defines the time they add up to."""

from __future__ import annotations

import itertools
import math

import msgspec

from syncline.exchange import WORLD, wire
from syncline.records.checks import check_number, check_whole

LINKS = ("local", "host", "rack")
"""Kinds of links, from the inside out: shared memory of a host, the uplink of a host, the uplink of a rack."""
LEVELS = (WORLD, "hosts", "local")
"""All ranks, one rank of each host, the ranks of a host."""
ETHERNET_EFFICIENCY = 1448 / 1538
"""Payload of a full frame over its size on the wire."""
_ROUNDING = 1e-9


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All links of one kind: their rate and burst in each direction."""

    name: str
    bytes_per_s: float
    """Rate of payload."""
    low_bytes_per_s: float
    high_bytes_per_s: float
    """Upper end of the 90 % confidence interval, which begins at `low_bytes_per_s`."""
    burst_bytes: float = 0.0
    """Bytes that an idle link carries before its rate applies: the credit of a traffic shaper."""
    nominal_bps: int | None = None
    """Advertised rate in bits per second, if known."""

    def __post_init__(self) -> None:
        if self.name not in LINKS:
            raise ValueError(f"name: {self.name} is not a link; known: {', '.join(LINKS)}")
        for field in ("bytes_per_s", "low_bytes_per_s", "high_bytes_per_s"):
            check_number(getattr(self, field), field, positive=True)
        _check_interval(self, "low_bytes_per_s", "bytes_per_s", "high_bytes_per_s")
        check_number(self.burst_bytes, "burst_bytes")
        if self.nominal_bps is not None:
            check_whole(self.nominal_bps, "nominal_bps", least=1)

    def times(self, factor: float) -> Link:
        """Return the link with its rates multiplied by `factor`."""
        return msgspec.structs.replace(
            self,
            bytes_per_s=self.bytes_per_s * factor,
            low_bytes_per_s=self.low_bytes_per_s * factor,
            high_bytes_per_s=self.high_bytes_per_s * factor,
            nominal_bps=None if self.nominal_bps is None else round(self.nominal_bps * factor),
        )

    def at(self, rate_bps: int) -> Link:
        """Return the link with another nominal rate, of which headers take the same share as now."""
        share = self.bytes_per_s * 8 / self.nominal_bps if self.nominal_bps else ETHERNET_EFFICIENCY
        return msgspec.structs.replace(self.times(share * rate_bps / 8 / self.bytes_per_s), nominal_bps=rate_bps)


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The measured times of one size of a collective."""

    bytes: int
    """Size of the buffer."""
    sent_bytes: int
    """Bytes sent by the busiest rank."""
    low_s: float
    median_s: float
    high_s: float
    fitted_s: float
    repeats: int

    def __post_init__(self) -> None:
        for field in ("bytes", "sent_bytes", "repeats"):
            check_whole(getattr(self, field), field, least=0)
        for field in ("low_s", "median_s", "high_s", "fitted_s"):
            check_number(getattr(self, field), field)


class Switch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A protocol that applies from `from_bytes` sent bytes on, with a longer start-up and less time per byte."""

    from_bytes: int
    startup_s: float
    own_s_per_byte: float

    def __post_init__(self) -> None:
        check_whole(self.from_bytes, "from_bytes", least=0)
        for field in ("startup_s", "own_s_per_byte"):
            check_number(getattr(self, field), field)


class Collective(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cost of one kind of collective among the ranks of one level."""

    level: str
    kind: str
    ranks: int
    startup_s: float
    startup_low_s: float
    startup_high_s: float
    own_s_per_byte: float
    """Time per byte that the busiest rank sends, on infinitely fast links."""
    serial_s: float
    """The part of the start-up that does not overlap with the transfer."""
    load: float = 1.0
    """Time that it occupies a link, over the time of its bytes alone: the flows of an all-to-all disturb each other."""
    residual: float = 0.0
    """Root mean square of the fit's relative errors."""
    breakpoint_bytes: int | None = None
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
        return msgspec.structs.replace(
            self,
            startup_s=self.startup_s * expected,
            startup_low_s=self.startup_low_s * low,
            startup_high_s=self.startup_high_s * high,
            serial_s=self.serial_s * expected,
            switches=tuple(
                msgspec.structs.replace(switch, startup_s=switch.startup_s * expected) for switch in self.switches
            ),
        )

    def without_software(self) -> Collective:
        """Return the collective as if bytes took only their time on links."""
        switches = tuple(msgspec.structs.replace(switch, own_s_per_byte=0.0) for switch in self.switches)
        return msgspec.structs.replace(self, own_s_per_byte=0.0, switches=switches)

    def __post_init__(self) -> None:
        if self.kind not in wire.KINDS:
            raise ValueError(f"kind: {self.kind} is not a collective; known: {', '.join(wire.KINDS)}")
        if self.level not in LEVELS:
            raise ValueError(f"level: {self.level} is not a level; known: {', '.join(LEVELS)}")
        check_whole(self.ranks, "ranks", least=2)
        for field in ("startup_s", "startup_low_s", "startup_high_s", "own_s_per_byte", "serial_s", "residual"):
            check_number(getattr(self, field), field)
        _check_interval(self, "startup_low_s", "startup_s", "startup_high_s")
        check_number(self.load, "load", positive=True)
        if self.breakpoint_bytes is not None:
            check_whole(self.breakpoint_bytes, "breakpoint_bytes", least=0)
        if any(before.from_bytes >= after.from_bytes for before, after in itertools.pairwise(self.switches)):
            raise ValueError("switches: must be sorted by from_bytes, without repetitions")


class Overlap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How several concurrent collectives, each with its own connections, slow each other down."""

    streams: int
    slowdown: float
    """Time of their start-ups, over the time of one alone."""
    crowding: float = 1.0
    """Time of their bytes on a full link, over the time of the same bytes one collective after the other."""

    def __post_init__(self) -> None:
        check_whole(self.streams, "streams", least=1)
        if not (math.isfinite(self.slowdown) and 1 <= self.slowdown <= self.streams):
            raise ValueError(f"slowdown: must be between 1 and streams ({self.streams}), not {self.slowdown}")
        if not (math.isfinite(self.crowding) and self.crowding >= 1):
            raise ValueError(f"crowding: must be at least 1, not {self.crowding}")
        check_number(self.crowding, "crowding")


class Startup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The time of a tiny all-reduce among some of the hosts. It shows how start-ups grow with the number of hosts."""

    ranks: int
    seconds: float

    def __post_init__(self) -> None:
        check_whole(self.ranks, "ranks", least=2)
        check_number(self.seconds, "seconds")


def _check_interval(struct: msgspec.Struct, low: str, middle: str, high: str) -> None:
    bottom, value, top = (getattr(struct, field) for field in (low, middle, high))
    if bottom > value * (1 + _ROUNDING):
        raise ValueError(f"{low}: is {bottom}, above {middle} ({value})")
    if top < value * (1 - _ROUNDING):
        raise ValueError(f"{high}: is {top}, below {middle} ({value})")
