"""The rules that every cell must obey, as a pure function from its journals to a list of violations.

Tests and tables refer to the rules by letter:

- **a, agreement**: ranks that have committed a step have the same parameters after it, bit for bit, and the same
  exchange in the same buckets;
- **b, no step ahead**: no rank commits a step that a victim has not begun;
- **c, in time**: every survivor of a fatal fault raises within the timeout and a margin, with an error of Syncline's or
  one that carries it; no rank hangs, and none ends silently;
- **d, suspects**: where survivors can know which rank caused the failure, the error names it;
- **e, survival**: after a fault that a job must survive, all ranks continue and end as if it had not happened;
- **f, state**: after a failed exchange no state can be saved, and an earlier checkpoint can be loaded and continues bit
  for bit;
- **g, cleanup**: no process, mount or temporary file outlives a cell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from faults.journal import Entry

MARGIN_S = 8.0
"""Time beyond a timeout: finding suspects takes up to 3.3 s, and a busy machine is slow."""

_SUSPECTS = re.compile(r"suspects?: (.*?)(?:; this rank's failure report|$)", re.MULTILINE)


@dataclass(frozen=True)
class Expected:
    """The expected outcome of one cell."""

    fatal: bool
    """True if the job cannot continue."""
    victims: tuple[int, ...]
    """Ranks that the fault strikes."""
    timeout_s: float
    ends: bool = False
    """True if the victims end, or raise their own error."""
    names_suspect: bool = False
    refuses: bool = False
    """True if an exchange fails, so that survivors must refuse to save their state."""
    skipped: int | None = None
    """A step that must change neither parameters nor residuals."""
    like: str | None = None
    """The other run of the same cell that this one must equal, step by step."""
    or_torch: bool = False
    """True if DDP may fail first, in its own collective, with an error of torch."""
    ahead: int = 0
    """Steps that ranks may take without an exchange."""
    raises: bool = False
    """True if the job continues, but a call raises on all ranks."""


@dataclass(frozen=True)
class Ran:
    """The observed outcome of one cell."""

    journals: Sequence[Sequence[Entry]]
    """By rank."""
    ended: Sequence[str | None]
    """By rank: how its process failed, or None."""
    others: Mapping[str, Sequence[Sequence[Entry]]] = field(default_factory=dict)
    """Other runs, by name, such as one without the fault or one resumed after it."""
    left: Sequence[str] = ()
    """Processes, mounts and files that the cell left."""


def check(expected: Expected, ran: Ran) -> list[str]:
    """Return the violations, each with the letter of its rule."""
    wrong = [*_agreement(ran.journals, "a")]
    if expected.fatal:
        wrong += _no_step_ahead(expected, ran)
        wrong += _in_time(expected, ran)
        wrong += _suspects(expected, ran)
    else:
        wrong += _goes_on(expected, ran)
    wrong += _state(expected, ran)
    wrong += [f"g: {what} is left" for what in ran.left]
    return wrong


def raised_after_s(expected: Expected, ran: Ran) -> float | None:
    """Return the time from the fault until the last survivor raised; None if none did."""
    fault_s = _fault_s(ran)
    raised = [
        entry["at_s"]
        for rank, journal in enumerate(ran.journals)
        for entry in _events(journal, "raised")[:1]
        if rank not in expected.victims
    ]
    return None if fault_s is None or not raised else max(raised) - fault_s


def _events(journal: Sequence[Entry], event: str) -> list[Entry]:
    return [entry for entry in journal if entry["event"] == event]


def _committed(journal: Sequence[Entry]) -> dict[int, Entry]:
    return {entry["step"]: entry for entry in _events(journal, "commit")}


def _fault_s(ran: Ran) -> float | None:
    faults = [entry["at_s"] for journal in ran.journals for entry in _events(journal, "fault")]
    return min(faults, default=None)


def _agreement(journals: Sequence[Sequence[Entry]], rule: str) -> list[str]:
    wrong = []
    for what in ("parameters", "layout"):
        seen: dict[tuple[int, int], dict[str, list[int]]] = {}
        for rank, journal in enumerate(journals):
            for step, entry in _committed(journal).items():  # ranks of different shards have different parameters
                seen.setdefault((step, entry.get("part", 0)), {}).setdefault(entry[what], []).append(rank)
        differ = [(step, values) for (step, _), values in sorted(seen.items()) if len(values) > 1]
        wrong += [
            f"{rule}: after step {step} {what} differ: ranks {list(values.values())}, and in {len(differ) - 1} more"
            for step, values in differ[:1]
        ]
    return wrong


def _no_step_ahead(expected: Expected, ran: Ran) -> list[str]:
    begun = [entry["step"] for rank in expected.victims for entry in _events(ran.journals[rank], "begin")]
    last = max(begun, default=-1)
    furthest = {rank: max(_committed(journal), default=-1) for rank, journal in enumerate(ran.journals)}
    return [
        f"b: rank {rank} has committed step {step}, and the last that rank {expected.victims} began is {last}"
        for rank, step in furthest.items()
        if rank not in expected.victims and step > last + expected.ahead
    ]


def _in_time(expected: Expected, ran: Ran) -> list[str]:
    fault_s = _fault_s(ran)
    if fault_s is None:
        return ["c: the fault never struck, so nothing was tested"]
    wrong = []
    for rank, journal in enumerate(ran.journals):
        raised, ended = _events(journal, "raised"), ran.ended[rank]
        if ended is not None and "still running" in ended:
            wrong.append(f"c: rank {rank} hangs: {ended}")
        elif rank in expected.victims and expected.ends:
            if ended is None:
                wrong.append(f"c: rank {rank}, the victim, ended as if nothing had happened")
        elif not raised:
            wrong.append(f"c: rank {rank} ended without an error: {ended or 'it returned'}")
        else:
            since_s = max([fault_s, *(entry["at_s"] for entry in _events(journal, "resumed"))])
            after_s = raised[0]["at_s"] - since_s
            if after_s > expected.timeout_s + MARGIN_S:
                wrong.append(f"c: rank {rank} raised after {after_s:.1f} s, the timeout is {expected.timeout_s:g} s")
            if not raised[0]["told"] and not (expected.or_torch and raised[0]["type"] == "RuntimeError"):
                wrong.append(f"c: rank {rank} raised no error of Syncline's: {_first(raised[0])}")
    return wrong


def _suspects(expected: Expected, ran: Ran) -> list[str]:
    if not expected.names_suspect:
        return []
    wrong = []
    for rank, journal in enumerate(ran.journals):
        for entry in _events(journal, "raised")[:1]:
            if rank in expected.victims or (expected.or_torch and not entry["told"]):
                continue
            named = {int(found) for found in re.findall(r"\brank (\d+)\b", _named(entry["text"]))}
            if not named & {*expected.victims}:
                wrong.append(f"d: rank {rank} does not name rank {expected.victims}: {_first(entry)}")
    return wrong


def _named(text: str) -> str:
    """Return the part of an error that names suspects; without one, its first line."""
    return " ".join(_SUSPECTS.findall(text)) or (text.splitlines() or [""])[0]


def _goes_on(expected: Expected, ran: Ran) -> list[str]:
    wrong = []
    if _fault_s(ran) is None:
        wrong.append("e: the fault never struck, so nothing was tested")
    for rank, journal in enumerate(ran.journals):
        raised = _events(journal, "raised")
        if ran.ended[rank] is not None:
            letter = "c" if "still running" in str(ran.ended[rank]) else "e"
            wrong.append(f"{letter}: rank {rank} did not go on: {ran.ended[rank]}")
        elif not _events(journal, "done"):
            wrong.append(f"e: rank {rank} did not come to the end")
        if expected.raises and not any(entry["told"] for entry in raised):
            wrong.append(f"e: rank {rank} was not told that it failed")
        if not expected.raises and raised:
            wrong.append(f"e: rank {rank} raised: {_first(raised[0])}")
    if expected.skipped is not None:
        wrong += _skipped(expected.skipped, ran)
    if expected.like is not None:
        wrong += _alike(ran, expected.like, "e")
    return wrong


def _skipped(step: int, ran: Ran) -> list[str]:
    wrong = []
    for rank, journal in enumerate(ran.journals):
        commits = _committed(journal)
        if step not in commits or step - 1 not in commits or step + 1 not in commits:
            wrong.append(f"e: rank {rank} has no steps around {step}")
            continue
        before, then, after = commits[step - 1], commits[step], commits[step + 1]
        for what in ("parameters", "kept"):
            if then[what] != before[what]:
                wrong.append(f"e: rank {rank} changed {what} in step {step}, which was not finite")
        if after["parameters"] == then["parameters"] or not after["finite"]:
            wrong.append(f"e: rank {rank} did not apply step {step + 1}, which was finite")
    return wrong


def _alike(ran: Ran, name: str, rule: str) -> list[str]:
    """Compare the steps that both runs have made, which must include the last one of the other run."""
    wrong = []
    for rank, (mine, theirs) in enumerate(zip(ran.journals, ran.others.get(name, []), strict=False)):
        ours, others = _committed(mine), _committed(theirs)
        common = sorted(ours.keys() & others.keys())
        if not common or common[-1] != max(others):
            wrong.append(f"{rule}: rank {rank} cannot be compared with the run {name!r}")
        wrong += [
            f"{rule}: rank {rank} has other {what} after step {step} than the run {name!r}"
            for step in common
            for what in ("parameters", "kept")
            if ours[step][what] != others[step][what]
        ]
    if not ran.others.get(name):
        wrong.append(f"{rule}: there is no run {name!r} to compare with")
    return wrong


def _state(expected: Expected, ran: Ran) -> list[str]:
    wrong = []
    for rank, journal in enumerate(ran.journals):
        if rank in expected.victims and expected.ends:
            continue
        if expected.or_torch and not any(entry["told"] for entry in _events(journal, "raised")[:1]):
            continue  # no exchange has failed: the state is that of the last step
        tried = {entry["what"]: entry["refused"] for entry in _events(journal, "asked")}
        if expected.refuses and _events(journal, "raised") and not tried:
            wrong.append(f"f: rank {rank} was not asked for its state")
        wrong += [f"f: rank {rank} gave its state by {what}, after a failure" for what in tried if not tried[what]]
    if "resumed" in ran.others:
        resumed = Ran(ran.others["resumed"], [None] * len(ran.journals), {"whole": ran.others.get("whole", [])})
        wrong += _agreement(resumed.journals, "f")
        wrong += _alike(resumed, "whole", "f")
    return wrong


def _first(entry: Entry) -> str:
    return f"{entry['type']}: {entry['text'].splitlines()[0] if entry['text'] else ''}"[:300]
