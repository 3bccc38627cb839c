"""Train a small GPT on real text over emulated slow links, with plain DDP and with `syncline.tune` at each quality.

Every method trains its own model, from the same weights and on the same batches, with AdamW. Methods take turns in
blocks of steps. After each block the loss on held-out text is computed, while the method's clock stands still. A method
that is clearly faster than plain DDP takes more steps per block, so that its curve goes on for longer.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, Optimizer

from syncline.bench.rounds import Contender, OnProgress, Turns, combine, report_progress, take_turns
from syncline.bench.run import cluster_of, network_of
from syncline.cluster import ClusterSpec, Rank, launch, why_not_shaped
from syncline.ddp.handle import Handle
from syncline.measure.probe import probe
from syncline.models import zoo
from syncline.models.data import Text, library_text
from syncline.models.gpt import GPT
from syncline.records.bench_result import DEMO_METHODS, DemoResult, DemoRow, HeldOut, Model, Tuning
from syncline.tuning.tune import Tuned, tune

TUNE_S = 12.0
"""Time budget of one call of `tune`. All calls share one probe of the links, which takes `_PROBE_SHARE` of it."""
_PROBE_SHARE = 0.6
_QUALITIES = {f"tune-{quality}": quality for quality in ("exact", "same", "close")}
_BLOCKS = 10
_FLOOR_STEPS = 5  # steps per block without communication, which are only timed
_WARMUP_SHARE = 0.2  # part of plain DDP's steps that is the warm-up of updates, if those are chosen
_MORE_STEPS, _CLEARLY_FASTER = 2, 1.5  # a method that is this much faster takes that many times the steps
_PREPARATIONS = 1 + len(_QUALITIES)  # the probe and the tunings, for the progress bar
DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Task:
    """The model, the optimizer's settings, and how much text each step and each evaluation has."""

    width: int = 320
    layers: int = 1
    heads: int = 5
    context: int = 64
    batch: int = 4  # windows per rank
    held_out: int = 64  # windows
    learning_rate: float = 2e-3
    rise: int = 8  # steps until the learning rate is reached; it is constant then, so that a curve has no planned end

    def model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.width, self.layers, self.heads, self.context)

    def optimizer(self, model: nn.Module) -> AdamW:
        return AdamW(model.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


TASK = Task()


def run_demo(
    spec: ClusterSpec, steps: int, *, tune_s: float = TUNE_S, task: Task | None = None, on_progress: OnProgress | None
) -> DemoResult:
    """Train with every method of `DEMO_METHODS`, and compare their times and their losses on held-out text.

    Args:
        spec: The emulated cluster.
        steps: Steps of plain DDP, rounded up to whole blocks.
        tune_s: Time budget of each tuning.
        task: The model and its text; by default `TASK`.
        on_progress: Called with what is done, and the total.
    """
    task = task or TASK
    per_block = max(1, round(steps / _BLOCKS))
    blocks = math.ceil(steps / per_block)
    text = library_text()  # read once, before the ranks are forked
    net = task.model()
    task.optimizer(net)  # imports modules of torch, which takes seconds: once, instead of on every rank
    shaped = why_not_shaped() is None
    main = functools.partial(_train, task=task, text=text, blocks=blocks, per_block=per_block, tune_s=tune_s)

    def on_event(_rank: int, event: Any) -> None:
        if on_progress is not None:
            done, of = event
            on_progress(done + _PREPARATIONS, of + _PREPARATIONS)

    answers = launch(spec, main, deadline_s=DEADLINE_S, on_event=on_event, shaped=shaped)
    first = answers[0]
    turns = combine([answer["record"] for answer in answers], first["steps"])
    curves = {method: _curve(method, answers, turns[method]) for method in turns if method != "nosync"}
    rows = {method: _row(method, answers, turns, curves, shaped) for method in turns}
    for method in DEMO_METHODS:
        if method not in rows:  # tuning kept plain DDP
            rows[method] = msgspec.structs.replace(rows["ddp"], method=method, setting="plain DDP kept", same_as="ddp")
    parameters = sum(parameter.numel() for parameter in net.parameters())
    return DemoResult(
        cluster_of(spec, shaped),
        blocks * per_block,
        blocks * per_block * spec.world_size * task.batch * task.context / len(text.train),
        [rows[method] for method in DEMO_METHODS],
        said=first["said"],
        network=network_of(first["network"], spec, shaped),
        tunings=msgspec.convert(first["tunings"], dict[str, Tuning]),
        model=Model("a small GPT", parameters, 4 * parameters),
    )


def _row(
    method: str,
    answers: Sequence[dict[str, Any]],
    turns: Mapping[str, Turns],
    curves: Mapping[str, list[HeldOut]],
    shaped: bool,
) -> DemoRow:
    own, end = curves.get(method, []), curves["ddp"][-1]
    times = turns[method].quartiles
    return DemoRow(
        method=method,
        step_ms=times.median * 1e3,
        step_ms_low=times.low * 1e3,
        step_ms_high=times.high * 1e3,
        vs_ddp=turns[method].ratio_to(turns["ddp"]).median,
        wire_bytes=round(max(_sent_bytes(answer, method) for answer in answers)) if shaped else None,
        held_out_accuracy=None,
        difference=None,
        losses=[sum(step) / len(step) for step in zip(*(a["losses"][method] for a in answers), strict=True)],
        steps=len(answers[0]["losses"][method]),
        setting=answers[0]["settings"].get(method, ""),
        held_out=own,
        equal_steps=_value_at(end.step, [(point.step, point.bits_per_byte) for point in own]),
        equal_time=_value_at(end.seconds, [(point.seconds, point.bits_per_byte) for point in own]),
        reached_s=time_to(end.bits_per_byte, own),
    )


def _value_at(x: float, points: Sequence[tuple[float, float]]) -> float | None:
    """Return the value of a curve at `x`, between two points by a straight line, or its last one if it ends earlier."""
    for before, after in itertools.pairwise(points):
        if x <= after[0]:
            return before[1] + (after[1] - before[1]) * (x - before[0]) / (after[0] - before[0])
    return points[-1][1] if points else None


def _sent_bytes(answer: dict[str, Any], method: str) -> float:
    """Return the mean bytes per step that a rank's host sent. A median would not count exchanges every few steps."""
    marks = answer["record"][method]
    return sum(after - before for _, _, before, after in marks) / (len(marks) * answer["steps"][method])  # type: ignore[no-any-return]


def _curve(method: str, answers: Sequence[dict[str, Any]], turns: Turns) -> list[HeldOut]:
    """Combine the parts of the held-out text that each rank has evaluated: before training, and after each block."""
    steps = answers[0]["steps"][method]
    windows = zip(*(answer["held_out"][method] for answer in answers), strict=True)
    losses = [sum(nats for nats, _ in ranks) / sum(count for _, count in ranks) / math.log(2) for ranks in windows]
    seconds = [0.0]
    for each in turns.seconds:
        seconds.append(seconds[-1] + steps * each)
    return [HeldOut(steps * block, seconds[block], loss) for block, loss in enumerate(losses)]


def time_to(bits_per_byte: float, curve: Sequence[HeldOut]) -> float | None:
    """Return the training time at which a curve first reaches a loss, between two points by a straight line."""
    for before, after in itertools.pairwise(curve):
        if after.bits_per_byte <= bits_per_byte:
            part = (before.bits_per_byte - bits_per_byte) / max(before.bits_per_byte - after.bits_per_byte, 1e-12)
            return before.seconds + max(0.0, part) * (after.seconds - before.seconds)
    return None


def _train(rank: Rank, task: Task, text: Text, blocks: int, per_block: int, tune_s: float) -> dict[str, Any]:
    """Tune and train on one rank."""
    rank.init_process_group()
    # The result shows how long steps take. Advice for a long training would only disturb it.
    warnings.filterwarnings("ignore", message=r"exchanging gradients takes|rank \d+ takes")
    windows = Windows(rank, task, text)
    began_s = time.monotonic()
    network = probe(budget_s=_PROBE_SHARE * tune_s)
    probe_s = time.monotonic() - began_s
    report_progress(rank, 1 - _PREPARATIONS, blocks)
    contenders: list[Contender] = []
    trainings: dict[str, Training] = {}
    tuned_by: dict[str, Tuned] = {}
    warmup = round(_WARMUP_SHARE * blocks * per_block)
    for method in DEMO_METHODS:
        net = task.model()
        model = net if method == "nosync" else DDP(net)
        training = Training(model, task.optimizer(model), windows, task)
        steps = _FLOOR_STEPS if method == "nosync" else per_block
        if (quality := _QUALITIES.get(method)) is not None:
            tuned_by[method] = tuned = tune(
                model,
                windows.fixed_step,
                optimizer=training.optimizer,
                quality=quality,
                warmup=warmup if quality == "close" else None,
                budget_s=tune_s,
                network=network,
                quiet=True,
            )
            report_progress(rank, 1 + len(tuned_by) - _PREPARATIONS, blocks)
            if tuned.handle is None or tuned.trial is None:
                continue
            training.handle = tuned.handle
            if tuned.trial.plain_s > _CLEARLY_FASTER * tuned.trial.plan_s:
                steps *= _MORE_STEPS
        trainings[method] = training
        evaluate = training.evaluate
        evaluate()
        contenders.append(Contender(method, functools.partial(training.run, steps), steps, settle=evaluate))
    record = take_turns(rank, contenders, warmup=0, rounds=blocks)
    tunings = {
        method: Tuning(
            tuned.profile, tuned.plan, probe_s + tuned.seconds, tuned.handle is None or tuned.choice.lossless
        )
        for method, tuned in tuned_by.items()
    }
    return {
        "record": record,
        "steps": {contender.name: contender.steps for contender in contenders},
        "losses": {method: training.losses for method, training in trainings.items()},
        "held_out": {method: training.held_out for method, training in trainings.items()},
        "settings": {method: tuned.choice.rung for method, tuned in tuned_by.items()},
        "said": {method: tuned.describe() for method, tuned in tuned_by.items()},
        "network": msgspec.to_builtins(network) if rank.rank == 0 else None,
        "tunings": msgspec.to_builtins(tunings) if rank.rank == 0 else {},
    }


class Windows:
    """Windows of the text, as inputs and targets: the training's in a random order, and the held-out ones."""

    def __init__(self, rank: Rank, task: Task, text: Text) -> None:
        self._rank, self._task = rank, task
        self._train = torch.frombuffer(bytearray(text.train), dtype=torch.uint8)
        held_out = torch.frombuffer(bytearray(text.held_out), dtype=torch.uint8)
        starts = torch.linspace(0, len(held_out) - task.context - 1, task.held_out).long()
        # Every rank evaluates a part of the windows, because each has the same weights.
        self.held_out = self._at(held_out, starts[rank.rank :: rank.world_size])
        self._fixed = next(self.batches())

    def _at(self, text: Tensor, starts: Tensor) -> zoo.Batch:
        windows = torch.stack([text[start : start + self._task.context + 1] for start in starts.tolist()]).long()
        return windows[:, :-1], windows[:, 1:]

    def batches(self) -> Iterator[zoo.Batch]:
        """Yield this rank's batches. Every rank draws those of all ranks and takes its own."""
        generator = torch.Generator().manual_seed(1)
        size = (self._rank.world_size, self._task.batch)
        while True:
            starts = torch.randint(len(self._train) - self._task.context, size, generator=generator)
            yield self._at(self._train, starts[self._rank.rank])

    def fixed_step(self, model: nn.Module) -> None:
        """Run forward and backward on one fixed batch, for tuning."""
        inputs, targets = self._fixed
        zoo.loss(model(inputs), targets).backward()


class Training:
    """One method's training on this rank."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, windows: Windows, task: Task) -> None:
        self.model, self.optimizer = model, optimizer
        self.handle: Handle | None = None
        self.losses: list[float] = []
        self.held_out: list[tuple[float, int]] = []
        """Sum of the loss over this rank's held-out bytes in nats, and their number: before training and per block."""
        self._batches, self._windows, self._task = windows.batches(), windows, task

    def run(self, steps: int) -> None:
        for _ in range(steps):
            inputs, targets = next(self._batches)
            for group in self.optimizer.param_groups:
                group["lr"] = self._task.learning_rate * min(1.0, (len(self.losses) + 1) / self._task.rise)
            self.optimizer.zero_grad()
            loss = zoo.loss(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
        if self.handle is not None:
            self.handle.wait()  # otherwise, the end of an exchange that overlaps with later steps would not be measured

    def evaluate(self) -> None:
        synced = contextlib.nullcontext() if self.handle is None else self.handle.synced()
        inputs, targets = self._windows.held_out
        with synced, torch.no_grad():
            mean = zoo.loss(getattr(self.model, "module", self.model)(inputs), targets)
        self.held_out.append((mean.item() * targets.numel(), targets.numel()))
