"""Some cells of the fault matrix, one at least of each fault and each phase; and proof that its checker can fail.

The whole of it: `python -m pytest tests/faults/matrix.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from faults.cells import CELLS, DISKS, FATAL, PHASES, SURVIVED, Matrix, run
from faults.checker import Expected, Ran, check
from faults.stories import SPARSE
from syncline.cluster import why_not_shaped
from syncline.exchange import Comm, Dense, Exchange, Layout, OkTopk, State, Work

FAST = [name for name, cell in CELLS.items() if cell.fast]
SEED = 0


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    cells = [CELLS[name] for name in FAST if why_not_shaped() is None or not CELLS[name].needs_links]
    made = Matrix(cells, tmp_path_factory.mktemp("faults"), SEED, at_once=4)
    yield made
    made.close()


@pytest.mark.timeout(300)  # those before it may have to end first
@pytest.mark.parametrize("name", FAST)
def test_what_holds_when_something_happens(name: str, matrix: Matrix) -> None:
    if CELLS[name].needs_links and why_not_shaped() is not None:
        pytest.skip(f"no namespaces: {why_not_shaped()}")
    result = matrix.result(name)
    assert not result.wrong, "\n".join([f"{name}, seed {SEED}:", *result.wrong])


def test_the_few_have_every_fault_and_every_phase() -> None:
    assert {CELLS[name].phase for name in FAST} == {*PHASES}
    assert {CELLS[name].fault for name in FAST} == {*FATAL, *DISKS, *SURVIVED}
    assert len(CELLS) >= 100


# --- exchanges that are wrong -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Swallowing(Dense):
    """Where it cannot sum, its own gradients will do."""

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        try:
            comm.all_reduce(flat).wait()
        except RuntimeError:
            flat.mul_(comm.size)
        return None


@dataclass(frozen=True)
class Hanging(Dense):
    """Where it cannot sum, it waits for better times: on the thread that runs backward, so that nobody can end it."""

    @property
    def waits(self) -> bool:
        return False

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        try:
            comm.all_reduce(flat).wait()
        except RuntimeError:
            threading.Event().wait()
        return None


@dataclass(frozen=True)
class Poisoned(OkTopk):
    """It keeps what a step that was not finite has left."""

    def prepare(self, layout: Layout, comm: Comm) -> State:
        state = super().prepare(layout, comm)
        settle = state.settle
        state.settle = lambda finite: settle(torch.ones_like(finite))  # type: ignore[method-assign]
        return state


@dataclass(frozen=True)
class Deserting(Dense):
    """One rank raises when the fault strikes, and the others go on without it."""

    def prepare(self, layout: Layout, comm: Comm) -> State:
        class Counting(State):
            steps = itertools.count()

        return Counting()

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if next(state.steps) < 2:  # type: ignore[attr-defined]
            return comm.all_reduce(flat)
        return None


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "exchange", "rules"),
    [
        ("dense-kill-hook", Swallowing(), {"a", "b", "c"}),
        ("dense-kill-hook", Hanging(), {"c"}),
        ("dense-raise-between", Deserting(), {"a", "b", "c"}),
    ],
    ids=["swallows", "hangs", "deserts"],
)
def test_an_exchange_that_breaks_the_promise_is_caught(
    name: str, exchange: Exchange, rules: set[str], tmp_path: Path
) -> None:
    (result,) = run([CELLS[name]], tmp_path, SEED, exchange, grace_s=8.0)
    assert {line[0] for line in result.wrong} >= rules, result.wrong
    if isinstance(exchange, Hanging):
        assert any("hangs" in line for line in result.wrong), result.wrong


def test_an_exchange_that_keeps_what_is_not_finite_is_caught(tmp_path: Path) -> None:
    cells = [CELLS["sparse-nan-within"]]
    (poisoned,) = run(cells, tmp_path, SEED, Poisoned(density=SPARSE.density, values=SPARSE.values))
    assert {line[0] for line in poisoned.wrong} == {"e"}
    assert any("changed kept in step 3, which was not finite" in line for line in poisoned.wrong)


# --- the checker, rule by rule ----------------------------------------------------------------------------------

Journals = list[list[dict[str, Any]]]
VICTIM = 1
FATAL_CELL = Expected(fatal=True, victims=(VICTIM,), timeout_s=4.0, ends=True, names_suspect=True, refuses=True)
SURVIVED_CELL = Expected(fatal=False, victims=(VICTIM,), timeout_s=4.0, skipped=1, like="without")


def commit(step: int, parameters: str, kept: str = "k") -> dict[str, Any]:
    return {"event": "commit", "at_s": 1.0, "step": step, "parameters": parameters, "layout": "l", "kept": kept,
            "finite": True}  # fmt: skip


def failed_run() -> Ran:
    """Three ranks, of which the second was killed in step 1."""
    steps = [{"event": "begin", "at_s": 1.0, "step": 0}, commit(0, "p"), {"event": "begin", "at_s": 1.0, "step": 1}]
    raised = {"event": "raised", "at_s": 3.0, "type": "ExchangeError", "told": True,
              "text": "failed; suspect: rank 1 (no heartbeat)"}  # fmt: skip
    asked = [{"event": "asked", "at_s": 3.0, "what": what, "refused": True} for what in ("state_dict", "save")]
    survivor = [*steps, raised, *asked]
    fault = {"event": "fault", "at_s": 2.0}
    journals = [[dict(entry) for entry in journal] for journal in (survivor, [*steps, fault], survivor)]
    saved = [[commit(step, f"s{step}") for step in (2, 3)] for _ in range(3)]
    whole = [[commit(step, f"s{step}") for step in range(4)] for _ in range(3)]
    return Ran(journals, [None, "was killed by SIGKILL", None], {"resumed": saved, "whole": whole})


def going_run() -> Ran:
    """Step 1 was not finite, and left out in the other run."""
    mine = [commit(0, "p0"), {"event": "fault", "at_s": 2.0}, commit(1, "p0"), commit(2, "p2"),
            {"event": "done", "at_s": 4.0}]  # fmt: skip
    return Ran([[*mine] for _ in range(3)], [None] * 3, {"without": [[commit(0, "p0"), commit(2, "p2")]] * 3})


def find(journal: list[dict[str, Any]], event: str) -> dict[str, Any]:
    return next(entry for entry in journal if entry["event"] == event)


def change(event: str, **fields: Any) -> Callable[[Ran], Ran]:
    """Something else in the last rank's journal."""

    def changed(ran: Ran) -> Ran:
        find(ran.journals[2], event).update(fields)  # type: ignore[arg-type]
        return ran

    return changed


def without(event: str) -> Callable[[Ran], Ran]:
    return lambda ran: dataclasses.replace(
        ran, journals=[*ran.journals[:2], [entry for entry in ran.journals[2] if entry["event"] != event]]
    )


def also(entry: dict[str, Any]) -> Callable[[Ran], Ran]:
    return lambda ran: dataclasses.replace(ran, journals=[*ran.journals[:2], [*ran.journals[2], entry]])


def ended(text: str) -> Callable[[Ran], Ran]:
    return lambda ran: dataclasses.replace(ran, ended=[*ran.ended[:2], text])


def differently(name: str) -> Callable[[Ran], Ran]:
    return lambda ran: dataclasses.replace(ran, others={**ran.others, name: [[commit(3, "x")]] * 3})


BROKEN_FAILURES: dict[str, tuple[str, Callable[[Ran], Ran]]] = {
    "other parameters": ("a", change("commit", parameters="q")),
    "other buckets": ("a", change("commit", layout="m")),
    "a step ahead": ("b", also(commit(2, "p"))),
    "never told": ("cf", without("raised")),
    "still running": ("c", ended("still running when another rank failed")),
    "too late": ("c", change("raised", at_s=20.0)),
    "not by us": ("c", change("raised", told=False)),
    "nobody is named": ("d", change("raised", text="failed")),
    "another is named": ("d", change("raised", text="rank 1 failed; suspect: rank 0 (); this rank's failure report")),
    "state was given": ("f", change("asked", refused=False)),
    "state was not asked for": ("f", without("asked")),
    "resumed otherwise": ("f", differently("resumed")),
    "something is left": ("g", lambda ran: dataclasses.replace(ran, left=["process 7"])),
    "nothing was done": ("c", lambda ran: dataclasses.replace(
        ran, journals=[ran.journals[0], [e for e in ran.journals[1] if e["event"] != "fault"], ran.journals[2]])),
}  # fmt: skip

BROKEN_SURVIVALS: dict[str, tuple[str, Callable[[Ran], Ran]]] = {
    "raised": ("e", also({"event": "raised", "at_s": 3.0, "type": "E", "text": "t", "told": True})),
    "died": ("e", ended("was killed by SIGKILL")),
    "did not end": ("e", without("done")),
    "hangs": ("c", ended("still running at the deadline")),
    "ends elsewhere": ("e", differently("without")),
}


@pytest.mark.parametrize("what", BROKEN_FAILURES)
def test_of_a_failure_each_rule_is_checked(what: str) -> None:
    assert check(FATAL_CELL, failed_run()) == []
    letters, breaks = BROKEN_FAILURES[what]
    found = "".join(sorted({line[0] for line in check(FATAL_CELL, breaks(failed_run()))}))
    assert found in (letters, letters[0])


@pytest.mark.parametrize("what", BROKEN_SURVIVALS)
def test_of_what_must_go_on_each_rule_is_checked(what: str) -> None:
    assert check(SURVIVED_CELL, going_run()) == []
    letter, breaks = BROKEN_SURVIVALS[what]
    assert {line[0] for line in check(SURVIVED_CELL, breaks(going_run()))} == {letter}


def test_a_skipped_step_that_changed_something_is_seen() -> None:
    for fields in ({"parameters": "p1"}, {"kept": "other"}):
        ran = going_run()
        ran.journals[2][2] = {**ran.journals[2][2], **fields}  # type: ignore[index]
        assert any("which was not finite" in line for line in check(SURVIVED_CELL, ran))
