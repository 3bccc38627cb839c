"""Measure what DDP and the exchanges add to a step on this machine, without any network.

DDP wraps a toy model, whose backward returns prepared gradients, in a process group of one rank: the difference to a
step without DDP is DDP's overhead. An exchange's own work is measured with collectives that do nothing. All variants
take turns, so that a disturbance affects both sides of a difference. On CUDA, only `hook_s` is host time.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.dist.agreement import current_device
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, Comm, Exchange, Layout, Topology
from syncline.measure.step_watcher import queue_callback
from syncline.measure.steps import Clock, run_on_all_ranks
from syncline.records.profile import Overheads, Work

_PARAMETERS = 16
_TINY = 16
_LARGE = {"cpu": 1 << 17, "cuda": 1 << 22}  # a copy takes longer than starting it: some microseconds on CUDA
_ROUNDS, _FEWEST_ROUNDS = 15, 3
_SMALLEST_BYTES = 1 << 12
_BUCKET_BYTES = {"cpu": (1 << 16, 1 << 20, 1 << 24), "cuda": (1 << 20, 1 << 23, 1 << 26)}
_HEAD_START_CYCLES = 20_000_000  # 10 to 20 ms: longer than the host needs to start the measured work
_ONE_BUCKET_MB, _MANY_BUCKETS_MB = 1e5, 1e-6


def measure_overheads(
    device: str | torch.device = "cpu",
    exchanges: Mapping[str, Callable[[], Exchange]] | None = None,
    topology: Topology | int = 4,
    *,
    group: dist.ProcessGroup | None = None,
    largest_bytes: int | None = None,
    budget_s: float = math.inf,
) -> Overheads:
    """Measure DDP's copies and hooks, and the exchanges' own work. It takes about a second on a CPU. `exchanges` are
    `EXCHANGES` by default. They act as the first rank of the topology, or number of ranks. With a `group`, all its
    ranks measure at the same time and get the medians over the ranks. Buckets of up to `largest_bytes` are measured. If
    `budget_s` is spent, measurements are repeated less often."""
    if isinstance(topology, int) and topology < 1:
        raise UsageError(f"topology must have at least 1 rank, not {topology}")
    ranks = Topology.flat(topology) if isinstance(topology, int) else topology
    device = torch.device(device)
    if device.type not in _LARGE:
        raise UsageError(f"device must be cpu or cuda, not {device.type}")

    def measure() -> bytes:
        copies = _measure_ddp(device)
        makers = EXCHANGES if exchanges is None else exchanges
        largest = _BUCKET_BYTES[device.type][-1]
        sizes = _sizes(device, ranks.ranks, largest if largest_bytes is None else min(largest, largest_bytes))
        each_s = budget_s / max(1, len(makers))
        work = {name: _measure_work(make(), ranks, device, sizes, each_s) for name, make in makers.items()}
        return msgspec.json.encode(Overheads(**copies, work=work))

    with current_device(device):
        run_on_all_ranks(group, lambda: b"")  # a barrier: otherwise the first rank would measure an idle machine
        answers = run_on_all_ranks(group, measure)
    return _medians([msgspec.json.decode(answer, type=Overheads) for answer in answers])


@dataclass(frozen=True)
class SilentComm:
    """Collectives that return at once and send nothing, for one rank of an imaginary topology. With `echo`, they fill
    their outputs with this rank's input. One such run initializes an exchange's memory: arbitrary memory may hold
    denormal numbers, which are slow to compute with."""

    topology: Topology
    rank: int = 0
    echo: bool = False

    @property
    def size(self) -> int:
        return self.topology.ranks

    def level(self, name: str) -> Comm | None:
        """Return the group of rank 0, which belongs to a group on every level; None if it is alone in it."""
        level = next(level for level in (self.topology.whole, *self.topology.levels) if level.name == name)
        return dataclasses.replace(self, topology=self.topology.among(level)) if len(level.groups[0]) > 1 else None

    def all_reduce(self, tensor: Tensor, root: int = 0) -> SilentComm:
        return self

    reduce = broadcast = all_reduce

    def all_gather(self, output: Tensor, input: Tensor) -> SilentComm:
        if self.echo and input.numel():
            output.view(-1, input.numel()).copy_(input.reshape(1, -1))
        return self

    all_to_all = all_gather

    def reduce_scatter(self, output: Tensor, input: Tensor) -> SilentComm:
        if self.echo:
            output.view(-1).copy_(input.view(-1)[: output.numel()])
        return self

    def wait(self) -> None:
        """Return at once: a collective is its own `Work`."""


def _sizes(device: torch.device, ranks: int, largest_bytes: int) -> tuple[int, ...]:
    """Return the sizes of buckets to measure. They divide evenly by the ranks, so that all would send equal parts."""
    usual = _BUCKET_BYTES[device.type]
    share = max(largest_bytes / usual[-1], _SMALLEST_BYTES / usual[0])
    sizes = (max(1.0, min(1.0, share) * size / 4 / ranks) for size in usual)
    return tuple(4 * ranks << round(math.log2(size)) for size in sizes)


def _measure_work(
    exchange: Exchange, topology: Topology, device: torch.device, sizes: tuple[int, ...], budget_s: float
) -> Work:
    clock, seconds, began_s = Clock(device), [], time.monotonic()
    echoing, silent = SilentComm(topology, echo=True), SilentComm(topology)
    for numel in (size // 4 for size in sizes):
        # Random, because the entries that a sparse exchange selects must be spread over the bucket, as in gradients.
        start = torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(device)
        flat = start.clone()
        state = exchange.prepare(Layout.flat(numel, device=device), echoing)
        exchange.run(flat, state, echoing)
        marks: list[tuple[Any, Any]] = []
        for _ in range(_ROUNDS):
            if len(marks) >= _FEWEST_ROUNDS and time.monotonic() - began_s > budget_s:
                break
            flat.copy_(start)  # repeated sums would overflow
            _let_host_run_ahead(device)
            before = clock.mark()
            work = exchange.run(flat, state, silent)
            if work is not None:
                work.wait()
            marks.append((before, clock.mark()))
        clock.settle()
        seconds.append(statistics.median(clock.seconds(*pair) for pair in marks))
    return fit_work(sizes, seconds)


def fit_work(sizes: Sequence[int], seconds: Sequence[float]) -> Work:
    """Fit a line with relative errors, so that small buckets count, and without negative coefficients."""
    weights = 1 / np.maximum(seconds, 1e-9)
    slope, intercept = np.polyfit(sizes, seconds, 1, w=weights)
    if intercept < 0:
        squares = np.square(weights) * sizes
        slope, intercept = float(squares @ np.asarray(seconds)) / float(squares @ np.asarray(sizes)), 0.0
    if slope * sizes[-1] < 1e-9:  # below the resolution of any clock, or negative
        slope, intercept = 0.0, statistics.median(seconds)
    return Work(fixed_s=_rounded(intercept), s_per_byte=_rounded(slope))


def _measure_ddp(device: torch.device) -> dict[str, float]:
    clock, large_numel = Clock(device), _LARGE[device.type]
    if dist.is_initialized():  # a group of this rank alone, which the other ranks need not create
        group: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    else:
        backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD

    def wrapped(numel: int, bucket_cap_mb: float) -> nn.Module:
        return DDP(_Toy(numel, device), process_group=group, bucket_cap_mb=bucket_cap_mb, init_sync=False)

    try:
        models = [_Toy(_TINY, device), wrapped(_TINY, _ONE_BUCKET_MB), wrapped(_TINY, _MANY_BUCKETS_MB)]
        models += [_Toy(large_numel, device), wrapped(large_numel, _ONE_BUCKET_MB)]
        for _ in range(3):  # DDP rebuilds its buckets after the first step
            for model in models:
                _backward(clock, model, device)
        rounds = [[_backward(clock, model, device) for model in models] for _ in range(_ROUNDS)]
        clock.settle()
        del models, model  # DDP objects must not outlive their group
    finally:
        dist.destroy_process_group(group)
    # Seconds, by model and round: before the last gradient is ready, after it, and before it by the host's clock.
    times_s = [[(clock.seconds(a, b), clock.seconds(b, c), host_s) for a, b, c, host_s in marks] for marks in rounds]
    tiny, tiny_in_one, tiny_in_many, large, large_in_one = np.array(times_s).swapaxes(0, 1)
    nbytes = 4 * _PARAMETERS * large_numel
    differences = {
        "copy_in_s_per_byte": (large_in_one - large - (tiny_in_one - tiny))[:, 0] / nbytes,
        "copy_out_s_per_byte": (large_in_one - tiny_in_one)[:, 1] / nbytes,
        "hook_s": (tiny_in_many - tiny_in_one)[:, 2] / (_PARAMETERS - 1),
    }
    return {name: _rounded(max(0.0, float(np.median(values)))) for name, values in differences.items()}


def _backward(clock: Clock, model: nn.Module, device: torch.device) -> tuple[Any, Any, Any, float]:
    """Return the marks of start, last gradient and end, and the host's seconds from start to the last gradient."""
    ready: list[Any] = []
    model.zero_grad()
    loss = model()
    # Called after the last gradient. DDP queues its callback later, and callbacks run in the order of queueing.
    loss.register_hook(lambda _: queue_callback(lambda: ready.extend((clock.mark(), time.perf_counter()))))
    _let_host_run_ahead(device)
    start, start_s = clock.mark(), time.perf_counter()
    loss.backward()
    return start, ready[0], clock.mark(), ready[1] - start_s


def _let_host_run_ahead(device: torch.device) -> None:
    """Make the device wait, because the host needs longer to start a copy than the device needs for most copies."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        wait = getattr(torch.cuda, "_sleep", lambda _: None)  # private; without it, kernel launches are measured, too
        wait(_HEAD_START_CYCLES)


class _Toy(nn.Module):
    """A model whose backward returns prepared gradients, one by one."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(numel, device=device) for _ in range(_PARAMETERS))
        self._gradient = torch.full((numel,), 1e-3, device=device)

    def forward(self) -> Tensor:
        x = torch.zeros((), device=self._gradient.device, requires_grad=True)
        for weight in self.weights:
            x = _ReturnGradient.apply(x, weight, self._gradient)  # type: ignore[no-untyped-call]
        return x


class _ReturnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.gradient, None


def _medians(ranks: list[Overheads]) -> Overheads:
    def median(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: median([value[name] for value in values]) for name in values[0]}
        return statistics.median(values)

    return msgspec.convert(median([msgspec.to_builtins(rank) for rank in ranks]), Overheads)


def _rounded(value: float) -> float:
    """Round to four digits, which is more than measurements repeat to."""
    return float(f"{value:.4g}")
