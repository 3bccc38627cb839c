"""The parts of a network file: links, and what collectives over them were found to cost. `network` says how they make a
time."""

from __future__ import annotations

import itertools
import math

import msgspec

from syncline.exchange import WORLD, wire

LINKS = ("local", "host", "rack")
"""From the inside out: memory that a host's ranks share, a host's uplink, a rack's."""
LEVELS = (WORLD, "hosts", "local")
"""All ranks, one of each host, those of a host."""
ETHERNET_EFFICIENCY = 1448 / 1538
"""Payload of a full frame, over all that it occupies on a wire."""
MOST = 10**18
"""Of anything that is counted or measured: more is a slip of the hand, and need not stay finite when multiplied."""
_ROUNDING = 1e-9


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of link, in each direction: every host's uplink, or every rack's."""

    name: str
    bytes_per_s: float
    """Of payload."""
    low_bytes_per_s: float
    high_bytes_per_s: float
    """Between them the true rate lies with 90 % confidence."""
    burst_bytes: float = 0.0
    """What an idle link lets pass at once, before its rate counts: a shaper's credit."""
    nominal_bps: int | None = None
    """What it is sold as, in bits, where known."""

    def __post_init__(self) -> None:
        if self.name not in LINKS:
            raise ValueError(f"name: {self.name} is not a link; known: {', '.join(LINKS)}")
        for field in ("bytes_per_s", "low_bytes_per_s", "high_bytes_per_s"):
            check(self, field, positive=True)
        check_interval(self, "low_bytes_per_s", "bytes_per_s", "high_bytes_per_s")
        check(self, "burst_bytes")
        if self.nominal_bps is not None:
            check_whole(self, "nominal_bps", least=1)

    def times(self, factor: float) -> Link:
        """So many times as fast."""
        return msgspec.structs.replace(
            self,
            bytes_per_s=self.bytes_per_s * factor,
            low_bytes_per_s=self.low_bytes_per_s * factor,
            high_bytes_per_s=self.high_bytes_per_s * factor,
            nominal_bps=None if self.nominal_bps is None else round(self.nominal_bps * factor),
        )

    def at(self, rate_bps: int) -> Link:
        """The same link, sold as another rate: what it loses to headers stays the same share."""
        share = self.bytes_per_s * 8 / self.nominal_bps if self.nominal_bps else ETHERNET_EFFICIENCY
        return msgspec.structs.replace(self.times(share * rate_bps / 8 / self.bytes_per_s), nominal_bps=rate_bps)


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One size of a sweep."""

    bytes: int
    """Of the buffer."""
    sent_bytes: int
    """By the busiest rank."""
    low_s: float
    median_s: float
    high_s: float
    fitted_s: float
    repeats: int

    def __post_init__(self) -> None:
        for field in ("bytes", "sent_bytes", "repeats"):
            check_whole(self, field, least=0)
        for field in ("low_s", "median_s", "high_s", "fitted_s"):
            check(self, field)


class Switch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From so many sent bytes on, another protocol: dearer to start, cheaper per byte."""

    from_bytes: int
    startup_s: float
    own_s_per_byte: float

    def __post_init__(self) -> None:
        check_whole(self, "from_bytes", least=0)
        for field in ("startup_s", "own_s_per_byte"):
            check(self, field)


class Collective(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one kind of collective costs among the ranks of one level."""

    level: str
    kind: str
    ranks: int
    startup_s: float
    startup_low_s: float
    startup_high_s: float
    own_s_per_byte: float
    """Per byte that the busiest rank sends, whatever the links."""
    serial_s: float
    """Of the start-up, what does not hide behind a busy link."""
    load: float = 1.0
    """How much longer than its bytes alone it occupies a link: an all-to-all's flows get in each other's way."""
    residual: float = 0.0
    """Root mean square of the fit's relative errors."""
    breakpoint_bytes: int | None = None
    """Sent bytes from which the link, not the start-up, decides; null where one line fits all sizes."""
    switches: tuple[Switch, ...] = ()
    """Where start-up and own time change; by `from_bytes`."""
    points: tuple[Point, ...] = ()

    def least_s(self, sent_bytes: float) -> float:
        """What it takes alone, on links of any speed."""
        line: Collective | Switch = self
        for switch in self.switches:
            if sent_bytes >= switch.from_bytes:
                line = switch
        return line.startup_s + line.own_s_per_byte * sent_bytes

    def scaled(self, low: float, expected: float, high: float) -> Collective:
        """With start-ups that take so many times as long."""
        return msgspec.structs.replace(
            self,
            startup_s=self.startup_s * expected,
            startup_low_s=self.startup_low_s * low,
            startup_high_s=self.startup_high_s * high,
            serial_s=self.serial_s * expected,
            switches=tuple(msgspec.structs.replace(one, startup_s=one.startup_s * expected) for one in self.switches),
        )

    def without_software(self) -> Collective:
        """What if bytes cost nothing but their time on links."""
        free = tuple(msgspec.structs.replace(one, own_s_per_byte=0.0) for one in self.switches)
        return msgspec.structs.replace(self, own_s_per_byte=0.0, switches=free)

    def __post_init__(self) -> None:
        if self.kind not in wire.KINDS:
            raise ValueError(f"kind: {self.kind} is not a collective; known: {', '.join(wire.KINDS)}")
        if self.level not in LEVELS:
            raise ValueError(f"level: {self.level} is not a level; known: {', '.join(LEVELS)}")
        check_whole(self, "ranks", least=2)
        for field in ("startup_s", "startup_low_s", "startup_high_s", "own_s_per_byte", "serial_s", "residual"):
            check(self, field)
        check_interval(self, "startup_low_s", "startup_s", "startup_high_s")
        check(self, "load", positive=True)
        if self.breakpoint_bytes is not None:
            check_whole(self, "breakpoint_bytes", least=0)
        if any(before.from_bytes >= after.from_bytes for before, after in itertools.pairwise(self.switches)):
            raise ValueError("switches: must stand in the order of from_bytes, each once")


class Overlap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What several collectives at once, each on connections of its own, do to each other."""

    streams: int
    slowdown: float
    """How much longer their start-ups take."""
    crowding: float = 1.0
    """How much longer a full link takes for their bytes than for the same bytes one after the other."""

    def __post_init__(self) -> None:
        check_whole(self, "streams", least=1)
        if not (math.isfinite(self.slowdown) and 1 <= self.slowdown <= self.streams):
            raise ValueError(f"slowdown: must be between 1 and streams ({self.streams}), not {self.slowdown}")
        if not (math.isfinite(self.crowding) and self.crowding >= 1):
            raise ValueError(f"crowding: must be at least 1, not {self.crowding}")
        check(self, "crowding")


class Startup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long a tiny all-reduce takes among so many hosts: what the growth of start-ups is known from."""

    ranks: int
    seconds: float

    def __post_init__(self) -> None:
        check_whole(self, "ranks", least=2)
        check(self, "seconds")


def check(struct: msgspec.Struct, field: str, positive: bool = False) -> None:
    value = getattr(struct, field)
    if not (math.isfinite(value) and (value > 0 if positive else value >= 0)):
        raise ValueError(f"{field}: must be {'a positive number' if positive else 'a number from 0 up'}, not {value}")
    if value > MOST:
        raise ValueError(f"{field}: is too large to be meant")


def check_whole(struct: msgspec.Struct, field: str, least: int) -> None:
    value = getattr(struct, field)
    if value < least:
        raise ValueError(f"{field}: must be at least {least}, not {value}")
    if value > MOST:
        raise ValueError(f"{field}: is too large to be meant")


def check_interval(struct: msgspec.Struct, low: str, middle: str, high: str) -> None:
    bottom, value, top = (getattr(struct, field) for field in (low, middle, high))
    if bottom > value * (1 + _ROUNDING):
        raise ValueError(f"{low}: is {bottom}, above {middle} ({value})")
    if top < value * (1 - _ROUNDING):
        raise ValueError(f"{high}: is {top}, below {middle} ({value})")
