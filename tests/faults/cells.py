"""The cells of the fault matrix, their expected outcomes, and how they run.

Each fatal fault has its own cluster. Faults that a job must survive share one and strike one after the other, each
in a new model, which saves most of the time.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from faults import stories
from faults.checker import Expected, Ran, check, raised_after_s
from faults.injury import Injury, moment_of, mount_small_disk
from faults.journal import Journal, read
from faults.stories import FAULT_STEP, FEW_BITS, SAVE_STEP, SPARSE, Story, Told
from syncline.cluster import ClusterSpec, Outcome, Rank, launch_outcomes
from syncline.cluster.launch import RankMain
from syncline.exchange import Dense, Exchange, Hierarchical

TIMEOUT_S = 4.0
PAUSE_S = 1.2
RATE_BPS = 40_000_000
MANY_STEPS = 400
"""More steps than a job makes before the slowest fault strikes."""
HARD_S = 90.0
"""Time after which the processes of a cell are killed and the cell has failed."""
GRACE_S = TIMEOUT_S + 30.0
"""The same, counted from the first process that fails."""

FLAT = ClusterSpec(hosts=3, rate_bps=RATE_BPS)
HOSTS = ClusterSpec(hosts=2, per_host=(2, 2), rate_bps=RATE_BPS)


@dataclass(frozen=True)
class Phase:
    """The phase of a job in which a fault strikes."""

    spec: ClusterSpec
    victim: int
    told: Told
    story: Story = stories.train
    step: int = FAULT_STEP


OVERLAP_STEP = 6
"""A step in which weights are in shards."""
PHASES = {
    "attach": Phase(FLAT, 1, Told(Dense()), step=-1),
    "warm-up": Phase(FLAT, 1, Told(SPARSE), step=1),
    "dense": Phase(FLAT, 1, Told(Dense())),
    "member": Phase(HOSTS, 3, Told(Hierarchical())),
    "leader": Phase(HOSTS, 2, Told(Hierarchical(across=SPARSE))),
    "sparse": Phase(FLAT, 2, Told(SPARSE)),
    "few bits": Phase(FLAT, 2, Told(FEW_BITS)),
    "layerwise": Phase(FLAT, 1, Told(SPARSE, layerwise=True)),
    "updates": Phase(FLAT, 2, Told(SPARSE, every=1)),
    "local steps": Phase(FLAT, 1, Told(SPARSE, every=2, delay=1)),
    "overlap": Phase(FLAT, 1, Told(Dense(), overlap=True, steps=OVERLAP_STEP + 3), step=OVERLAP_STEP),
    "replicas": Phase(HOSTS, 3, Told(FEW_BITS, sharded="replicas")),
    "updates of replicas": Phase(HOSTS, 2, Told(SPARSE, every=2, sharded="replicas")),
    "shards": Phase(FLAT, 1, Told(FEW_BITS, sharded="shards")),
    "tune": Phase(FLAT, 1, Told(Dense()), stories.tune),
    "checkpoint": Phase(FLAT, 1, Told(SPARSE), stories.save, SAVE_STEP),
    "checkpoint of updates": Phase(FLAT, 1, Told(SPARSE, every=2), stories.save, SAVE_STEP),
}

FATAL = ("kill", "stop", "cut", "oom", "raise", "linger")
OWN = ("oom", "raise", "linger")
"""Faults that the victim itself raises."""
DISKS = ("efbig", "enospc")
SURVIVED = ("pause", "slow", "nan", "inf", "caught")


@dataclass(frozen=True)
class Cell:
    """One fault, in one phase, at one place."""

    phase: str
    fault: str
    place: str
    victim: int | None = None
    step: int | None = None
    reports: str = ""
    """`full`: failure reports go to a full disk."""
    fast: bool = False
    """True if the cell is among those that a plain `pytest` runs."""

    @property
    def name(self) -> str:
        parts = [self.phase, self.fault, self.place]
        parts += [f"rank{self.victim}"] if self.victim is not None else []
        parts += [f"step{self.step}"] if self.step is not None else []
        parts += [f"notes-{self.reports}"] if self.reports else []
        return "-".join(parts).replace(" ", "-")

    @property
    def where(self) -> Phase:
        return PHASES[self.phase]

    @property
    def struck(self) -> int:
        return self.where.victim if self.victim is None else self.victim

    @property
    def struck_step(self) -> int:
        return self.where.step if self.step is None else self.step

    @property
    def victims(self) -> tuple[int, ...]:
        """The rank that the fault strikes, or all ranks of a host whose link is cut."""
        if self.fault != "cut":
            return (self.struck,)
        spec = self.where.spec
        return next(spec.ranks_of(host) for host in range(spec.hosts) if self.struck in spec.ranks_of(host))

    @property
    def fatal(self) -> bool:
        return self.fault in FATAL

    @property
    def alone(self) -> bool:
        """True if the cell has its own cluster."""
        return self.fatal or self.fault in DISKS or self.phase == "tune"

    @property
    def needs_links(self) -> bool:
        return self.fault in ("cut", "slow") or self.fault == "enospc" or bool(self.reports)

    @property
    def expected(self) -> Expected:
        fatal = self.fatal
        exchanges = self.where.story is stories.train and self.struck_step >= 0
        like = None
        if not fatal and self.phase != "tune":
            like = "without" if self.fault in ("nan", "inf", "caught") else "whole"
        return Expected(
            fatal=fatal,
            victims=self.victims,
            timeout_s=TIMEOUT_S,
            ends=self.fault in ("kill", *OWN),
            names_suspect=fatal and NAMES_SUSPECTS,
            refuses=fatal and exchanges,
            skipped=self.struck_step if self.fault in ("nan", "inf") and self.phase != "tune" else None,
            like=like,
            or_torch=self._may_meet_ddp,
            ahead=max(0, self.where.told.every - 1) + self.where.told.delay,
            raises=self.fault in DISKS,
        )

    @property
    def _may_meet_ddp(self) -> bool:
        """True if the fault may strike while DDP compares its new buckets, which it does in its second forward."""
        if self.phase not in ("attach", "warm-up"):
            return False
        return self.place == "timed" or (self.place == "before" and self.struck_step == 1)  # a timed one may be late


NAMES_SUSPECTS = True
"""Whether errors must name the victim."""


@dataclass(frozen=True)
class Result:
    """The outcome of one cell."""

    cell: Cell
    wrong: list[str]
    raised_after_s: float | None
    told: str
    """The error of a survivor."""

    @property
    def row(self) -> dict[str, Any]:
        return {
            "cell": self.cell.name,
            "phase": self.cell.phase,
            "fault": self.cell.fault,
            "place": self.cell.place,
            "fatal": self.cell.fatal,
            "outcome": "broken" if self.wrong else "raised" if self.cell.fatal or self.told else "went on",
            "raised_after_s": None if self.raised_after_s is None else round(self.raised_after_s, 3),
            "timeout_s": TIMEOUT_S,
            "told": self.told,
            "wrong": self.wrong,
        }


# --- the table --------------------------------------------------------------------------------------------------


def _cells() -> Iterator[Cell]:
    fast = {
        "attach-kill-inside",
        "attach-stop-before",
        "warm-up-oom-prepare",
        "dense-kill-timed",
        "dense-cut-timed",
        "dense-raise-hook",
        "dense-linger-forward",
        "member-kill-hook",
        "leader-kill-timed",
        "leader-stop-timed",
        "sparse-stop-hook",
        "layerwise-kill-hook",
        "tune-kill-plan-hook",
        "checkpoint-kill-draft",
        "checkpoint-efbig-within",
        "checkpoint-enospc-one",
        "sparse-pause-timed",
        "sparse-slow-timed",
        "sparse-nan-within",
        "sparse-inf-within",
        "sparse-caught-forward",
        "few-bits-nan-within",
        "updates-kill-timed",
        "updates-nan-within",
        "local-steps-stop-timed",
        "checkpoint-of-updates-kill-draft",
        "overlap-kill-timed",
        "overlap-nan-within",
        "replicas-kill-timed",
        "replicas-stop-hook",
        "replicas-nan-within",
        "shards-kill-hook",
        "updates-of-replicas-stop-timed",
        "dense-kill-hook-notes-full",
    }
    for cell in _all_cells():
        yield replace(cell, fast=cell.name in fast)


def _all_cells() -> Iterator[Cell]:
    for place in ("before", "connecting", "inside", "timed", "after"):
        for fault in ("kill", "stop", "cut"):
            if (fault, place) != ("stop", "after"):
                yield Cell("attach", fault, place)
    yield Cell("attach", "raise", "before")
    yield Cell("attach", "raise", "inside")
    yield Cell("attach", "linger", "before")
    yield Cell("attach", "oom", "inside")
    for phase in ("warm-up", "dense", "member", "leader", "sparse", "layerwise"):
        for place in ("before", "hook", "timed", "after", "between"):
            yield Cell(phase, "kill", place)
        for place in ("hook", "timed"):
            yield Cell(phase, "stop", place)
            yield Cell(phase, "cut", place)
        yield Cell(phase, "raise", "forward")
        yield Cell(phase, "raise", "hook")
        yield Cell(phase, "oom", "forward")
        yield Cell(phase, "oom", "hook")
    for phase in ("dense", "sparse", "layerwise"):
        yield Cell(phase, "raise", "between")
        yield Cell(phase, "linger", "forward")
        yield Cell(phase, "linger", "hook")
    yield Cell("warm-up", "kill", "hook", step=0)
    yield Cell("warm-up", "stop", "timed", step=0)
    yield Cell("warm-up", "cut", "timed", step=0)
    yield Cell("warm-up", "oom", "prepare")
    yield Cell("layerwise", "oom", "prepare", step=-1)
    yield Cell("leader", "kill", "hook", victim=0)
    yield Cell("leader", "stop", "timed", victim=0)
    yield Cell("leader", "cut", "timed", victim=0)
    yield Cell("dense", "kill", "timed", victim=0)
    yield Cell("dense", "stop", "timed", victim=0)
    yield Cell("dense", "cut", "timed", victim=0)
    for place in ("profile", "plain hook", "plan", "plan hook"):
        yield Cell("tune", "kill", place)
    yield Cell("tune", "stop", "profile")
    yield Cell("tune", "stop", "plan hook")
    yield Cell("tune", "cut", "plan")
    yield Cell("tune", "raise", "profile")
    yield Cell("tune", "raise", "plan")
    yield Cell("tune", "oom", "plan")
    for place in ("before", "timed", "draft", "placing", "after"):
        yield Cell("checkpoint", "kill", place)
    for fault in ("stop", "cut"):
        yield Cell("checkpoint", fault, "draft")
        yield Cell("checkpoint", fault, "timed")
    yield Cell("checkpoint", "raise", "before")
    yield Cell("checkpoint", "oom", "draft")
    for victim in range(3):
        yield Cell("checkpoint", "efbig", "within", victim=victim if victim != 1 else None)
    yield Cell("checkpoint", "enospc", "within")
    yield Cell("checkpoint", "enospc", "one")
    yield Cell("dense", "kill", "hook", reports="full")
    yield Cell("layerwise", "kill", "hook", reports="full")
    for phase in ("warm-up", "dense", "member", "leader", "sparse", "layerwise"):
        yield Cell(phase, "pause", "timed")
        yield Cell(phase, "slow", "timed")
        yield Cell(phase, "nan", "within")
        yield Cell(phase, "inf", "within")
        yield Cell(phase, "caught", "forward", step=FAULT_STEP if phase == "warm-up" else None)
    yield Cell("few bits", "kill", "hook")
    yield Cell("few bits", "stop", "timed")
    yield Cell("few bits", "cut", "timed")
    yield Cell("few bits", "oom", "hook")
    for fault in ("pause", "slow", "nan", "inf"):
        yield Cell("few bits", fault, "within" if fault in ("nan", "inf") else "timed")
    for place in ("before", "hook", "timed", "after", "between"):
        yield Cell("updates", "kill", place)
    for phase in ("updates", "local steps"):
        yield Cell(phase, "stop", "timed")
        yield Cell(phase, "cut", "timed")
        yield Cell(phase, "raise", "forward")
        yield Cell(phase, "pause", "timed")
        yield Cell(phase, "slow", "timed")
    yield Cell("updates", "stop", "after")
    yield Cell("updates", "oom", "hook")
    yield Cell("updates", "nan", "within")
    yield Cell("updates", "inf", "within")
    yield Cell("local steps", "kill", "hook")
    yield Cell("local steps", "kill", "timed")
    yield Cell("local steps", "kill", "between")
    for place in ("before", "hook", "timed", "after", "between"):
        yield Cell("overlap", "kill", place)
    for fault in ("stop", "cut"):
        yield Cell("overlap", fault, "hook")
        yield Cell("overlap", fault, "timed")
    yield Cell("overlap", "raise", "forward")
    yield Cell("overlap", "oom", "hook")
    for fault in ("pause", "slow", "nan", "inf"):
        yield Cell("overlap", fault, "within" if fault in ("nan", "inf") else "timed")
    for phase in ("replicas", "shards"):
        for place in ("before", "hook", "timed", "after", "between"):
            yield Cell(phase, "kill", place)
        for fault in ("stop", "cut"):
            yield Cell(phase, fault, "hook")
            yield Cell(phase, fault, "timed")
        yield Cell(phase, "raise", "forward")
        yield Cell(phase, "raise", "hook")
        yield Cell(phase, "linger", "hook")
        yield Cell(phase, "oom", "hook")
        for fault in ("pause", "slow", "nan", "inf"):
            yield Cell(phase, fault, "within" if fault in ("nan", "inf") else "timed")
    for fault in ("kill", "stop", "cut", "pause"):
        yield Cell("updates of replicas", fault, "timed")
    yield Cell("updates of replicas", "kill", "between")
    yield Cell("updates of replicas", "raise", "forward")
    for place in ("timed", "draft", "placing"):
        yield Cell("checkpoint of updates", "kill", place)
    yield Cell("checkpoint of updates", "raise", "before")
    yield Cell("checkpoint of updates", "efbig", "within")
    yield Cell("attach", "pause", "inside")
    yield Cell("attach", "slow", "inside")
    yield Cell("tune", "pause", "plan hook")
    yield Cell("tune", "slow", "plan")
    yield Cell("tune", "nan", "plan")


CELLS = {cell.name: cell for cell in _cells()}


# --- running ----------------------------------------------------------------------------------------------------


class Matrix:
    """Cells that run in the background, several at a time, because most of their time they wait for timeouts."""

    def __init__(self, cells: Sequence[Cell], folder: Path, seed: int, at_once: int) -> None:
        self._pool = concurrent.futures.ProcessPoolExecutor(at_once, multiprocessing.get_context("fork"))
        self._results: dict[str, concurrent.futures.Future[list[Result]]] = {}
        shared: dict[str, list[Cell]] = {}
        for cell in cells:
            shared.setdefault(cell.name if cell.alone else f"{cell.phase} survived", []).append(cell)
        for alike in shared.values():
            future = self._pool.submit(run, alike, folder, seed)
            self._results.update(dict.fromkeys((cell.name for cell in alike), future))

    def result(self, name: str) -> Result:
        return next(result for result in self._results[name].result() if result.cell.name == name)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def run(
    cells: Sequence[Cell], folder: Path, seed: int, exchange: Exchange | None = None, grace_s: float = GRACE_S
) -> list[Result]:
    """Run one cell that has its own cluster, or all that share one. `exchange` replaces that of the phase."""
    first = cells[0]
    if len(cells) == 1 and first.alone:
        return [_judged(first, _alone(first, folder / first.name, seed, exchange, grace_s))]
    ran = _shared(cells, folder / f"{first.phase}-survived", seed, exchange)
    return [_judged(cell, ran[cell.name]) for cell in cells]


def _judged(cell: Cell, ran: Ran) -> Result:
    wrong = check(cell.expected, ran)
    texts = [
        entry["text"].splitlines()[0]
        for rank, journal in enumerate(ran.journals)
        for entry in journal
        if entry["event"] == "raised" and rank not in cell.victims and entry["text"]
    ]
    return Result(cell, wrong, raised_after_s(cell.expected, ran), texts[0] if texts else "")


def injury_of(cell: Cell, rank: int, journal: Journal, seed: int) -> Injury | None:
    if rank != cell.struck:
        return None
    span_s = 0.1 if cell.struck_step < 0 else 0.03 if cell.where.story is stories.save else 0.08
    return Injury(
        cell.fault,
        cell.place,
        cell.struck_step,
        journal,
        delay_s=moment_of(cell.name, seed, span_s),
        stop_s=PAUSE_S if cell.fault == "pause" else TIMEOUT_S + 4.0,
        rate_bps=RATE_BPS // 10,
    )


def _told(cell: Cell, exchange: Exchange | None = None) -> Told:
    told = cell.where.told
    exchange = exchange or (stories.striking(told.exchange) if cell.place == "prepare" else told.exchange)
    scaled = cell.fault in ("nan", "inf") and not told.layerwise and not told.every
    steps = MANY_STEPS if cell.fatal else told.steps
    fault = "enospc one" if (cell.fault, cell.place) == ("enospc", "one") else cell.fault
    return replace(told, exchange=exchange, fault=fault, scaled=scaled, steps=steps)


def _alone(cell: Cell, folder: Path, seed: int, exchange: Exchange | None, grace_s: float) -> Ran:
    told = _told(cell, exchange)

    def main(rank: Rank) -> None:
        if cell.reports == "full":
            if rank.rank == 0:
                mount_small_disk(folder / "full", 4096)
            os.environ["SYNCLINE_FAILURES"] = str(folder / "full" / "failures")
        else:
            os.environ["SYNCLINE_FAILURES"] = str(folder / "failures")
        journal = Journal(folder, rank.rank)
        injury = injury_of(cell, rank.rank, journal, seed)
        if injury is not None:
            injury.prepare()
        stories.live(rank, cell.where.story, told, folder, injury, TIMEOUT_S)

    spec = cell.where.spec
    ended, left = _launched(spec, main, folder, grace_s)
    others = {}
    if cell.where.story is stories.save:
        ended_again, left_again = _launched(spec, lambda rank: _resumed(rank, told, folder), folder)
        left += left_again + [f"the error of resuming, {text}," for text in ended_again if text is not None]
        others = {name: read(folder / name, spec.world_size) for name in ("whole", "resumed")}
    return Ran(read(folder, spec.world_size), ended, others, left)


def _resumed(rank: Rank, told: Told, folder: Path) -> None:
    stories.join(rank, 30.0)
    stories.resume(rank, told, folder)


def _shared(cells: Sequence[Cell], base: Path, seed: int, exchange: Exchange | None) -> dict[str, Ran]:
    """Run all faults that a job must survive in one phase, and the same training without them."""
    phase, place = cells[0].phase, cells[0].where
    step = FAULT_STEP if phase in ("attach", "warm-up") else place.step
    plain = replace(place.told, exchange=exchange or place.told.exchange)
    references = {"whole": plain, f"without-{step}": replace(plain, leaves_out=step)}
    if phase == "warm-up":
        references["without-1"] = replace(plain, leaves_out=1)

    def main(rank: Rank) -> None:
        from syncline.cluster import links

        os.environ["SYNCLINE_FAILURES"] = str(base / "failures")
        journals = {cell.name: Journal(base / cell.name, rank.rank) for cell in cells}
        injuries = {cell.name: injury_of(cell, rank.rank, journals[cell.name], seed) for cell in cells}
        for injury in injuries.values():
            if injury is not None:
                injury.prepare()
        stories.join(rank, TIMEOUT_S)
        for name, told in references.items():
            journal = Journal(base / name, rank.rank)
            place.story(rank, told, journal, None, base / name)
            journal.note("done")
        for cell in cells:
            place.story(rank, _told(cell, exchange), journals[cell.name], injuries[cell.name], base / cell.name)
            journals[cell.name].note("done")
            if cell.fault == "slow" and injuries[cell.name] is not None:
                links.reshape(RATE_BPS)

    ended, left = _launched(place.spec, main, base)
    found = {}
    for cell in cells:
        without = read(base / f"without-{cell.struck_step if cell.struck_step >= 0 else step}", place.spec.world_size)
        others = {"whole": read(base / "whole", place.spec.world_size), "without": without}
        journals = read(base / cell.name, place.spec.world_size)
        # A fault of a later cell of this cluster does not affect cells that have ended.
        mine = [None if any(e["event"] == "done" for e in j) else how for j, how in zip(journals, ended, strict=True)]
        found[cell.name] = Ran(journals, mine, others, left)
    return found


def _launched(
    spec: ClusterSpec, main: RankMain, folder: Path, grace_s: float = GRACE_S
) -> tuple[list[str | None], list[str]]:
    """Run a cluster, and return how its ranks failed and what they left."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    before = _processes(), _mounts()
    with _scratch_in(scratch):
        outcomes: list[Outcome] = launch_outcomes(spec, main, deadline_s=HARD_S, grace_s=grace_s)
    left = [f"process {name}" for name in sorted(_processes() - before[0])]
    left += [f"mount {name}" for name in sorted(_mounts() - before[1])]
    left += [f"temporary file {path.name}" for path in scratch.iterdir()]
    if not left:
        scratch.rmdir()
    left += [f"draft {path.name}" for path in folder.rglob("*.tmp")]
    return [outcome.error for outcome in outcomes], left


def _processes() -> set[str]:
    return {f"{child.pid} {child.name()}" for child in psutil.Process().children(recursive=True)}


def _mounts() -> set[str]:
    return {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}


class _scratch_in:  # noqa: N801 - reads as a verb
    """Put temporary files of this process and its children in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        self.before, tempfile.tempdir = tempfile.tempdir, str(self.folder)
        self.variable = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(self.folder)

    def __exit__(self, *_: object) -> None:
        tempfile.tempdir = self.before
        if self.variable is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = self.variable
