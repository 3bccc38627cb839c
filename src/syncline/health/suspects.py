"""What ranks say of themselves, what of it was heard, and whom that makes suspect when something fails.

No clocks are compared: a sign carries a counter, and its age is counted by whoever has heard it.
"""

from __future__ import annotations

import enum
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import torch.distributed as dist

from syncline.units import ranks_text

_SILENT_BEATS = 2.2
"""A rank that has left no new sign for so long is not heard of."""

ALARM_S = 5.0
"""So long without a heartbeat is worth a line in the log, while nothing has failed yet."""
_ALARM_BEATS = 3.0
_NAMED = 8
"""Ranks in one line, at most."""

_LISTENS_BEATS = 2.0
"""Between two looks, at most, that count as listening."""

_COLLECTIVE = ("connection", "timed out", "timeout", "gloo", "nccl", "socket", "reset by peer", "broken pipe")
"""In the words of a backend whose collective has failed: somebody else's doing, more likely than not."""
_BACKENDS = ("gloo", "nccl", "caused pair closure")
"""In the words of a backend, wherever it has failed: gloo's name its own files."""


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
    asks: bool = False
    """Whether it reads the others' signs, and needs the store for that."""
    left: str = ""
    """How its program ended."""
    idle: bool = False
    """Whether it has nothing attached any more, and leaves no more signs."""


class Kind(enum.Enum):
    """What makes a rank suspect."""

    FAILED = "failed"
    """Something of its own."""
    ENDED = "ended"
    """Its program, with an exception or without."""
    VICTIM = "victim"
    """It failed too, in a collective."""
    SILENT = "silent"
    UNSEEN = "unseen"
    """It has never left a sign."""
    ELSEWHERE = "elsewhere"
    """Alive, and not where the others wait."""
    DETACHED = "detached"
    INSIDE = "inside"
    """Of an exchange's own code."""
    STORE_GONE = "store-gone"
    """Whoever served the store, rank 0 or its launcher."""
    STORE_MUTE = "store-mute"
    """It, or the link of whoever asks."""


class Suspect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank that it may be because of."""

    rank: int
    kind: Kind
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.why})"


class Exchanging(Protocol):
    """A model's exchanges, as far as their ranks can be compared."""

    name: str
    """The same on all of its ranks."""

    def at(self) -> At: ...


@dataclass(frozen=True)
class _Heard:
    sign: Sign
    read_s: float
    """When it was looked for last: nothing is known of the time since."""
    mute_s: float = 0.0
    """For how long it was looked for and did not change."""
    left_after_s: float = -math.inf
    """When it was not there yet."""


class Heard:
    """The last signs of the other ranks."""

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._of: dict[int, _Heard] = {}
        self._read_s = -math.inf

    def note(self, signs: Mapping[int, Sign], *, everyone: bool = True) -> None:
        """What was there when somebody looked, of all ranks that have ever left one or of some."""
        now_s = time.monotonic()
        self._read_s = now_s if everyone else self._read_s
        for rank, sign in signs.items():
            before = self._of.get(rank)
            if before is None:
                self._of[rank] = _Heard(sign, now_s)
            elif sign.beat == before.sign.beat:
                # Whoever looks may have been stopped itself, or was too busy: then it has not listened all the time.
                listened_s = min(now_s - before.read_s, _LISTENS_BEATS * self._beat_s)
                self._of[rank] = replace(before, read_s=now_s, mute_s=before.mute_s + listened_s)
            else:
                self._of[rank] = _Heard(sign, now_s, left_after_s=before.read_s)

    def __contains__(self, rank: int) -> bool:
        return rank in self._of

    def at(self, name: str, ranks: Sequence[int]) -> dict[int, At]:
        """How far these ranks are with a model, those that have said so."""
        signs = {rank: self._of[rank].sign for rank in ranks if rank in self._of}
        return {rank: sign.at[name] for rank, sign in signs.items() if name in sign.at}

    def knows(self, rank: int, asked_s: float) -> bool:
        """Whether it has been there since somebody asked, has failed, or has been silent for long enough."""
        heard = self._of.get(rank)
        if heard is None or heard.read_s < asked_s:
            return False
        return _failed(heard) or heard.left_after_s >= asked_s or self._mute_s(heard) is not None

    def is_open(self, rank: int, asked_s: float) -> bool:
        """Whether it may be dead, and nobody has listened for long enough to say so."""
        heard = self._of.get(rank)
        return heard is not None and not heard.sign.idle and not self.knows(rank, asked_s)

    def is_through(self, rank: int) -> bool:
        """Whether nobody needs to stay because of it."""
        heard = self._of.get(rank)
        if heard is None:
            return False
        done = _failed(heard) or heard.sign.idle
        return (done and not heard.sign.asks) or self._mute_s(heard) is not None

    def unheard_s(self, rank: int) -> float | None:
        """For how long it has sent no heartbeat; None where none is to be expected: it has not begun, or said that
        there will be no more."""
        heard = self._of.get(rank)
        return None if heard is None or _failed(heard) or heard.sign.idle else heard.mute_s

    def _mute_s(self, heard: _Heard) -> float | None:
        """For how long it has left no sign, where that is long."""
        return heard.mute_s if heard.mute_s >= _SILENT_BEATS * self._beat_s else None

    def known(self, others: Sequence[int]) -> list[Suspect]:
        """Of these ranks, those that were suspect when they were heard of last, whatever has become of them since."""
        heard = {rank: self._of[rank] for rank in others if rank in self._of}
        guilty = [told for rank, one in heard.items() if (told := _guilt(rank, one.sign)) is not None]
        mute = {rank: self._mute_s(one) for rank, one in heard.items() if not (_failed(one) or one.sign.idle)}
        return guilty or [_silent(rank, seconds) for rank, seconds in mute.items() if seconds is not None]

    def failed_of(self, rank: int) -> str:
        """What has failed there, but not by itself; nothing, if nothing has."""
        heard = self._of.get(rank)
        return heard.sign.failed if heard is not None and not heard.sign.own else ""

    def are_victims(self, others: Sequence[int]) -> bool:
        """Whether all of these have failed: who has not may be about to, or may be whom they wait for."""
        return all(rank in self._of and _failed(self._of[rank]) for rank in others)

    def suspects(
        self, others: Sequence[int], mine: Sign, place: Exchanging | str, asked_s: float, *, outside: bool = False
    ) -> list[Suspect]:
        """Of these ranks, those because of which one fails whose own sign is `mine`: in an exchange, or where a group
        meets, or `outside`, in a collective of which nothing is known. What was heard before it asked does not count.
        """
        mute, guilty, behind, earlier = [], [], [], []
        for rank in others:
            heard = self._of.get(rank)
            if heard is None:
                if self._read_s >= asked_s:
                    mute.append(Suspect(rank, Kind.UNSEEN, "it has left no sign here"))
                continue
            sign = heard.sign
            if (told := _guilt(rank, sign)) is not None:
                guilty.append(told)
            elif sign.failed:
                earlier.append(Suspect(rank, Kind.VICTIM, f"it failed too: {sign.failed}"))
            elif sign.idle:
                behind.append(Suspect(rank, Kind.DETACHED, "it had nothing attached when it was heard of last"))
            elif heard.left_after_s < asked_s:
                if (mute_s := self._mute_s(heard)) is not None:
                    mute.append(_silent(rank, mute_s))
            elif outside:
                why = f"alive{_in_step(sign, place)}, and has not come to this collective"
                behind.append(Suspect(rank, Kind.ELSEWHERE, why))
            elif (told := self._behind(rank, sign, mine.met, place)) is not None:
                behind.append(told)
        return guilty or mute or behind or earlier

    def _behind(self, rank: int, sign: Sign, met: Mapping[str, int], place: Exchanging | str) -> Suspect | None:
        if isinstance(place, str):
            late = sign.met.get(place, 0) < met.get(place, 0)
            return Suspect(rank, Kind.ELSEWHERE, "alive, and has not come here") if late else None
        mine, theirs = place.at(), sign.at.get(place.name)
        if theirs is None:
            return Suspect(rank, Kind.DETACHED, "alive, and has nothing attached")
        if theirs.submitted < mine.submitted:
            why = f"alive, in step {theirs.step}, and has not come to this exchange"
            return Suspect(rank, Kind.ELSEWHERE, why)
        if theirs.inside_s > self._beat_s:
            why = f"alive, and has been inside of an exchange for {theirs.inside_s:.0f} s without a collective"
            return Suspect(rank, Kind.INSIDE, why)
        return None


class Silence:
    """Which ranks have stopped sending heartbeats: one line when they do, and one when they are back."""

    def __init__(self, rank: int, beat_s: float) -> None:
        self._rank, self._beat_s = rank, beat_s
        self._since_s: dict[int, float] = {}
        """Silent ranks, and since when they are."""
        self._alarms: Counter[int] = Counter()

    def changes(self, heard: Heard, ranks: Sequence[int]) -> list[str]:
        """What is to be logged since the last time."""
        now_s = time.monotonic()
        silent: list[int] = []
        lines = []
        for rank in ranks:
            unheard_s = heard.unheard_s(rank)
            if unheard_s is None:
                self._since_s.pop(rank, None)
            elif rank not in self._since_s and unheard_s >= self._patience_s(rank):
                silent.append(rank)
                self._since_s[rank] = now_s - unheard_s
                self._alarms[rank] += 1
            elif rank in self._since_s and unheard_s < self._beat_s:
                since_s = self._since_s.pop(rank)
                lines.append(
                    f"rank {self._rank}: rank {rank} is back after {now_s - since_s:.0f} s without a heartbeat"
                )
        if silent:
            least_s = min(now_s - self._since_s[rank] for rank in silent)
            lines.append(
                f"rank {self._rank}: no heartbeat from {ranks_text(silent, _NAMED)} for {least_s:.0f} s: the process "
                "is stopped or has ended, or its host cannot be reached"
            )
        return lines

    def _patience_s(self, rank: int) -> float:
        """Longer for a rank that has come back several times: it holds Python's lock for seconds, and is no news."""
        return max(ALARM_S, _ALARM_BEATS * self._beat_s) * 2.0 ** max(0, self._alarms[rank] - 1)


def _failed(heard: _Heard) -> bool:
    return bool(heard.sign.failed or heard.sign.left)


def _guilt(rank: int, sign: Sign) -> Suspect | None:
    if sign.left:
        return Suspect(rank, Kind.ENDED, sign.left)
    return Suspect(rank, Kind.FAILED, sign.failed) if sign.failed and sign.own else None


def _in_step(sign: Sign, place: Exchanging | str) -> str:
    at = None if isinstance(place, str) else sign.at.get(place.name)
    return "" if at is None else f", in step {at.step}"


def _silent(rank: int, seconds: float) -> Suspect:
    return Suspect(rank, Kind.SILENT, f"no sign of life for {seconds:.0f} s")


def is_backends(error: BaseException) -> bool:
    """Whether gloo or NCCL raised it, wherever that was. Other things time out, and lose connections, too."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and _says(error, _BACKENDS))


def is_collective(error: BaseException | None) -> bool:
    """Whether a backend raised it, inside of an exchange, because of another rank, as far as its words tell."""
    if isinstance(error, TimeoutError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _says(error, _COLLECTIVE)


def _says(error: BaseException, words: Sequence[str]) -> bool:
    line = str(error).partition("\n")[0].lower()
    return any(word in line for word in words)


def suspected(suspects: Sequence[Suspect]) -> str:
    """To be appended to what failed."""
    if not suspects:
        return ""
    named = ", ".join(map(str, suspects[:3])) + (f" and {len(suspects) - 3} more" if len(suspects) > 3 else "")
    return f"; suspect: {named}"
