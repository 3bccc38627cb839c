"""Syncline beside other systems in the situations of docs/guide/comparison.md: the time until the model is as good.

A method's time to quality is the number of steps until its held-out loss is that of plain DDP at the end of its
training, times the time per step. The two are measured apart, because the first does not depend on the links:

- `--curves TASK` trains with each method on four real ranks without shaped links, and keeps the held-out loss against
  steps. All methods start from the same weights and draw the same batches, seed by seed.
- `--clock SITUATION` lets all methods of a situation take turns in the same processes on an emulated cluster, with real
  computation, and keeps the milliseconds per step. What each `quality=` chooses there takes part as `quality-…`.

    python benchmarks/comparison.py --json F --curves gpt-1m
    python benchmarks/comparison.py --json F --clock ten
    python benchmarks/comparison.py --report F

Methods are named as in trainees.py. What is in the file is not measured again. DeepSpeed's 1-bit Adam needs a version
up to 0.19.6 (`PYTHONPATH`); later ones do not contain it. torchft and matplotlib are optional, too.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR

import syncline
from comparison_report import SAME_CURVES, WARMUP_SHARE, draw, report, tables
from link_rate import cpu_ticks, stolen_since
from quality_tasks import TASKS, Data, Source, Task
from simulated_ranks import evaluate, schedule
from syncline.bench.methods import profile_workload
from syncline.bench.rounds import Contender, combine, take_turns
from syncline.cluster import ClusterSpec, Rank, launch, links
from syncline.dist.comm import gather_bytes
from syncline.errors import SynclineError
from syncline.files import write_json
from syncline.measure.probe import probe
from syncline.models import zoo
from syncline.plan.choice import Choice
from syncline.plan.ladder import exchanges_of, make_choice
from syncline.plan.rungs import QUALITIES
from syncline.predict.exchange_time import topology_of
from syncline.tuning.apply import apply_choice
from trainees import Method, Trainee, prepare
from training import read

RANKS = 4
POINTS = 12
"""Equal parts of a training; the loss is evaluated after each, from a quarter on."""
CPU = torch.device("cpu")
RATES = {"gpt-1m": 2e-3, "cnn": 0.05}
"""The learning rates of dense training's lowest held-out loss (`quality.py --models gpt-1m,cnn --methods dense`)."""
STEPS = {"gpt-1m": 300, "cnn": 150}
SLOW_LINK_BURST_BYTES = 10_000
"""With the usual burst of 80 kB, links of some Mbit/s would carry the messages of sparse methods for free."""
PEERS = "ddp,fp16-hook,powersgd-1,powersgd-2,powersgd-4,powersgd-8,post-local-8,diloco-20,1-bit-adam"
OURS = "bf16,int8,int4,oktopk-updates,local-15,local-15-late"
LEVELS = "hierarchical,hierarchical+int4,hierarchical+oktopk-updates"
SHARDED = "fsdp,hsdp,fsdp+int4,hsdp+dense,hsdp+int4,hsdp+local-15"
TOLERANCE = 0.005
"""The part by which a loss may be above plain DDP's and count as equal. With the fp16 hook, it is 0.2 % above."""


@dataclass(frozen=True)
class Situation:
    about: str
    task: str
    spec: ClusterSpec
    """The cluster, with links that are fast enough to prepare methods."""
    rate_bps: int
    """The rate at which hosts send while methods are measured."""
    methods: str
    rounds: int
    probe_s: float = 10.0

    @property
    def measured(self) -> ClusterSpec:
        return replace(self.spec, rate_bps=self.rate_bps)


HOSTS = ClusterSpec(hosts=4, rate_bps=300_000_000)
SITES = ClusterSpec(hosts=4, rate_bps=300_000_000, racks=2, trunk_rate_bps=30_000_000)
PAIRS = ClusterSpec(hosts=2, per_host=(2, 2), rate_bps=300_000_000)
ALL, LEVELLED = f"{PEERS},{OURS}", f"{PEERS},{OURS},{LEVELS}"
FOR_SGD = ALL.replace("1-bit-adam,", "")
SITUATIONS = {
    "two": Situation("links twice too slow", "gpt-1m", HOSTS, 300_000_000, ALL, 10),
    "ten": Situation("links ten times too slow", "gpt-1m", HOSTS, 60_000_000, ALL, 5),
    "hundred": Situation("links a hundred times too slow", "gpt-1m", HOSTS, 6_000_000, ALL, 2, 20.0),
    "sites": Situation("two sites of two hosts", "gpt-1m", SITES, 300_000_000, LEVELLED, 4),
    "ranks": Situation("two ranks per host", "gpt-1m", PAIRS, 60_000_000, LEVELLED, 6),
    "cnn": Situation("a CNN with SGD, links ten times too slow", "cnn", HOSTS, 40_000_000, FOR_SGD, 6),
    "sharded": Situation("a sharded model", "gpt-1m", PAIRS, 60_000_000, SHARDED, 8),
}


# --- training ---------------------------------------------------------------------------------------------------------


class Examples:
    """A rank's batches of a task: those that `simulated_ranks.train` draws with the same seed."""

    def __init__(self, source: Source, task: Task, seed: int, steps: int, rank: int) -> None:
        self._source = source
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(source.examples, (steps, task.examples), generator=generator)
        self._numbers = numbers.view(steps, RANKS, -1)[:, rank]

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        inputs, targets = self._source.batch(self._numbers[step % len(self._numbers)])
        return zoo.loss(model(inputs), targets)


def trainee_of(method: Method, task: Task, lr: float, seed: int, rank: Rank, **options: Any) -> Trainee:
    torch.manual_seed(seed)
    return prepare(method, task.build(), partial(task.optimize, lr=lr), rank, clip=task.clip, **options)


def curve(rank: Rank, name: str, task_name: str, seed: int, lr: float, steps: int) -> dict[str, Any]:
    """Train on this rank, and return the held-out loss against steps."""
    torch.set_num_threads(1)
    rank.init_process_group(300.0)
    task, method = TASKS[task_name], Method.named(name, WARMUP_SHARE)
    length = round(steps * method.factor)
    warmup = method.warmup(length)
    source = task.source(Data(CPU))
    examples = Examples(source, task, seed, length, rank.rank)
    trainee = trainee_of(method, task, lr, seed, rank, warmup=warmup)
    scheduler = LambdaLR(trainee.inner, partial(schedule, steps=length))
    points = sorted({round(length * number / POINTS) for number in range(POINTS // 4, POINTS + 1)} - {0})
    losses, began_s = [], time.monotonic()
    for step in range(length):
        trainee.step(partial(examples.loss, step=step))
        scheduler.step()
        if step + 1 in points:
            with trainee.evaluated() as model:
                if rank.rank == 0 or not isinstance(trainee.model, DDP):  # gathering shards takes all ranks
                    losses.append(evaluate(model, source, task, CPU))
            dist.barrier()
    trainee.close()
    scale = math.log(2) if task.text else 1.0
    about = {"task": task_name, "method": name, "seed": seed, "lr": lr, "steps": steps, "warmup": warmup}
    curves = {"points": points, "loss": [round(loss / scale, 5) for loss, _ in losses]}
    accuracy = {} if task.text else {"accuracy": [round(right, 2) for _, right in losses]}
    return {**about, **curves, **accuracy, "all_s": round(time.monotonic() - began_s, 1)}


# --- the clock --------------------------------------------------------------------------------------------------------


def clock(rank: Rank, situation: Situation, methods: Sequence[str], rounds: int, probe_s: float) -> dict[str, Any]:
    """Let all methods take turns, after their warm-ups, and return what this rank measured."""
    torch.set_num_threads(1)
    rank.init_process_group(300.0)
    task, lr = TASKS[situation.task], 1e-4
    source = task.source(Data(CPU))
    examples = Examples(source, task, 0, 64, rank.rank)
    reshape(rank, situation.rate_bps)
    network = None if methods[0].startswith("fsdp") else probe(budget_s=probe_s)  # `tune` takes no sharded models
    reshape(rank, situation.spec.rate_bps)
    choices = {} if network is None else _choices(task, examples, network)
    trainees: dict[str, tuple[Trainee, int]] = {}
    for name in methods:
        method = Method.named(name, WARMUP_SHARE)
        trainee = trainee_of(method, task, lr, 0, rank, network=network)
        trainees[name] = trainee, method.period
    for quality, choice in choices.items():
        if not choice.nothing:
            trainee = trainee_of(Method.named("ddp", 0), task, lr, 0, rank)
            settings: dict[str, Any] = {"network": network, "timeout_s": None, "scaler": None, "warmup": 0}
            trainee.handle = apply_choice(trainee.model, choice, optimizer=trainee.inner, **settings)
            trainees[f"quality-{quality}"] = trainee, choice.period
    contenders = [_contender(name, trainee, period, examples) for name, (trainee, period) in trainees.items()]
    alone = task.build()
    single = Trainee(alone, task.optimize(list(alone.parameters()), lr), clip=task.clip)
    contenders.append(_contender("nosync", single, 1, examples))
    take_turns(rank, contenders, warmup=4, rounds=0)
    reshape(rank, situation.rate_bps)
    turns = take_turns(rank, contenders, warmup=0, rounds=rounds)
    for trainee, _ in trainees.values():
        trainee.close()
    return {
        "record": turns,
        "periods": {contender.name: contender.steps for contender in contenders},
        "choices": {quality: _described(choice) for quality, choice in choices.items()},
    }


def reshape(rank: Rank, rate_bps: int) -> None:
    """Change the rate at which all hosts send. Collective."""
    if rank.local_rank == 0:
        links.reshape(rate_bps)
    dist.barrier()


def _choices(task: Task, examples: Examples, network: Any) -> dict[str, Choice]:
    """Return what each quality chooses, as rank 0 predicts it."""
    makers = {name: partial(_itself, each) for name, each in exchanges_of("close", network, updates=True).items()}
    net = task.build()
    profile = profile_workload(net, partial(examples.loss, step=0), task.about, topology_of(network), makers)
    chosen = b""
    if dist.get_rank() == 0:
        chosen = msgspec.json.encode([make_choice(profile, network, quality) for quality in QUALITIES])
    decoded = msgspec.json.decode(gather_bytes(dist.group.WORLD, chosen)[0], type=list[Choice])
    return dict(zip(QUALITIES, decoded, strict=True))


def _itself(value: Any) -> Any:
    return value


def _described(choice: Choice) -> dict[str, Any]:
    times = {"predicted_ms": choice.iteration_s * 1e3, "predicted_plain_ms": choice.plain_s * 1e3}
    return {"rung": choice.rung, "nothing": choice.nothing, "reason": choice.reason, **times}


def _contender(name: str, trainee: Trainee, period: int, examples: Examples) -> Contender:
    """Return a contender that takes a whole period, or two steps."""
    taken, steps = 0, max(2, period)

    def take(count: int) -> None:
        nonlocal taken
        for _ in range(count):
            trainee.step(partial(examples.loss, step=taken))
            taken += 1

    settle = trainee.handle.wait if trainee.handle is not None else lambda: None
    lead = int(name == "quality-exact")  # the weights of the step before may arrive during a step
    return Contender(name, partial(take, steps), steps, lead=partial(take, lead), lead_steps=lead, settle=settle)


# --- the study --------------------------------------------------------------------------------------------------------


def study(path: Path, key: str, cell: dict[str, Any]) -> None:
    """Add a cell to the file, which may have changed since this process started."""
    about: dict[str, Any] = {
        "schema": 1,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python benchmarks/comparison.py",
        "torch": str(torch.__version__),
        "syncline": syncline.__version__,
        "curves": [],
        "clocks": [],
    }
    result = read(path) if path.exists() else about
    result[key].append(cell)
    write_json(path, result)


def train_all(path: Path, task: str, methods: Sequence[str], seeds: Sequence[int], lr: float, minutes: float) -> None:
    began_s, last_s = time.monotonic(), 0.0
    TASKS[task].source(Data(CPU))  # before ranks are forked
    for seed in seeds:
        for name in methods:
            if name in SAME_CURVES:
                print(f"{name} counts as {SAME_CURVES[name]}: not trained", flush=True)
                continue
            known = read(path)["curves"] if path.exists() else []
            if (task, name, seed, lr) in {(c["task"], c["method"], c["seed"], c["lr"]) for c in known}:
                continue
            if time.monotonic() - began_s + last_s > 60 * minutes:
                print(f"no time for {name}, seed {seed}", flush=True)
                return
            started_s = time.monotonic()
            run = partial(curve, name=name, task_name=task, seed=seed, lr=lr, steps=STEPS[task])
            spec = PAIRS if name.startswith("hsdp") else HOSTS
            try:
                cell = launch(spec, run, shaped=False, deadline_s=500.0)[0]
            except SynclineError as error:
                print(f"{name}, seed {seed} failed: {error}", flush=True)
                continue
            study(path, "curves", cell)
            last_s = time.monotonic() - started_s
            print(f"{name:28} seed {seed} lr {lr:g}: {cell['loss'][-1]:.4f}, {last_s:.0f} s", flush=True)


def measure(path: Path, name: str, methods: Sequence[str], rounds: int, probe_s: float) -> None:
    situation = SITUATIONS[name]
    began_s, ticks = time.monotonic(), cpu_ticks()
    TASKS[situation.task].source(Data(CPU))
    with _short_bursts(min(situation.rate_bps, situation.spec.trunk_rate_bps or situation.rate_bps)):
        main = partial(clock, situation=situation, methods=methods, rounds=rounds, probe_s=probe_s)
        answers = launch(situation.spec, main, deadline_s=900.0)
    turns = combine([answer["record"] for answer in answers], answers[0]["periods"])
    rows = {
        contender: {**turn.quartiles.fields("step_ms", 1e3), "wire_bytes": round(turn.wire_bytes)}
        for contender, turn in turns.items()
    }
    cell = {
        "situation": name,
        "about": situation.about,
        "cluster": situation.measured.describe(),
        "rounds": rounds,
        "rows": rows,
    }
    cell |= {"choices": answers[0]["choices"], "stolen": round(stolen_since(ticks), 4)}
    study(path, "clocks", cell)
    for contender, row in sorted(rows.items(), key=lambda item: float(item[1]["step_ms"])):
        quartiles = f"({row['step_ms_low']:.0f}–{row['step_ms_high']:.0f})"
        print(f"{contender:30}{row['step_ms']:9.1f} ms {quartiles:16}{row['wire_bytes'] / 1e3:10.1f} kB")
    for quality, choice in cell["choices"].items():
        print(f"{quality}: {choice['rung']}; {choice['reason'][:300]}")
    print(f"{time.monotonic() - began_s:.0f} s, stolen {cell['stolen']:.1%}", flush=True)


@contextlib.contextmanager
def _short_bursts(rate_bps: int) -> Any:
    """Let slow links have shorter bursts. Segments of TCP are split there, which costs little at such a rate."""
    usual = links.MIN_BURST_BYTES
    links.MIN_BURST_BYTES = SLOW_LINK_BURST_BYTES if rate_bps < 100_000_000 else usual
    try:
        yield
    finally:
        links.MIN_BURST_BYTES = usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--curves", choices=sorted(RATES), metavar="TASK")
    parser.add_argument("--clock", choices=sorted(SITUATIONS), metavar="SITUATION")
    parser.add_argument("--methods", help="some names, separated by commas")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--minutes", type=float, default=8.0, help="start no training that would end later")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--probe", type=float, metavar="S")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--plot", type=Path, metavar="SVG", help="with --report: draw the times to quality")
    parser.add_argument("--tables", action="store_true", help="with --report: print the tables of the guide")
    options = parser.parse_args()
    methods = options.methods and options.methods.split(",")
    if options.curves is not None:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        names = methods or f"{PEERS},{OURS}".split(",")
        train_all(options.json, options.curves, names, seeds, options.lr or RATES[options.curves], options.minutes)
    if options.clock is not None:
        situation = SITUATIONS[options.clock]
        names = methods or situation.methods.split(",")
        rounds, probe_s = options.rounds or situation.rounds, options.probe or situation.probe_s
        measure(options.json, options.clock, names, rounds, probe_s)
    if options.report is not None:
        show = tables if options.tables else report
        measured, tasks = read(options.report), {name: each.task for name, each in SITUATIONS.items()}
        show(measured, tasks, TOLERANCE)
        if options.plot is not None:
            draw(measured, tasks, TOLERANCE, options.plot)


if __name__ == "__main__":
    main()
