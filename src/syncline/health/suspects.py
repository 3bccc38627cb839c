"""Decide from the heartbeats of all ranks which of them are suspected of having caused a failure.

`Heartbeats._reason` says why a single rank is suspected. `Heartbeats.find_suspects` selects the ranks with the most
telling reasons, in the order of `_ORDER`. Clocks of different hosts are never compared: a heartbeat carries a counter,
and the rank that reads it measures its age.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import torch.distributed as dist

from syncline.records.failure_report import Kind, Suspect
from syncline.units import ranks_text

ALARM_S = 5.0  # time without a heartbeat, or without an answer from the store, that is worth a line in the log
_ALARM_BEATS, _SILENT_BEATS, _READING_BEATS = 3.0, 2.2, 2.0
"""Times in beats: the least time for that line, the time after which a rank that failed calls another one silent, and
the longest time between two reads that counts as time without a heartbeat."""
_INSIDE_S = 1.0
"""Time that a rank may compute inside an exchange before it starts a collective, without being suspected."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank has got with the exchanges of one model."""

    submitted: int  # buckets so far
    step: int
    own_s: float | None = None  # time of a step on this rank, without the time that it waits for others
    inside_s: float = 0.0  # time since the rank entered an exchange, if it has started no collective in it yet


class Beat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of one heartbeat."""

    count: int  # changes with every heartbeat
    calls: dict[str, int] = {}
    """By process group: how many calls that all ranks make, such as attach, save and load, this rank has reached."""
    progress: dict[str, Progress] = {}  # by model
    kind: Kind | None = None
    """FAILED, VICTIM or ENDED. Then no more heartbeats need to follow."""
    why: str = ""
    asking: bool = False  # True while the rank looks for suspects, and therefore needs the store


StoreState = Literal["answers", "mute", "gone", "unusable"]
"""Whether the store can be asked. A mute one is asked again later; the server of one that is gone has ended."""


class Awaited(NamedTuple):
    """The call or exchange in which a rank failed while it waited. Live ranks that did not reach it are suspected."""

    what: str
    """`call` for one that all ranks make, `exchange`, or `collective` for one outside Syncline."""
    name: str  # of the call's process group, or of the model
    reached: int = 0  # calls, or buckets, by the rank itself


@dataclass
class _Peer:
    beat: Beat
    read_s: float  # when the store was last read for this rank
    silent_s: float = 0.0  # how long the store was read without a new heartbeat
    sent_after_s: float = -math.inf  # the last read before this heartbeat was found
    alarmed: bool = False  # whether its current silence has been logged
    alarms: int = 0


class Heartbeats:
    """The last heartbeat received from each other rank."""

    def __init__(self, beat_s: float) -> None:
        self._silent_s, self._reading_s = _SILENT_BEATS * beat_s, _READING_BEATS * beat_s
        self._alarm_s = max(ALARM_S, _ALARM_BEATS * beat_s)
        self._peers: dict[int, _Peer] = {}
        self._all_read_s = -math.inf

    def update(self, beats: Mapping[int, Beat], *, all_ranks: bool = True) -> list[str]:
        """Record what the store contains now: of all ranks that have ever sent a heartbeat, or of some.

        Returns lines to log: which ranks have fallen silent, and which are back.
        """
        now_s = time.monotonic()
        self._all_read_s = now_s if all_ranks else self._all_read_s
        lines, silent = [], []
        for rank, beat in beats.items():
            peer = self._peers.setdefault(rank, _Peer(beat, now_s))
            # This process may have been stopped or starved itself. It has not read the store all that time.
            peer.silent_s += min(now_s - peer.read_s, self._reading_s)
            # A rank that has come back before probably runs code that holds Python's lock for seconds.
            alarm_s = self._alarm_s * 2.0 ** max(0, peer.alarms - 1)
            if beat.count != peer.beat.count:
                if peer.alarmed and beat.kind is None:
                    lines.append(f"rank {rank} is back after {peer.silent_s:.0f} s without a heartbeat")
                peer.beat, peer.sent_after_s, peer.silent_s, peer.alarmed = beat, peer.read_s, 0.0, False
            elif peer.silent_s >= alarm_s and not peer.alarmed and beat.kind is None:
                peer.alarmed = True
                peer.alarms += 1
                silent.append(rank)
            peer.read_s = now_s
        if silent:
            least_s = min(self._peers[rank].silent_s for rank in silent)
            lines.append(
                f"no heartbeat from {ranks_text(silent, 8)} for {least_s:.0f} s: the process is stopped or "
                "has ended, or its host cannot be reached"
            )
        return lines

    def progress(self, model: str) -> dict[int, Progress]:
        """Return the progress of those ranks that have reported any."""
        return {rank: peer.beat.progress[model] for rank, peer in self._peers.items() if model in peer.beat.progress}

    def judge(self, rank: int, asked_s: float = -math.inf) -> Kind | None:
        """Return the state of a rank, ELSEWHERE if it is alive, or None if the store has not been read enough since
        `asked_s` to tell."""
        reason = self._reason(rank, asked_s)
        return None if reason is None else reason[0]

    def is_done(self, rank: int) -> bool:
        """Return whether a rank no longer needs the store."""
        peer = self._peers.get(rank)
        if peer is None:
            return False
        return peer.silent_s >= self._silent_s or (peer.beat.kind is not None and not peer.beat.asking)

    def find_suspects(
        self, rank: int, others: Sequence[int], awaited: Awaited, asked_s: float, store: StoreState
    ) -> list[Suspect]:
        """Return the ranks that probably made `rank` fail, judged by the heartbeats since `asked_s`."""
        if store == "unusable" or (rank == 0 and store != "answers"):
            return []  # nothing can be known, and rank 0 would only suspect itself
        if store == "mute":
            return [Suspect(0, Kind.STORE_MUTE, "the job's store does not answer, or this rank's own link is down")]
        if store == "answers":
            reasons = {other: self._reason(other, asked_s, awaited) for other in others}
            return _most_telling(reasons, _ORDER)
        last = {other: self._reason(other, -math.inf) for other in others}
        server = Suspect(0, Kind.STORE_GONE, "it or its launcher served the job's store, which has ended")
        return _most_telling(last, _CULPRITS) or _most_telling({0: last.get(0)}, [[Kind.VICTIM]]) or [server]

    def _reason(self, rank: int, asked_s: float, awaited: Awaited | None = None) -> tuple[Kind, str] | None:
        """Return why a rank is suspected: the first of these reasons that applies."""
        peer = self._peers.get(rank)
        if peer is None:
            return (Kind.UNSEEN, "it has sent no heartbeat") if self._all_read_s >= asked_s else None
        beat = peer.beat
        if peer.read_s < asked_s:
            return None
        if beat.kind is not None:
            return beat.kind, f"it failed too: {beat.why}" if beat.kind is Kind.VICTIM else beat.why
        if peer.silent_s >= self._silent_s:
            return Kind.SILENT, f"no heartbeat for {peer.silent_s:.0f} s"
        if peer.sent_after_s < asked_s:
            return None
        progress = None if awaited is None else beat.progress.get(awaited.name)
        alive = "alive" if progress is None else f"alive, in step {progress.step}"
        if awaited is None or awaited.what == "collective":  # which is not watched
            return Kind.ELSEWHERE, f"{alive}, but has not reached this collective"
        if awaited.what == "call":
            late = beat.calls.get(awaited.name, 0) < awaited.reached
            return (Kind.ELSEWHERE, "alive, but has not made this call") if late else None
        if progress is None:
            return Kind.DETACHED, "alive, but has nothing attached"
        if progress.submitted < awaited.reached:
            return Kind.ELSEWHERE, f"{alive}, but has not reached this exchange"
        inside = f"alive, but inside an exchange for {progress.inside_s:.0f} s without a collective"
        return (Kind.INSIDE, inside) if progress.inside_s > _INSIDE_S else None


_CULPRITS = ((Kind.FAILED, Kind.ENDED), (Kind.SILENT,))
_ORDER = (
    (Kind.FAILED, Kind.ENDED),
    (Kind.SILENT, Kind.UNSEEN),
    (Kind.ELSEWHERE, Kind.DETACHED, Kind.INSIDE),
    (Kind.VICTIM,),
)
"""Groups of reasons, the most telling first. Only the suspects of the first group that has any are named."""


def _most_telling(reasons: Mapping[int, tuple[Kind, str] | None], order: Sequence[Sequence[Kind]]) -> list[Suspect]:
    suspects = [Suspect(rank, *reason) for rank, reason in reasons.items() if reason is not None]
    groups = ([suspect for suspect in suspects if suspect.kind in kinds] for kinds in order)
    return next((group for group in groups if group), [])


def is_backends(error: BaseException) -> bool:
    """Return whether gloo or NCCL raised an error, inside an exchange or not. Other code has timeouts too."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and _says(error, _BACKENDS))


def is_collective(error: BaseException | None) -> bool:
    """Return whether an error inside an exchange comes from a collective, and probably from another rank."""
    others = isinstance(error, TimeoutError | dist.DistError)
    return others or (isinstance(error, RuntimeError) and _says(error, f"{_BACKENDS}|{_COLLECTIVE}"))


_BACKENDS = "gloo|nccl|caused pair closure"  # words that only a backend uses: gloo names its own source files
_COLLECTIVE = "connection|timed out|timeout|socket|reset by peer|broken pipe"
"""Words in the error of a collective that failed inside an exchange, most likely because of another rank."""


def _says(error: BaseException, words: str) -> bool:
    return re.search(words, str(error).partition("\n")[0], re.IGNORECASE) is not None
