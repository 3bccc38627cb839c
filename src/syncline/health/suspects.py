"""Decide from the heartbeats of all ranks which of them are suspected of having caused a failure.

`Heartbeats._suspicion` says why a single rank is suspected. `Heartbeats.find_suspects` selects the ranks with the most
telling reasons, in the order of `_ORDER`. Clocks of different hosts are never
compared: a heartbeat carries a counter, and the rank that reads it measures its age.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch.distributed as dist

_SILENT_BEATS = 2.2
"""Beats without a new heartbeat after which a rank counts as silent."""
_READING_BEATS = 2.0
"""Longest time between two reads, in beats, that counts as time without a heartbeat."""
_INSIDE_S = 1.0
"""Time that a rank may compute inside an exchange before it starts a collective, without being suspected."""

_COLLECTIVE = ("connection", "timed out", "timeout", "gloo", "nccl", "socket", "reset by peer", "broken pipe")
"""Words in the error of a collective that failed inside an exchange, most likely because of another rank."""
_BACKENDS = ("gloo", "nccl", "caused pair closure")
"""Words that only a backend uses: gloo names its own source files."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank has got with the exchanges of one model."""

    submitted: int
    """Number of buckets submitted so far."""
    step: int
    own_s: float | None = None
    """Time of a step on this rank, without the time that it waits for others."""
    inside_s: float = 0.0
    """Time since the rank entered an exchange, if it has started no collective in it yet."""


class Beat(msgspec.Struct, frozen=True):
    """The content of one heartbeat."""

    count: int
    """A counter that changes with every heartbeat."""
    calls: dict[str, int] = {}
    """By process group: how many calls that all ranks make, such as attach, save and load, this rank has reached."""
    progress: dict[str, Progress] = {}
    """By model."""
    failed: str = ""
    own: bool = False
    """True if the failure has its cause on this rank, and not in a collective."""
    asking: bool = False
    """True while the rank looks for suspects, and therefore needs the store."""
    ended: str = ""
    """How the rank's program ended."""
    detached: bool = False
    """True if nothing is attached any more, and this is the last heartbeat."""

    @property
    def has_failed(self) -> bool:
        return bool(self.failed or self.ended)

    @property
    def is_final(self) -> bool:
        """True if no more heartbeats are to be expected."""
        return self.has_failed or self.detached


class Kind(enum.Enum):
    """The reason why a rank is suspected."""

    FAILED = "failed"
    """An error of its own."""
    ENDED = "ended"
    """Its program ended, with or without an exception."""
    VICTIM = "victim"
    """It failed in a collective too."""
    SILENT = "silent"
    UNSEEN = "unseen"
    """It has never sent a heartbeat."""
    ELSEWHERE = "elsewhere"
    """It is alive, but has not reached the collective."""
    DETACHED = "detached"
    INSIDE = "inside"
    """It is inside an exchange, but not in a collective."""
    STORE_GONE = "store-gone"
    """It served the store, or its launcher did, and the store has ended."""
    STORE_MUTE = "store-mute"
    """The store does not answer, or the link of this rank is down."""


class Suspect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank that may have caused a failure."""

    rank: int
    kind: Kind
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.why})"


class StoreState(enum.Enum):
    """Whether the job's store can be asked."""

    ANSWERS = "answers"
    MUTE = "mute"
    """No answer in time; asked again later."""
    GONE = "gone"
    """Its server has closed the connection, for good."""
    UNUSABLE = "unusable"
    """The store cannot hold heartbeats, or is no longer used."""


Reason = tuple[Kind, str]
Absence = Callable[[Beat], Reason | None]
"""Returns why a live rank is suspected, given its last heartbeat, or None if it is where it should be."""


def absent_from_call(group: str, calls: int) -> Absence:
    """Suspect ranks that have not reached this rank's last call on a process group."""

    def absence(beat: Beat) -> Reason | None:
        late = beat.calls.get(group, 0) < calls
        return (Kind.ELSEWHERE, "alive, but has not made this call") if late else None

    return absence


def absent_from_exchange(model: str, own: Callable[[], Progress]) -> Absence:
    """Suspect ranks that have submitted fewer buckets of a model than this rank, or that hang inside an exchange."""

    def absence(beat: Beat) -> Reason | None:
        progress = beat.progress.get(model)
        if progress is None:
            return Kind.DETACHED, "alive, but has nothing attached"
        if progress.submitted < own().submitted:
            return Kind.ELSEWHERE, f"alive, in step {progress.step}, but has not reached this exchange"
        if progress.inside_s > _INSIDE_S:
            return Kind.INSIDE, f"alive, but inside an exchange for {progress.inside_s:.0f} s without a collective"
        return None

    return absence


def absent_from_collective(model: str) -> Absence:
    """Suspect every live rank: a collective outside Syncline is not watched."""

    def absence(beat: Beat) -> Reason:
        progress = beat.progress.get(model)
        step = "" if progress is None else f", in step {progress.step}"
        return Kind.ELSEWHERE, f"alive{step}, but has not reached this collective"

    return absence


@dataclass(frozen=True)
class _Received:
    beat: Beat
    read_s: float
    """When the store was last read for this rank."""
    silent_s: float = 0.0
    """How long the store was read without a new heartbeat."""
    sent_after_s: float = -math.inf
    """The last read before this heartbeat was found."""


class Heartbeats:
    """The last heartbeat received from each other rank."""

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._received: dict[int, _Received] = {}
        self._all_read_s = -math.inf

    def update(self, beats: Mapping[int, Beat], *, all_ranks: bool = True) -> None:
        """Record what the store contains now: of all ranks that have ever sent a heartbeat, or of some."""
        now_s = time.monotonic()
        self._all_read_s = now_s if all_ranks else self._all_read_s
        for rank, beat in beats.items():
            before = self._received.get(rank)
            if before is None:
                self._received[rank] = _Received(beat, now_s)
            elif beat.count == before.beat.count:
                # This process may have been stopped or starved itself. It has not read the store all that time.
                reading_s = min(now_s - before.read_s, _READING_BEATS * self._beat_s)
                self._received[rank] = replace(before, read_s=now_s, silent_s=before.silent_s + reading_s)
            else:
                self._received[rank] = _Received(beat, now_s, sent_after_s=before.read_s)

    def __contains__(self, rank: int) -> bool:
        return rank in self._received

    def last(self, rank: int) -> Beat | None:
        return self._received[rank].beat if rank in self._received else None

    def silent_s(self, rank: int) -> float | None:
        """Return how long a rank has sent no heartbeat; None if none is due, before its first or after its last."""
        received = self._received.get(rank)
        return None if received is None or received.beat.is_final else received.silent_s

    def progress(self, model: str, ranks: Sequence[int]) -> dict[int, Progress]:
        """Return the progress of those ranks that have reported any."""
        beats = {rank: self._received[rank].beat for rank in ranks if rank in self._received}
        return {rank: beat.progress[model] for rank, beat in beats.items() if model in beat.progress}

    def is_known(self, rank: int, asked_s: float) -> bool:
        """Return whether a rank has failed, is silent, or has sent a heartbeat since `asked_s`."""
        received = self._received.get(rank)
        if received is None or received.read_s < asked_s:
            return False
        return received.beat.has_failed or received.sent_after_s >= asked_s or self._is_silent(received)

    def is_unclear(self, rank: int, asked_s: float) -> bool:
        """Return whether a rank may be dead, but the store has not been read long enough to tell."""
        beat = self.last(rank)
        return beat is not None and not beat.detached and not self.is_known(rank, asked_s)

    def is_done(self, rank: int) -> bool:
        """Return whether a rank needs the store no longer."""
        received = self._received.get(rank)
        if received is None:
            return False
        return (received.beat.is_final and not received.beat.asking) or self._is_silent(received)

    def have_failed(self, ranks: Sequence[int]) -> bool:
        return all(rank in self and self._received[rank].beat.has_failed for rank in ranks)

    def _is_silent(self, received: _Received) -> bool:
        return received.silent_s >= _SILENT_BEATS * self._beat_s

    def culprits(self, others: Sequence[int]) -> list[Suspect]:
        """Return the ranks that had failed by themselves, or else were silent, when the store was last read."""
        return _most_telling(self._suspects(others, lambda beat: None, asked_s=math.inf), _ORDER[:2])

    def find_suspects(
        self, rank: int, others: Sequence[int], absence: Absence, asked_s: float, store: StoreState
    ) -> list[Suspect]:
        """Return the ranks that probably made `rank` fail, judged by the heartbeats since `asked_s`."""
        if store is StoreState.UNUSABLE or (rank == 0 and store is not StoreState.ANSWERS):
            return []  # nothing can be known, and rank 0 would only suspect itself
        if store is StoreState.MUTE:
            return [Suspect(0, Kind.STORE_MUTE, "the job's store does not answer, or this rank's own link is down")]
        if store is StoreState.GONE:
            server = Suspect(0, Kind.STORE_GONE, "it or its launcher served the job's store, which has ended")
            first = self.last(0)
            if first is not None and first.failed and not first.own:
                server = Suspect(0, Kind.VICTIM, f"it failed too, and ended the job's store: {first.failed}")
            return self.culprits(others) or [server]
        return _most_telling(self._suspects(others, absence, asked_s), _ORDER)

    def _suspects(self, others: Sequence[int], absence: Absence, asked_s: float) -> list[Suspect]:
        reasons = {rank: self._suspicion(self._received.get(rank), absence, asked_s) for rank in others}
        return [Suspect(rank, *reason) for rank, reason in reasons.items() if reason is not None]

    def _suspicion(self, received: _Received | None, absence: Absence, asked_s: float) -> Reason | None:
        """Return why a rank is suspected: the first of these reasons that applies."""
        if received is None:
            return (Kind.UNSEEN, "it has sent no heartbeat") if self._all_read_s >= asked_s else None
        beat = received.beat
        if beat.ended:
            return Kind.ENDED, beat.ended
        if beat.failed:
            return (Kind.FAILED, beat.failed) if beat.own else (Kind.VICTIM, f"it failed too: {beat.failed}")
        if beat.detached:
            return Kind.DETACHED, "it had nothing attached at its last heartbeat"
        if received.sent_after_s < asked_s:
            silent = self._is_silent(received)
            return (Kind.SILENT, f"no heartbeat for {received.silent_s:.0f} s") if silent else None
        return absence(beat)


_ORDER: tuple[tuple[Kind, ...], ...] = (
    (Kind.FAILED, Kind.ENDED),
    (Kind.SILENT, Kind.UNSEEN),
    (Kind.ELSEWHERE, Kind.DETACHED, Kind.INSIDE),
    (Kind.VICTIM,),
)
"""Groups of reasons, the most telling first. Only the suspects of the first group that has any are named."""


def _most_telling(suspects: Sequence[Suspect], order: Sequence[Sequence[Kind]]) -> list[Suspect]:
    groups = ([suspect for suspect in suspects if suspect.kind in kinds] for kinds in order)
    return next((group for group in groups if group), [])


def is_backends(error: BaseException) -> bool:
    """Return whether gloo or NCCL raised an error, inside an exchange or not. Other code has timeouts too."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and _says(error, _BACKENDS))


def is_collective(error: BaseException | None) -> bool:
    """Return whether an error inside an exchange comes from a collective, and probably from another rank."""
    if isinstance(error, TimeoutError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _says(error, _COLLECTIVE)


def _says(error: BaseException, words: Sequence[str]) -> bool:
    line = str(error).partition("\n")[0].lower()
    return any(word in line for word in words)


def suspects_text(suspects: Sequence[Suspect]) -> str:
    """Return the text that names the suspects, to be appended to an error."""
    if not suspects:
        return ""
    named = ", ".join(map(str, suspects[:3])) + (f" and {len(suspects) - 3} more" if len(suspects) > 3 else "")
    return f"; suspect: {named}"
