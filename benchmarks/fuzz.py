"""What becomes of hostile input: files and messages that were changed at random, a million of them.

    python benchmarks/fuzz.py --cases 1000000 --seed 1 --json FILE

Each is read, and then satisfies what its format promises and is the same when written and read again; or it is refused
in one line. All else is a failure: another exception, a crash, a warning, more than a second. `tests/hostile` has
the formats, the ways to change them and the oracle. A failure is shown with the command that makes it again. Exits
with 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hostile import FORMATS
from hostile.messages import Messages
from hostile.oracle import Finding
from syncline.files import write_json

CHUNK = 4000
"""Cases that one process goes through."""
STUCK_S = 120.0
"""Of wall time at one case, after which its process is ended: what the interpreter cannot interrupt."""
MOST_SHOWN = 5


@dataclass
class Tally:
    """Of one format."""

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    """Of processor time."""

    @property
    def accepted(self) -> int:
        return sum(count for outcome, count in self.outcomes.items() if outcome.startswith("accepted"))

    @property
    def refused(self) -> int:
        return sum(self.outcomes.values()) - self.accepted

    @property
    def kinds(self) -> int:
        return sum(not outcome.startswith("accepted") for outcome in self.outcomes)


@dataclass(frozen=True)
class Chunk:
    format: str
    start: int
    stop: int


class Running:
    """A process at work on a chunk."""

    def __init__(self, chunk: Chunk, seed: int, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.chunk, self._answer = chunk, folder / "answer.json"
        self._answer.unlink(missing_ok=True)
        context = multiprocessing.get_context("fork")  # torch is imported once
        self._at = context.RawValue("q", chunk.start)
        self._seen, self._since_s = chunk.start, time.monotonic()
        self._process = context.Process(target=work, args=(chunk, seed, folder, self._answer, self._at))
        self._process.start()

    def ended(self, wait_s: float) -> bool:
        self._process.join(wait_s)
        if self._process.exitcode is None and self._stuck():
            self.kill()
        return self._process.exitcode is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _stuck(self) -> bool:
        if self._at.value != self._seen:
            self._seen, self._since_s = self._at.value, time.monotonic()
        return time.monotonic() - self._since_s > STUCK_S

    def add_to(self, tally: Tally) -> Chunk | None:
        """What came of it; returns what is left to do after a crash."""
        tally.cases += self.chunk.stop - self.chunk.start
        if self._process.exitcode == 0:
            answer = json.loads(self._answer.read_text(encoding="utf-8"))
            tally.outcomes.update(answer["outcomes"])
            tally.failures += answer["failures"]
            tally.seconds += answer["seconds"]
            return None
        at = self._at.value
        what = f"its process ended with {self._process.exitcode}"
        tally.failures.append({"case": at, "what": what})
        tally.cases -= self.chunk.stop - at - 1
        return Chunk(self.chunk.format, at + 1, self.chunk.stop) if at + 1 < self.chunk.stop else None


def work(chunk: Chunk, seed: int, folder: Path, answer: Path, at: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    format, outcomes, failures = FORMATS[chunk.format], Counter[str](), []
    began_s = time.process_time()
    for number in range(chunk.start, chunk.stop):
        at.value = number
        try:
            outcomes[format.judge(format.case(seed, number), folder)] += 1
        except Finding as finding:
            failures.append({"case": number, "what": str(finding)[:500]})
    said = {"outcomes": outcomes, "failures": failures, "seconds": time.process_time() - began_s}
    answer.write_text(json.dumps(said), encoding="utf-8")


def chunks_of(cases: int, first: int, only: list[str]) -> Iterator[Chunk]:
    """Most cases for the formats with most to say; messages take longest, and have least."""
    weights = {
        name: 1.0 if isinstance(FORMATS[name], Messages) else 6.0 if "state" not in name else 3.0 for name in only
    }
    left, weight_left = cases, sum(weights.values())
    for name, weight in weights.items():
        share = round(left * weight / weight_left)
        left, weight_left = left - share, weight_left - weight
        for start in range(first, first + share, CHUNK):
            yield Chunk(name, start, min(start + CHUNK, first + share))


def run(cases: int, seed: int, jobs: int, first: int = 0, only: list[str] | None = None) -> dict[str, Tally]:
    names = only or list(FORMATS)
    tallies = {name: Tally() for name in names}
    waiting = list(chunks_of(cases, first, names))[::-1]
    memory = Path("/dev/shm")  # noqa: S108 - a folder of its own is made there
    where = memory if os.access(memory, os.W_OK) else None
    total, said_s = len(waiting), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="syncline-fuzz-", dir=where) as folder:
        running: dict[int, Running] = {}
        try:
            while waiting or running:
                for seat in range(jobs):
                    if seat not in running and waiting:
                        running[seat] = Running(waiting.pop(), seed, Path(folder) / str(seat))
                for seat, one in list(running.items()):
                    if one.ended(0.05):
                        del running[seat]
                        left = one.add_to(tallies[one.chunk.format])
                        if left is not None:
                            waiting.append(left)
                if time.monotonic() - said_s > 10:
                    said_s = time.monotonic()
                    print(f"{100 * (1 - len(waiting) / total):.0f} % done", file=sys.stderr, flush=True)
        finally:
            for one in running.values():
                one.kill()
    return tallies


def show(tallies: dict[str, Tally], seed: int) -> None:
    print(f"{'format':<16}{'cases':>9}{'accepted':>10}{'refused':>9}{'kinds':>7}{'failures':>10}{'CPU s':>8}")
    for name, tally in tallies.items():
        numbers = f"{tally.cases:>9}{tally.accepted:>10}{tally.refused:>9}{tally.kinds:>7}{len(tally.failures):>10}"
        print(f"{name:<16}{numbers}{tally.seconds:>8.1f}")
    for name, tally in tallies.items():
        for failure in tally.failures[:MOST_SHOWN]:
            again = f"--only '{name}' --seed {seed} --first {failure['case']} --cases 1"
            print(f"\n{name}: {failure['what']}\n  python benchmarks/fuzz.py {again}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Hostile files and messages, read by Syncline.")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of the cases of each format")
    parser.add_argument("--only", action="append", choices=list(FORMATS))
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.cases < 1:
        parser.error("--cases: at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as after Ctrl-C, nothing stays behind
    began_s = time.monotonic()
    tallies = run(given.cases, given.seed, given.jobs, given.first, given.only)
    show(tallies, given.seed)
    if given.json is not None:
        formats = {
            name: {
                "cases": tally.cases,
                "accepted": tally.accepted,
                "refused": tally.refused,
                "refusal_kinds": tally.kinds,
                "failures": tally.failures,
                "cpu_s": round(tally.seconds, 1),
            }
            for name, tally in tallies.items()
        }
        about = {
            "schema": 1,
            "date": date.today().isoformat(),
            "command": f"python benchmarks/fuzz.py --cases {given.cases} --seed {given.seed} --jobs {given.jobs}",
            "torch": str(torch.__version__),
            "cases": sum(tally.cases for tally in tallies.values()),
            "failures": sum(len(tally.failures) for tally in tallies.values()),
            "wall_s": round(time.monotonic() - began_s, 1),
        }
        write_json(given.json, {**about, "formats": formats})
    return 1 if any(tally.failures for tally in tallies.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
