"""Does anything grow, or fall apart, in ten thousand steps on hosts that stumble?

Four emulated hosts train a small network on real digits, through one exchange after the other, round after round:
plain, in 16 bits, in 4 bits, sparse, in two levels, sparse in two levels, as sparse updates in every step and in every
third one, with overlap, layer by layer. Meanwhile, by a seeded schedule, ranks
are stopped for tens of milliseconds (SIGSTOP) or kept busy, links get other rates, some steps are not finite on one
rank, and some gradients are accumulated under `no_sync`. Afterwards exchanges are attached and detached in turn.

At the end of each segment of steps, every rank notes its memory, tensors, objects, threads, open files and process
groups, and all compare their weights. What must be level: threads, files and groups exactly, from the second round on,
at the same segment of each round; objects and memory within `TOLERANCES`, as the slope over the second half, in which
caches have filled. A slope is the median of those between all pairs of readings of the same segment, and the worst
rank's counts. Exit 1 if something grows.

Three things grow by themselves. Torch's record of the last 2000 collectives fills up in the first few hundred steps:
here it has room for few. A process group of torch's leaves something behind when it is destroyed: how much is measured
with groups of nobody's, made and destroyed at the end, and taken off for every group that was made; rank 0 also serves
the store, in which more of them stay. And malloc gives threads that come and go one of its many arenas each, all of
which become as large as the largest needs to be, some 40 MB in the end: here it has two.

    python benchmarks/soak.py --json benchmarks/results/soak-$(date +%F).json       # a quarter of an hour
    python benchmarks/soak.py --steps 500 --attach 40       # only what must be exactly level
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import hashlib
import itertools
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch._dynamo  # DDP imports it: once here, not in every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from syncline.cluster import ClusterSpec, Rank, launch, links
from syncline.files import write_json
from syncline.models.data import digits
from syncline.models.zoo import loss

HOSTS, MBIT = 4, 1_000_000
RATES_BPS = tuple(rate * MBIT for rate in (50, 100, 200))
PAIRS = (2, 2)
SPARSE = syncline.OkTopk(density=0.05)
EXCHANGES: dict[str, syncline.Exchange] = {
    "dense": syncline.Dense(),
    "bf16": syncline.Dense(wire="bf16"),
    "oktopk": SPARSE,
    "hierarchical": syncline.Hierarchical(levels=PAIRS, shape="sharded"),
    "hierarchical+oktopk": syncline.Hierarchical(across=SPARSE, levels=PAIRS, shape="leader"),
    "int4": syncline.Quantized(bits=4),
    "updates": SPARSE,
    "local steps": SPARSE,
    "overlap": syncline.Dense(),
    "layerwise": SPARSE,
}
UPDATES: dict[str, dict[str, int]] = {"updates": {"every": 1}, "local steps": {"every": 3, "delay": 1}}
OVERLAP, LAYERWISE = "overlap", "layerwise"
ROUNDS, FEWEST_STEPS = 14, 10
"""Through all of them, if steps are enough for that."""
LEVEL = ("threads", "files", "groups")
TOLERANCES = {
    "training": {"rss_kb": 1000.0, "live_kb": 50.0, "tensor_kb": 0.5, "objects": 10.0},
    "attaching": {"rss_kb": 2000.0, "live_kb": 300.0, "tensor_kb": 0.5, "objects": 10.0},
}
"""What may be added per 1000 steps, or per 100 attachments. An empty list that is forgotten in every step is over two
of them, and so is what one attachment in fifty keeps. Malloc's own disorder is not: it is in `rss_kb`, which now and
then goes up by a megabyte at once, and not in `live_kb`; nor is what the store on rank 0 remembers."""
ENOUGH = {"training": 5000, "attaching": 100}
"""Of them: with fewer, caches are still being filled, and a slope says nothing."""
OF_TORCH = ("rss_kb", "live_kb", "objects")
"""Of what a process group leaves something behind."""
RECORDED, ARENAS = 50, 2
_M_ARENA_MAX = -8
PER = {"training": 1000, "attaching": 100}
CHANCES = {"stop": 1 / 60, "busy": 1 / 60, "reshape": 1 / 80, "spoiled": 1 / 50, "accumulated": 1 / 12}
"""Of each, in a step."""
SETTLING_S = 10.0
"""For a thread that has ended, until the kernel has removed it."""

# --- what is trained, and what happens to it --------------------------------------------------------------------------


def network() -> nn.Module:
    """60,000 parameters in some six buckets."""
    layers = [nn.Linear(64, 64) for _ in range(2)]
    hidden = [part for layer in layers for part in (layer, nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), *hidden, nn.Linear(64, 10))


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    data = digits()
    chosen = torch.randint(len(data.train_labels), (4,), generator=torch.Generator().manual_seed(4 * step + rank))
    return data.train_images[chosen], data.train_labels[chosen]


class Trouble:
    """What happens in which step: the same schedule on all ranks, each of which does its part."""

    def __init__(self, rank: Rank, seed: int) -> None:
        self._rank, self._seed = rank, seed
        self.happened = dict.fromkeys(CHANCES, 0)
        self._stopper = subprocess.Popen(  # a process cannot wake itself
            [sys.executable, "-S", "-c", _STOPPER, str(os.getpid())], stdin=subprocess.PIPE, text=True
        )

    def of(self, step: int) -> set[str]:
        """What this rank's step is to be, after what befalls the rank before it."""
        draw = random.Random(f"{self._seed}/{step}")
        whom = draw.randrange(self._rank.world_size)
        came = {kind for kind, chance in CHANCES.items() if draw.random() < chance}
        if not self._rank.shaped:
            came -= {"reshape"}
        for kind in came:
            self.happened[kind] += 1
        took_ms = draw.randrange(10, 60)
        rate_bps = draw.choice(RATES_BPS)
        if whom == self._rank.rank:
            if "stop" in came and self._stopper.stdin is not None:
                print(took_ms, file=self._stopper.stdin, flush=True)
            if "busy" in came:
                end = time.monotonic() + took_ms / 1000
                while time.monotonic() < end:
                    pass
            if "reshape" in came:
                links.reshape(rate_bps)
        elif "spoiled" in came:
            came.remove("spoiled")  # on one rank; the others find out
        return came

    def close(self) -> None:
        self._stopper.communicate(timeout=10)


_STOPPER = """
import os, signal, sys, time
for line in sys.stdin:
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(int(line) / 1000)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


class Trainee:
    """Two networks, one for DDP and one for `Layerwise`, and their optimizers, all through the run."""

    def __init__(self, rank: Rank) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.ddp = DDP(network(), bucket_cap_mb=0.05)
        self.plain = network()
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.02, momentum=0.9)
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.02, momentum=0.9)
        self.skipped = 0
        self.handle: syncline.Handle | None = None

    @contextlib.contextmanager
    def through(self, name: str) -> Iterator[Callable[[int, set[str]], None]]:
        """What makes a step of a number through this exchange, in which these things happen."""
        if name == LAYERWISE:
            trainer = syncline.Layerwise(self.plain, self.plain_optimizer, EXCHANGES[name], bucket_mb=0.05)
            try:
                yield lambda step, came: self._backward(trainer, step, came)
            finally:
                trainer.close()
        else:
            options: dict[str, Any] = {}
            step = self._step
            if name in UPDATES:
                options, step = {"optimizer": self.optimizer, "warmup": 0, **UPDATES[name]}, self._step_always
            elif name == OVERLAP:
                options, step = {"optimizer": self.optimizer, "overlap": "forward"}, self._step_overlapped
            self.handle = handle = syncline.attach(self.ddp, EXCHANGES[name], **options)
            try:
                yield step
            finally:
                self.handle = None
                handle.detach()

    def _step(self, step: int, came: set[str]) -> None:
        self.optimizer.zero_grad()
        self._backward(self.ddp, step, came)
        if all(bool(torch.isfinite(p.grad).all()) for p in self.ddp.parameters() if p.grad is not None):
            self.optimizer.step()
        else:
            self.skipped += 1

    def _step_always(self, step: int, came: set[str]) -> None:
        """All ranks step, whatever their gradients are: updates that are not finite are not applied."""
        self.optimizer.zero_grad()
        self._backward(self.ddp, step, came)
        self.optimizer.step()

    def _step_overlapped(self, step: int, came: set[str]) -> None:
        """The norm says whether gradients, which are in shards, are finite."""
        self.optimizer.zero_grad()
        self._backward(self.ddp, step, came)
        assert self.handle is not None
        if bool(torch.isfinite(self.handle.clip_grad_norm_(1e6))):
            self.optimizer.step()
        else:
            self.skipped += 1

    def _backward(self, model: Any, step: int, came: set[str]) -> None:
        if "accumulated" in came:
            images, labels = batch_of(self.rank.rank, -step)
            with model.no_sync():
                loss(model(images), labels).backward()
        images, labels = batch_of(self.rank.rank, step)
        value = loss(model(images), labels)
        (value * float("inf") if "spoiled" in came else value).backward()

    @property
    def mark(self) -> str:
        """Of all weights' bits; between exchanges of updates, of those that ranks agreed on last."""
        weights = [*self.ddp.parameters(), *self.plain.parameters()]
        with contextlib.nullcontext() if self.handle is None else self.handle.synced():
            return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in weights)).hexdigest()[:16]


# --- what is noted ----------------------------------------------------------------------------------------------------


def counts() -> dict[str, int]:
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def settled(expected: dict[str, int] | None) -> dict[str, int]:
    """`counts`, which get a while to become what they were."""
    end = time.monotonic() + SETTLING_S
    found = counts()
    while expected is not None and found != expected and time.monotonic() < end:
        time.sleep(0.02)
        found = counts()
    return found


def memory() -> dict[str, float]:
    gc.collect()
    everything = gc.get_objects()
    storages = {}
    for one in everything:
        if issubclass(type(one), Tensor) and one.device.type == "cpu" and one.layout == torch.strided:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # has no storage
                storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    used = psutil.Process().memory_full_info()
    return {
        "made": len(dist.distributed_c10d._world.tags_to_pg),  # by each group that this rank was in, for ever
        "rss_kb": used.rss / 1024,
        "live_kb": live_kb(),
        "pss_kb": used.pss / 1024,
        "uss_kb": used.uss / 1024,
        "tensor_kb": sum(storages.values()) / 1024,
        "objects": len(everything),
    }


class _Mallinfo(ctypes.Structure):
    """glibc's, of which two are asked for: bytes in blocks that were mapped, and in others that are in use."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "free", "top")
    ]


def live_kb() -> float:
    """What malloc has given out and not got back: unlike resident memory it has no holes in it."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return float(found.uordblks + found.hblkhd) / 1024


class Notes:
    """One rank's readings of a part of the run."""

    def __init__(self) -> None:
        self.readings: list[dict[str, Any]] = []
        self._first: dict[str, dict[str, int]] = {}

    def take(self, at: int, segment: str, mark: str) -> None:
        """Collective: weights that differ end the run."""
        marks: list[Any] = [torch.zeros(16, dtype=torch.uint8) for _ in range(dist.get_world_size())]
        dist.all_gather(marks, torch.frombuffer(bytearray(mark.encode()), dtype=torch.uint8))
        if len({bytes(one.tolist()) for one in marks}) != 1:
            raise RuntimeError(f"weights differ between ranks at {at}, after {segment}: {marks}")
        before = len(self.readings)
        found = settled(self._first.get(segment))
        if before >= len(EXCHANGES):  # the first round makes what stays
            self._first.setdefault(segment, found)
        self.readings.append({"at": at, "segment": segment, **found, **memory()})


# --- the run ----------------------------------------------------------------------------------------------------------


def soak(rank: Rank, steps: int, attachments: int, seed: int) -> dict[str, Any]:
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS)
    trouble = Trouble(rank, seed)
    rank.init_process_group(60)
    trainee = Trainee(rank)
    rounds = min(ROUNDS, max(1, steps // (len(EXCHANGES) * FEWEST_STEPS)))
    bounds = [steps * number // (rounds * len(EXCHANGES)) for number in range(rounds * len(EXCHANGES) + 1)]
    training, attaching = Notes(), Notes()
    begin = time.monotonic()
    for name, (first, last) in zip(itertools.cycle(EXCHANGES), itertools.pairwise(bounds), strict=False):
        with trainee.through(name) as make_step:
            for step in range(first, last):
                make_step(step, trouble.of(step))
            training.take(last, name, trainee.mark)
        warn(rank, f"{last} of {steps} steps, {time.monotonic() - begin:.0f} s", training)
    trained_s = time.monotonic() - begin
    for number, name in zip(range(attachments), itertools.cycle(EXCHANGES), strict=False):
        with trainee.through(name) as make_step:
            make_step(steps + number, set())
        if (number + 1) % len(EXCHANGES) == 0:
            attaching.take(number + 1, "detached", trainee.mark)
            warn(rank, f"{number + 1} of {attachments} attachments", attaching)
    plain = left_by_groups()
    trouble.close()
    return {
        "plain": plain,
        "training": training.readings,
        "attaching": attaching.readings,
        "trained_s": trained_s,
        "attached_s": time.monotonic() - begin - trained_s,
        "happened": trouble.happened,
        "skipped": trainee.skipped,
        "accuracy": accuracy(trainee),
        "weights": trainee.mark,
    }


def left_by_groups(warm: int = 40, count: int = 200) -> dict[str, float]:
    """By each of torch's own process groups, without any of ours."""
    for number in range(warm + count):
        group = dist.new_group(list(range(dist.get_world_size())))
        dist.all_reduce(torch.ones(4), group=group)
        dist.destroy_process_group(group)
        if number + 1 == warm:
            before = memory()
    after = memory()
    return {what: (after[what] - before[what]) / count for what in OF_TORCH}


def warn(rank: Rank, text: str, notes: Notes) -> None:
    if rank.rank == 0:
        now = notes.readings[-1]
        rank.say(f"{text}: {now['rss_kb'] / 1024:.1f} MB, {now['threads']} threads, {now['files']} files")


def accuracy(trainee: Trainee) -> list[float]:
    """Of both networks, on digits that they were not trained on: that they did learn something."""
    data = digits()
    with torch.no_grad():
        guesses = [net(data.held_out_images).argmax(-1) for net in (trainee.ddp.module, trainee.plain)]
    return [round(float((guess == data.held_out_labels).float().mean()), 4) for guess in guesses]


# --- the verdict ------------------------------------------------------------------------------------------------------


def slope(readings: list[dict[str, Any]], what: str, per_group: float) -> float:
    """Per unit of `at`, over the second half, between readings of the same segment, without what groups left."""
    half = readings[-1]["at"] / 2
    late = [reading for reading in readings if reading["at"] >= half]
    slopes = [
        (b[what] - a[what] - per_group * (b["made"] - a["made"])) / (b["at"] - a["at"])
        for a, b in itertools.combinations(late, 2)
        if a["segment"] == b["segment"]
    ]
    return statistics.median(slopes) if slopes else 0.0


def uneven(readings: list[dict[str, Any]], what: str) -> list[str]:
    """Segments at whose ends this was not always the same, from the second round on."""
    found = []
    for segment in dict.fromkeys(reading["segment"] for reading in readings):
        values = [reading[what] for reading in readings if reading["segment"] == segment][1:]
        if len(set(values)) > 1:
            found.append(f"{segment}: {min(values)} to {max(values)}")
    return found


def judge(part: str, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each thing that must not grow."""
    ranks = [answer[part] for answer in answers]
    rows: list[dict[str, Any]] = []
    for what in LEVEL:
        differs = [f"rank {rank}: {text}" for rank, readings in enumerate(ranks) for text in uneven(readings, what)]
        first, last = (max(readings[place][what] for readings in ranks) for place in (0, -1))
        rows.append({"what": what, "first": first, "last": last, "fine": not differs, "differs": differs})
    for what, tolerance in TOLERANCES[part].items():
        worst = max(slope(answer[part], what, answer["plain"].get(what, 0.0)) for answer in answers) * PER[part]
        first, last = (max(readings[place][what] for readings in ranks) for place in (0, -1))
        row = {"what": what, "first": round(first, 1), "last": round(last, 1), "slope": round(worst, 2)}
        enough = ranks[0][-1]["at"] >= ENOUGH[part]
        rows.append({**row, "tolerance": tolerance, "enough": enough, "fine": worst <= tolerance or not enough})
    return rows


def show(part: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{part:<12}{'first':>12}{'last':>12}   per {PER[part]} {'steps' if part == 'training' else 'attachments'}")
    for row in rows:
        grows = "exactly level" if "slope" not in row else f"{row['slope']:+.2f}, at most {row['tolerance']:g}"
        grows += "" if row.get("enough", True) else f"; not judged under {ENOUGH[part]}"
        told = grows if row["fine"] else f"GROWS: {'; '.join(row.get('differs', [])[:3]) or grows}"
        print(f"{row['what']:<12}{row['first']:>12,}{row['last']:>12,}   {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--attach", type=int, default=204, help="how often to attach and detach afterwards")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args()
    steps, attach = 2 * len(EXCHANGES) * FEWEST_STEPS, 4 * len(EXCHANGES)
    if options.steps < steps or options.attach < attach:
        parser.error(f"fewer steps or attachments than these say nothing: --steps {steps} --attach {attach}")
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(RECORDED)
    digits()  # read once, for all ranks
    spec = ClusterSpec(hosts=HOSTS, rate_bps=RATES_BPS[-1])
    run = functools.partial(soak, steps=options.steps, attachments=options.attach, seed=options.seed)
    answers = launch(spec, run, deadline_s=3 * 3600, on_event=lambda _, text: print(text, file=sys.stderr, flush=True))
    verdict = {part: judge(part, answers) for part in TOLERANCES}
    for part, rows in verdict.items():
        show(part, rows)
    first = answers[0]
    happened = ", ".join(f"{count} {kind}" for kind, count in first["happened"].items())
    print(f"\n{options.steps} steps in {first['trained_s']:.0f} s, {options.attach} attachments in ", end="")
    print(f"{first['attached_s']:.0f} s; {happened}; {first['skipped']} steps skipped; weights agree on all ranks")
    left = ", ".join(f"{first['plain'][what]:.2f} {what}" for what in OF_TORCH)
    print(f"each process group of torch's own leaves {left}")
    print(f"held-out digits right: {', '.join(f'{part:.1%}' for part in first['accuracy'])}")
    grows = [f"{part}: {row['what']}" for part, rows in verdict.items() for row in rows if not row["fine"]]
    if options.json:
        write_json(
            options.json,
            {
                "torch": str(torch.__version__),
                "cluster": {"hosts": HOSTS, "rates_bps": list(RATES_BPS), "device": "cpu"},
                "steps": options.steps,
                "attachments": options.attach,
                "seed": options.seed,
                **{
                    key: first[key]
                    for key in ("plain", "trained_s", "attached_s", "happened", "skipped", "accuracy", "weights")
                },
                "verdict": verdict,
                "readings": [{part: as_columns(answer[part]) for part in TOLERANCES} for answer in answers],
            },
        )
    print("grows: " + ", ".join(grows) if grows else "nothing that was judged grows")
    sys.exit(1 if grows else 0)


def as_columns(readings: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Shorter than a table of rows."""
    return {
        key: [round(reading[key], 1) if isinstance(reading[key], float) else reading[key] for reading in readings]
        for key in readings[0]
    }


if __name__ == "__main__":
    main()
