"""How well models train when only the largest sums travel, beside dense gradients: per step, and by the clock.

Three tasks on real data, four ranks, several seeds: a CNN and a small ResNet on digits, a GPT on bytes of text. What is
reported is the held-out metric of rank 0's model. A method's runs and dense ones start from the same weights and draw
the same batches, seed by seed, so differences are paired. Learning rates are those that suit dense gradients best
(`--sweep` tries others, on the same held-out data), and sparse exchanges use the same. They stay constant, so that a
training could have ended at any point of its curve; the GPT's ramps up at first.

    python benchmarks/training.py --sweep sweep.json
    python benchmarks/training.py --quality quality.json
    python benchmarks/training.py --clock clock.json
    python benchmarks/training.py --report quality.json clock.json
    python benchmarks/training.py --plot quality.json clock.json --out benchmarks/results/training-$(date +%F).svg

`--quality` trains with all ranks in this process, as threads. It can be stopped and started again: what is in the file
is not run again. `--clock` measures real training steps, of real processes over the links of an emulated cluster, where
methods take turns; plain DDP stands for dense. What a sparse exchange returns does not depend on what carried it, so
the seconds of a curve are its steps times the median step. OkTopk at 1 % trains on for as many steps again, because its
steps take less time.

Beside dense and OkTopk there are variants that answer a question each:

- six buckets: the gradients in six equal pieces, each with its own share of the entries. Is equal density worse?
- exact: the largest entries of the whole model win, with exact selection, in fp32. What do regions and keys cost?
- warm-up: the first 20 steps are dense.
- momentum: in the exchange instead of in the optimizer.

Buckets of which fewer than 8 entries per rank would be selected go whole, by design. Here all are larger: the smallest,
a sixth of the ResNet, has 51 at 0.1 %, and 32 are needed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import syncline
from link_rate import cpu_ticks, stolen_since
from syncline.bench.methods import Wrapping
from syncline.bench.rounds import Contender, combine, take_turns
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.ddp.attach import attach
from syncline.dist.local_comm import LocalComm, run_ranks
from syncline.exchange import WORLD, Comm, Dense, Exchange, Layout, OkTopk, State, Work
from syncline.files import write_json, write_text
from syncline.models import zoo
from syncline.models.data import digits, library_text
from syncline.models.gpt import GPT

RANKS = 4
MBIT = 1_000_000
MOMENTUM = 0.9
WARMUP = 20
POINTS, LATE_POINTS = 12, 4
SWEEP_SEED = 100
"""Not one of those that are reported."""
ONE_BUCKET_MB = 1000

# --- tasks ------------------------------------------------------------------------------------------------------------

IMAGES, WINDOWS, CONTEXT = 32, 8, 64
"""Of a rank's batch, and the bytes of a window."""
HELD_OUT_WINDOWS = 256


@dataclass(frozen=True)
class Task:
    about: str
    metric: str
    higher_is_better: bool
    steps: int
    optimizer: str
    lr: float
    tried: tuple[float, ...]
    """Learning rates to sweep."""
    ramp: int
    """So many steps lead up to the learning rate, in a straight line."""
    variants: tuple[str, ...]
    """Beside dense and plain OkTopk."""
    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], zoo.Batch]
    """A rank's next batch. Every rank draws all of them and takes its own, so generators stay alike."""
    evaluate: Callable[[nn.Module], float]

    def optimize(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> Optimizer:
        if self.optimizer == "AdamW":
            return AdamW(parameters, lr=lr, betas=(momentum, 0.99), weight_decay=0.01)
        return SGD(parameters, lr=lr, momentum=momentum)

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.ramp))

    def points(self, stretch: float = 1) -> list[int]:
        """After which steps to evaluate: more often at first, where curves are steep; then beyond all steps."""
        within = [round(self.steps * (number / POINTS) ** 1.5) for number in range(1, POINTS + 1)]
        beyond = [
            round(self.steps * (1 + (stretch - 1) * number / LATE_POINTS)) for number in range(1, LATE_POINTS + 1)
        ]
        return [*within, *(beyond if stretch > 1 else ())]

    @property
    def settings(self) -> dict[str, Any]:
        """What must not change between runs that share a file."""
        parameters = sum(parameter.numel() for parameter in self.build().parameters())
        return {
            "about": self.about,
            "metric": self.metric,
            "parameters": parameters,
            "steps": self.steps,
            "optimizer": self.optimizer,
            "lr": self.lr,
            "ramp": self.ramp,
        }


def draw_digits(rank: int, generator: torch.Generator) -> zoo.Batch:
    data = digits()
    drawn = torch.randint(len(data.train_images), (RANKS, IMAGES), generator=generator)[rank]
    return data.train_images[drawn], data.train_labels[drawn]


def accuracy(model: nn.Module) -> float:
    """In per cent."""
    data = digits()
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(images).argmax(-1) == labels).sum())
            for images, labels in zip(data.held_out_images.split(100), data.held_out_labels.split(100), strict=True)
        )
    model.train()
    return 100 * right / len(data.held_out_labels)


@functools.cache
def text() -> tuple[Tensor, Tensor]:
    """To train on, and held out."""
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in library_text())
    return train, held_out


def windows(source: Tensor, starts: Tensor, length: int = CONTEXT) -> zoo.Batch:
    taken = source[starts[:, None] + torch.arange(length + 1, device=source.device)].long()
    return taken[:, :-1], taken[:, 1:]


def draw_text(rank: int, generator: torch.Generator) -> zoo.Batch:
    train, _ = text()
    return windows(train, torch.randint(len(train) - CONTEXT, (RANKS, WINDOWS), generator=generator)[rank])


def bits_per_byte(model: nn.Module) -> float:
    _, held_out = text()
    starts = torch.randint(len(held_out) - CONTEXT, (HELD_OUT_WINDOWS,), generator=torch.Generator().manual_seed(0))
    model.eval()
    with torch.no_grad():
        nats = statistics.mean(
            zoo.loss(model(x), y).item() for x, y in (windows(held_out, s) for s in starts.split(32))
        )
    model.train()
    return nats / math.log(2) if math.isfinite(nats) else 8.0  # diverged: no better than any byte at all


class Residual(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        same = stride == 1 and channels_in == channels_out
        convolution = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
        self.shortcut = nn.Identity() if same else nn.Sequential(convolution, nn.BatchNorm2d(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def small_resnet() -> nn.Module:
    """The stem halves the image's side already: a laptop's core has to train dozens of these."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        Residual(32, 32, 1),
        Residual(32, 64, 2),
        Residual(64, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, zoo.DIGITS),
    )


# --- methods ----------------------------------------------------------------------------------------------------------


class _Kept(State):
    def __init__(self, numel: int) -> None:
        self.residual = torch.zeros(numel)


@dataclass(frozen=True)
class Exact:
    """The largest entries of a bucket win, exactly: each rank sends its own, the largest of the sums are applied.

    A reference to compare with: it puts dense vectors on the wire, and a step that is not finite spoils it.
    """

    density: float

    def prepare(self, layout: Layout, comm: Comm) -> State:
        return _Kept(layout.numel)

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        assert isinstance(state, _Kept)
        entries = int(self.density * flat.numel())
        due = state.residual.add_(flat)
        mine = due.abs().topk(entries).indices
        sent = torch.zeros_like(flat).index_copy_(0, mine, due[mine])
        total = sent.clone()
        comm.all_reduce(total).wait()
        won = total.abs().topk(entries).indices
        flat.zero_().index_copy_(0, won, total[won])
        due[won] -= sent[won]
        return None


@dataclass(frozen=True)
class Way:
    exchange: Exchange | Exact
    buckets: int = 1
    stretch: float = 1
    """Trains for so many times the task's steps: what takes less time per step may take more of them."""

    @property
    def optimizer_momentum(self) -> float:
        return 0.0 if getattr(self.exchange, "momentum", 0.0) else MOMENTUM


MAIN = {
    "dense": Way(Dense()),
    "oktopk 1%": Way(OkTopk(density=0.01), stretch=2),
    "oktopk 0.1%": Way(OkTopk(density=0.001)),
}
VARIANTS = {
    "six buckets 1%": Way(OkTopk(density=0.01), buckets=6),
    "six buckets 0.1%": Way(OkTopk(density=0.001), buckets=6),
    "exact 1%": Way(Exact(density=0.01)),
    "exact 0.1%": Way(Exact(density=0.001)),
    "warm-up 1%": Way(OkTopk(density=0.01, warmup=WARMUP)),
    "warm-up 0.1%": Way(OkTopk(density=0.001, warmup=WARMUP)),
    "momentum 1%": Way(OkTopk(density=0.01, momentum=MOMENTUM)),
    "momentum 0.1%": Way(OkTopk(density=0.001, momentum=MOMENTUM)),
    "oktopk 10%": Way(OkTopk(density=0.1)),
}
WAYS = {**MAIN, **VARIANTS}

TASKS = {
    "cnn": Task(
        about="a CNN on digits",
        metric="held-out accuracy, %",
        higher_is_better=True,
        steps=188,
        optimizer="SGD",
        lr=0.05,
        tried=(0.02, 0.05, 0.1, 0.2),
        ramp=1,
        variants=tuple(name for name in VARIANTS if name != "oktopk 10%"),
        build=partial(zoo.build_model, "cnn"),
        draw=draw_digits,
        evaluate=accuracy,
    ),
    "gpt": Task(
        about="a GPT on bytes of text",
        metric="held-out bits per byte",
        higher_is_better=False,
        steps=300,
        optimizer="AdamW",
        lr=2e-3,
        tried=(1e-3, 2e-3, 3e-3, 6e-3),
        ramp=30,
        variants=("oktopk 10%", "six buckets 1%", "exact 1%", "warm-up 1%", "momentum 1%"),
        build=partial(GPT, width=96, layers=3, heads=3),
        draw=draw_text,
        evaluate=bits_per_byte,
    ),
    "resnet": Task(
        about="a small ResNet on digits",
        metric="held-out accuracy, %",
        higher_is_better=True,
        steps=188,
        optimizer="SGD",
        lr=0.05,
        tried=(0.02, 0.05, 0.1, 0.2),
        ramp=1,
        variants=("six buckets 1%", "exact 1%", "momentum 1%", "warm-up 0.1%", "momentum 0.1%"),
        build=small_resnet,
        draw=draw_digits,
        evaluate=accuracy,
    ),
}

# --- quality ----------------------------------------------------------------------------------------------------------


def average(
    exchange: Exchange | Exact, buckets: Sequence[Tensor], states: list[State], step: int, comm: LocalComm
) -> None:
    """Replace a rank's buckets by their averages over the ranks, as the engine does. The first step fills `states`."""
    if not states:
        states += [exchange.prepare(Layout.flat(bucket.numel(), device=bucket.device), comm) for bucket in buckets]
    for bucket, state in zip(buckets, states, strict=True):
        state.begin(step)
        bucket.mul_(1 / comm.size)
        last = exchange.run(bucket, state, comm)
        if last is not None:
            last.wait()
    finite = torch.stack([state.finite(bucket) for bucket, state in zip(buckets, states, strict=True)]).all()
    for state in states:
        state.settle(finite)


@dataclass
class Trainee:
    """One rank's model under training, outside of DDP."""

    task: Task
    way: Way
    model: nn.Module
    seed: int
    lr: float
    states: list[State] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Reversed: as DDP buckets them, because gradients come about in that order.
        self.parameters = list(self.model.parameters())[::-1]
        self.optimizer = self.task.optimize(self.parameters, self.lr, self.way.optimizer_momentum)
        self.scheduler = self.task.schedule(self.optimizer)
        self.generator = torch.Generator().manual_seed(self.seed)

    def advance(self, comm: LocalComm, first: int, last: int) -> float:
        """Takes these steps, and returns what it sent per step, in bytes."""
        for step in range(first, last):
            inputs, targets = self.task.draw(comm.rank, self.generator)
            self.optimizer.zero_grad()
            zoo.loss(self.model(inputs), targets).backward()
            self.exchange(step, comm)
            self.optimizer.step()
            self.scheduler.step()
        return comm.counter.sent_bytes[WORLD] / (last - first)

    def exchange(self, step: int, comm: LocalComm) -> None:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        average(self.way.exchange, flat.tensor_split(self.way.buckets), self.states, step, comm)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])


def train(task: Task, way: Way, seed: int, lr: float) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = task.build()
    trainees = [Trainee(task, way, copy.deepcopy(model), seed, lr) for _ in range(RANKS)]
    points, values, done, sent, training_s = task.points(way.stretch), [], 0, 0.0, 0.0
    for point in points:
        start = time.monotonic()
        # Ranks meet anew for each stretch, because a local comm holds on to all that went through it.
        advance = partial(_advance, trainees=trainees, first=done, last=point)
        sent = max(run_ranks(RANKS, advance, deadline_s=600))
        training_s += time.monotonic() - start
        # DDP gives all ranks rank 0's BatchNorm buffers, which are made of rank 0's batches alone: as they are here.
        values.append(round(task.evaluate(trainees[0].model), 4))
        done = point
    bits = [trainee.weights().view(torch.int32) for trainee in trainees]
    assert all(torch.equal(bits[0], other) for other in bits), "ranks end with different weights"
    return {
        "points": points,
        "values": values,
        "sent_bytes": None if isinstance(way.exchange, Exact) else round(sent),
        "buckets": [state.describe() for state in trainees[0].states],
        "training_s": round(training_s, 2),
    }


def _advance(comm: LocalComm, trainees: Sequence[Trainee], first: int, last: int) -> float:
    return trainees[comm.rank].advance(comm, first, last)


def quality(path: Path, names: Sequence[str], seeds: int, variant_seeds: int) -> None:
    about = {"schema": 1, "torch": str(torch.__version__), "syncline": syncline.__version__, "ranks": RANKS}
    result: dict[str, Any] = read(path) if path.exists() else {**about, "tasks": {}, "cells": []}
    for name in names:
        settings = TASKS[name].settings
        if result["tasks"].setdefault(name, settings) != settings:
            raise SystemExit(f"{path}: {name} was trained with other settings there; use another file")
    finished = {(cell["task"], cell["method"], cell["seed"]) for cell in result["cells"]}
    for methods, count in ((MAIN, seeds), (VARIANTS, variant_seeds)):
        for seed in range(count):
            for name in names:
                for method, way in methods.items():
                    task = TASKS[name]
                    if (method in VARIANTS and method not in task.variants) or (name, method, seed) in finished:
                        continue
                    cell = train(task, way, seed, task.lr)
                    result["cells"].append({"task": name, "method": method, "seed": seed, **cell})
                    write_json(path, result)
                    print(f"{name:8} {method:18} seed {seed}: {cell['values'][POINTS - 1]:.3f}", flush=True)


def sweep(path: Path, names: Sequence[str]) -> None:
    rows = []
    for name in names:
        for lr in TASKS[name].tried:
            cell = train(TASKS[name], MAIN["dense"], SWEEP_SEED, lr)
            # The last points' mean says more than the last one, of a single run.
            rows.append({"task": name, "lr": lr, "last_3": statistics.mean(cell["values"][-3:]), **cell})
            write_json(path, {"schema": 1, "torch": str(torch.__version__), "seed": SWEEP_SEED, "rows": rows})
            print(f"{name:8} lr {lr:<6g} {cell['values'][-1]:.3f}, last 3 {rows[-1]['last_3']:.3f}", flush=True)


# --- the clock --------------------------------------------------------------------------------------------------------


def clock(path: Path, names: Sequence[str], rounds: int) -> None:
    spec = ClusterSpec(hosts=RANKS, rate_bps=200 * MBIT)
    digits(), text()  # once, before the ranks are forked
    tasks = {}
    for name in names:
        before = cpu_ticks()
        answers = launch(spec, partial(_measure, task=TASKS[name], rounds=rounds), deadline_s=900)
        turns = combine([answer["record"] for answer in answers])
        rows = []
        for method in MAIN:
            times, ratio = turns[method].quartiles, turns["dense"].ratio_to(turns[method])
            rows.append(
                {
                    "method": method,
                    "step_ms": times.median * 1e3,
                    "step_ms_low": times.low * 1e3,
                    "step_ms_high": times.high * 1e3,
                    "times_faster": ratio.median,
                    "times_faster_low": ratio.low,
                    "times_faster_high": ratio.high,
                    "wire_bytes": turns[method].wire_bytes,
                    "ways": answers[0]["ways"].get(method, {}),
                }
            )
            print(
                f"{name:8} {method:12} {times.median * 1e3:7.1f} ms  {ratio.median:.2f}× "
                f"({ratio.low:.2f}–{ratio.high:.2f})",
                flush=True,
            )
        tasks[name] = {"rounds": rounds, "stolen": stolen_since(before), "rows": rows}
    about = {"schema": 1, "torch": str(torch.__version__), "syncline": syncline.__version__}
    write_json(path, {**about, "cluster": spec.describe(), "tasks": tasks})


def _measure(rank: Rank, task: Task, rounds: int) -> dict[str, Any]:
    rank.init_process_group()
    contenders, ways = [], {}
    for method, way in MAIN.items():
        torch.manual_seed(0)
        wrapping = Wrapping(rank.device)
        if method == "dense":  # plain DDP, in the buckets that it makes by default
            ddp = wrapping.ddp(task.build())
        else:
            ddp = wrapping.ddp(task.build(), bucket_mb=ONE_BUCKET_MB)
            assert not isinstance(way.exchange, Exact)
            ways[method] = attach(ddp, way.exchange)
        contenders.append(Contender(method, _training_step(rank.rank, task, way, ddp)))
    record = take_turns(rank, contenders, warmup=4, rounds=rounds)
    return {"record": record, "ways": {method: handle.paths for method, handle in ways.items()}}


def _training_step(rank: int, task: Task, way: Way, model: nn.Module) -> Callable[[], None]:
    optimizer = task.optimize(model.parameters(), task.lr, way.optimizer_momentum)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        inputs, targets = task.draw(rank, generator)
        optimizer.zero_grad()
        zoo.loss(model(inputs), targets).backward()
        optimizer.step()

    return step


# --- what it came to --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    points: list[int]
    values: list[float]

    def at(self, step: float) -> float:
        """Between points, as if on a straight line; beyond them, as it was at the last one."""
        if step <= self.points[0]:
            return self.values[0]
        for (a, b), (x, y) in zip(pairwise(self.points), pairwise(self.values), strict=True):
            if step <= b:
                return x + (y - x) * (step - a) / (b - a)
        return self.values[-1]


Runs = dict[str, dict[int, Curve]]
"""Of one task: per method and seed."""


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def runs_of(measured: dict[str, Any], name: str) -> Runs:
    runs: Runs = {}
    for method in WAYS:
        cells = [cell for cell in measured["cells"] if cell["task"] == name and cell["method"] == method]
        if cells:
            runs[method] = {cell["seed"]: Curve(cell["points"], cell["values"]) for cell in cells}
    return runs


def step_seconds(timed: dict[str, Any] | None, name: str) -> dict[str, float]:
    rows = [] if timed is None or name not in timed["tasks"] else timed["tasks"][name]["rows"]
    return {row["method"]: row["step_ms"] / 1e3 for row in rows}


def spread(values: Sequence[float], digits: int = 2, sign: str = "") -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):{sign}.{digits}f} ± {deviation:.{digits}f}"


def report(measured: dict[str, Any], timed: dict[str, Any] | None) -> None:
    for name, task in TASKS.items():
        runs = runs_of(measured, name)
        if "dense" not in runs:
            continue
        settings = measured["tasks"][name]
        better = "higher" if task.higher_is_better else "lower"
        print(
            f"\n### {task.about}: {settings['metric']} ({better} is better)\n\n{settings['parameters']:,} parameters, "
            f"{settings['steps']} steps of {measured['ranks']} ranks, {settings['optimizer']}, learning rate "
            f"{settings['lr']:g}. Mean ± standard deviation over seeds.\n"
        )
        _report_steps(runs, settings["steps"], [cell for cell in measured["cells"] if cell["task"] == name])
        if seconds := step_seconds(timed, name):
            _report_seconds(runs, settings["steps"], seconds)


def _report_steps(runs: Runs, steps: int, cells: Sequence[dict[str, Any]]) -> None:
    last = {method: {seed: curve.at(steps) for seed, curve in seeds.items()} for method, seeds in runs.items()}
    deviation = statistics.stdev(last["dense"].values()) if len(last["dense"]) > 1 else math.nan
    print("| method | seeds | sent per step, kB | at the end | less dense, paired | in dense's deviations |")
    print("|---|---|---|---|---|---|")
    for method, values in last.items():
        pairs = [values[seed] - last["dense"][seed] for seed in values if seed in last["dense"]]
        sent = next(cell["sent_bytes"] for cell in cells if cell["method"] == method)
        kilobytes = "–" if sent is None else f"{sent / 1e3:.0f}" if sent > 1e4 else f"{sent / 1e3:.1f}"
        beside = ("–", "–")
        if method != "dense" and pairs:
            beside = (spread(pairs, sign="+"), f"{statistics.mean(pairs) / deviation:+.1f}")
        print(f"| {method} | {len(values)} | {kilobytes} | {spread(list(values.values()))} | {' | '.join(beside)} |")


def _report_seconds(runs: Runs, steps: int, seconds: dict[str, float]) -> None:
    whole = steps * seconds["dense"]
    shares = (0.125, 0.25, 0.5, 1.0)
    print(f"\nBy the clock: dense takes {whole:.1f} s for its {steps} steps. The metric after a share of that time,")
    print("or at the end of a training that ended before:\n")
    print(
        "| method | ms per step | steps in that time | steps trained | " + " | ".join(f"× {s:g}" for s in shares) + " |"
    )
    print("|---|---|---|---|" + "---|" * len(shares))
    for method, each in seconds.items():
        curves = list(runs[method].values())
        cells = [spread([curve.at(share * whole / each) for curve in curves]) for share in shares]
        trained = curves[0].points[-1]
        print(f"| {method} | {each * 1e3:.1f} | {whole / each:.0f} | {trained} | {' | '.join(cells)} |")


COLOURS = {"dense": "#555555", "oktopk 1%": "#1768ac", "oktopk 0.1%": "#d1600a", "momentum 1%": "#2a8a4a"}


def plot(measured: dict[str, Any], timed: dict[str, Any], out: Path) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise SystemExit(
            "matplotlib draws the figures, and comes with the digits: pip install syncline[demo]"
        ) from error
    matplotlib.use("svg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "training",
        "font.size": 9,
        "font.family": "sans-serif",
    }
    names = [name for name in TASKS if "dense" in runs_of(measured, name)]
    with matplotlib.rc_context(style):
        figure, grid = pyplot.subplots(
            len(names), 2, figsize=(9, 2.7 * len(names)), sharey="row", squeeze=False, layout="constrained"
        )
        for (by_step, by_clock), name in zip(grid, names, strict=True):
            runs, settings, seconds = runs_of(measured, name), measured["tasks"][name], step_seconds(timed, name)
            for method in (method for method in COLOURS if method in runs):
                curves = list(runs[method].values())
                _draw(by_step, curves, 1, method)
                if method in seconds:
                    _draw(by_clock, curves, seconds[method], method)
            low, high = _range(runs, TASKS[name].higher_is_better)
            steps = settings["steps"]
            by_step.set(ylabel=settings["metric"], xlabel="steps", xlim=(0, steps), ylim=(low, high))
            by_clock.set(xlabel=f"seconds, {timed['cluster']}", xlim=(0, steps * seconds["dense"]))
            by_step.set_title(f"{TASKS[name].about}, {settings['parameters']:,} parameters", loc="left", fontsize=9)
            for axes in (by_step, by_clock):
                axes.grid(color="#dddddd", linewidth=0.6)
                axes.spines[["top", "right"]].set_visible(False)
        grid[0][0].legend(loc="lower right", frameon=False)
        figure.savefig(out, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    # A picture that ends without a newline, or has trailing blanks, is a different file after every hook.
    write_text(out, "\n".join(line.rstrip() for line in out.read_text(encoding="utf-8").splitlines()) + "\n")


def _draw(axes: Any, curves: Sequence[Curve], per_step: float, method: str) -> None:
    """The median over seeds, in a band from the worst to the best of them."""
    x = [point * per_step for point in curves[0].points]
    by_point = list(zip(*(curve.values for curve in curves), strict=True))
    low, high = [min(values) for values in by_point], [max(values) for values in by_point]
    axes.fill_between(x, low, high, color=COLOURS[method], alpha=0.18, linewidth=0)
    axes.plot(x, [statistics.median(values) for values in by_point], color=COLOURS[method], label=method)
    # Where a training ended before the axis does.
    axes.plot(x[-1:], [statistics.median(by_point[-1])], "o", color=COLOURS[method], markersize=4)


def _range(runs: Runs, higher_is_better: bool) -> tuple[float, float]:
    """Leaves out the steepest part, of the first few steps, in which nothing can be seen of the rest."""
    curves = [curve for method in MAIN for curve in runs[method].values()]
    worst = statistics.median(curve.values[2] for curve in curves)
    best = (max if higher_is_better else min)(value for curve in curves for value in curve.values[3:])
    margin = abs(best - worst) * 0.05
    return (worst, best + margin) if higher_is_better else (best - margin, worst)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quality", type=Path, metavar="FILE", help="train, and keep the curves here")
    parser.add_argument("--clock", type=Path, metavar="FILE", help="measure steps on an emulated cluster")
    parser.add_argument("--sweep", type=Path, metavar="FILE", help="try learning rates, with dense gradients")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="tables: curves, and steps if measured")
    parser.add_argument("--plot", type=Path, nargs=2, metavar="FILE", help="figures: curves and steps")
    parser.add_argument("--out", type=Path, help="where the figures go")
    parser.add_argument("--only", choices=list(TASKS), action="append", metavar="TASK", help="once for each task")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--variant-seeds", type=int, help="of all but dense and OkTopk; default: as many")
    parser.add_argument("--rounds", type=int, default=40, help="of the clock")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.only or list(TASKS)
    if options.sweep:
        sweep(options.sweep, names)
    if options.quality:
        quality(
            options.quality,
            names,
            options.seeds,
            options.seeds if options.variant_seeds is None else options.variant_seeds,
        )
    if options.clock:
        clock(options.clock, names, options.rounds)
    if options.report:
        report(read(options.report[0]), read(options.report[1]) if len(options.report) > 1 else None)
    if options.plot:
        if options.out is None:
            parser.error("--plot needs --out")
        plot(read(options.plot[0]), read(options.plot[1]), options.out)


if __name__ == "__main__":
    main()
