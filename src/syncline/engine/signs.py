"""What ranks say of themselves, what of it was heard, and whom that makes suspect when something fails.

No clocks are compared: a sign carries a counter, and its age is counted by whoever has heard it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import torch.distributed as dist

from syncline.errors import first_line

_SILENT_BEATS = 2.2
"""A rank that has left no new sign for so long is not heard of."""

_COLLECTIVE = ("connection", "timed out", "timeout", "gloo", "nccl", "socket", "reset by peer", "broken pipe")
"""In the words of a backend whose collective has failed: somebody else's doing, more likely than not."""


class At(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank is with one model's exchanges."""

    submitted: int
    step: int
    own_s: float | None = None
    """What a step takes this rank itself, without what it waits for others."""
    inside_s: float = 0.0
    """For how long it has been inside of an exchange without coming to a collective."""


class Sign(msgspec.Struct, frozen=True):
    """What a rank says of itself."""

    beat: int
    met: dict[str, int] = {}
    """By group, how often it has come to where all of its ranks meet, to attach, save, load and so on."""
    at: dict[str, At] = {}
    failed: str = ""
    own: bool = False
    """Whether what failed was its own doing, and not that of a collective."""
    left: str = ""
    """What ended its program."""


class Suspect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank that it may be because of."""

    rank: int
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.why})"


class Exchanging(Protocol):
    """A model's exchanges, as far as their ranks can be compared."""

    name: str
    """The same on all of its ranks."""

    def at(self) -> At: ...


@dataclass
class _Heard:
    sign: Sign
    first_s: float
    read_s: float
    """When it was looked for last: nothing is known of the time since."""
    changed_s: float | None = None


class Heard:
    """The last signs of the other ranks."""

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._of: dict[int, _Heard] = {}

    def note(self, rank: int, sign: Sign) -> None:
        now_s, before = time.monotonic(), self._of.get(rank)
        if before is None:
            self._of[rank] = _Heard(sign, now_s, now_s)
        elif sign.beat == before.sign.beat:
            self._of[rank] = replace(before, sign=sign, read_s=now_s)
        elif now_s - before.read_s >= _SILENT_BEATS * self._beat_s:  # it may have been left long ago
            self._of[rank] = _Heard(sign, now_s, now_s)
        else:
            self._of[rank] = replace(before, sign=sign, read_s=now_s, changed_s=now_s)

    def __contains__(self, rank: int) -> bool:
        return rank in self._of

    def at(self, name: str, ranks: Sequence[int]) -> dict[int, At]:
        """How far these ranks are with a model, those that have said so."""
        signs = {rank: self._of[rank].sign for rank in ranks if rank in self._of}
        return {rank: sign.at[name] for rank, sign in signs.items() if name in sign.at}

    def knows(self, rank: int) -> bool:
        """Whether it is there, has failed, or has been silent for long enough."""
        heard = self._of.get(rank)
        if heard is None:
            return False
        return bool(heard.sign.failed or heard.sign.left) or self._fresh(heard) or self._mute_s(heard) is not None

    def _fresh(self, heard: _Heard) -> bool:
        return heard.changed_s is not None and time.monotonic() - heard.changed_s < _SILENT_BEATS * self._beat_s

    def _mute_s(self, heard: _Heard) -> float | None:
        """For how long it has left no sign, where that is long."""
        mute_s = heard.read_s - (heard.changed_s or heard.first_s)
        return mute_s if mute_s >= _SILENT_BEATS * self._beat_s else None

    def suspects(self, others: Sequence[int], mine: Sign, place: Exchanging | str) -> list[Suspect]:
        """Of these ranks, those because of which one fails whose own sign is `mine`: in an exchange, or where a group
        meets."""
        mute, guilty, behind, earlier = [], [], [], []
        for rank in others:
            heard = self._of.get(rank)
            if heard is None:
                mute.append(Suspect(rank, "it has left no sign here"))
                continue
            sign = heard.sign
            if sign.left:
                guilty.append(Suspect(rank, f"its program ended: {sign.left}"))
            elif sign.failed and sign.own:
                guilty.append(Suspect(rank, sign.failed))
            elif sign.failed:
                earlier.append(Suspect(rank, f"it failed too: {sign.failed}"))
            elif not self._fresh(heard):
                seconds = self._mute_s(heard)
                mute.append(Suspect(rank, "no sign of life" + ("" if seconds is None else f" for {seconds:.0f} s")))
            elif (told := self._behind(sign, mine.met, place)) is not None:
                behind.append(Suspect(rank, told))
        return guilty or mute or behind or earlier

    def _behind(self, sign: Sign, met: Mapping[str, int], place: Exchanging | str) -> str | None:
        if isinstance(place, str):
            return "alive, and has not come here" if sign.met.get(place, 0) < met.get(place, 0) else None
        mine, theirs = place.at(), sign.at.get(place.name)
        if theirs is None:
            return "alive, and has nothing attached"
        if theirs.submitted < mine.submitted:
            return f"alive, in step {theirs.step}, and has not come to this exchange"
        if theirs.inside_s > self._beat_s:
            return f"alive, and has been inside of an exchange for {theirs.inside_s:.0f} s without a collective"
        return None


def is_collective(error: BaseException | None) -> bool:
    """Whether a backend raised it because of another rank, as far as its words tell."""
    if isinstance(error, TimeoutError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    words = first_line(error).lower()
    return isinstance(error, dist.DistError) or any(word in words for word in _COLLECTIVE)


def suspected(suspects: Sequence[Suspect]) -> str:
    """To be appended to what failed."""
    if not suspects:
        return ""
    named = ", ".join(map(str, suspects[:3])) + (f" and {len(suspects) - 3} more" if len(suspects) > 3 else "")
    return f"; suspect: {named}"
