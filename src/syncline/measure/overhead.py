"""Measures what DDP and the exchanges add to a step on this machine, apart from any network.

DDP wraps a toy model, in a process group of this rank alone, whose backward hands out gradients that lie ready: nothing
is computed and nothing is sent, so what a step takes longer than without DDP is DDP's own. A callback in the autograd
engine, which runs when the last gradient is there and before DDP looks at its finished buckets, divides that in two:

- before it, on the thread that runs backward: the copies into buckets, which grow with their bytes, and handing a
  bucket over, which many small buckets do more often than one;
- after it: the copies out of the buckets, which wait for the exchange in training.

All variants take turns in the same rounds, and each number is the median over rounds of a difference within one: what
disturbs a round disturbs all that is compared.

An exchange's own computation is what it takes over a `SilentComm`, whose collectives do nothing.

On CUDA copies and work are times on the device's stream, measured while the host is ahead of it, as it is where the
device is the limit: starting a copy takes the host longer than most copies take the device. `hook_s` is the host's own
time, and delays a step only where the host is the limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, Comm, Exchange, Layout, Topology
from syncline.measure.steps import Clock, clock_for, together
from syncline.records.profile import Overheads, Work

_PARAMETERS = 16
_TINY = 16
# Large enough that a copy takes longer than its start: on CUDA the start alone is some microseconds.
_LARGE = {"cpu": 1 << 17, "cuda": 1 << 22}
_ROUNDS = 15
_BUCKET_BYTES = {"cpu": (1 << 16, 1 << 20, 1 << 24), "cuda": (1 << 20, 1 << 23, 1 << 26)}
_HEAD_START_CYCLES = 20_000_000  # 10 to 20 ms: longer than the host needs for what is measured
_ONE_BUCKET_MB, _MANY_BUCKETS_MB = 1e5, 1e-6


def measure_overheads(
    device: str | torch.device = "cpu",
    exchanges: Mapping[str, Callable[[], Exchange]] | None = None,
    topology: Topology | int = 4,
    *,
    group: dist.ProcessGroup | None = None,
) -> Overheads:
    """What DDP's copies and hooks and the exchanges' own work take on `device`; about a second on a CPU.

    `exchanges` by name (default: `EXCHANGES`) work as the first rank of `topology`, or of so many ranks. Alone on each
    rank, or with a process group on all its ranks together, at the same time: then all get the medians over the ranks.
    """
    if isinstance(topology, int) and topology < 1:
        raise UsageError(f"there must be at least 1 rank, not {topology}")
    place = Topology.flat(topology) if isinstance(topology, int) else topology
    device = torch.device(device)
    if device.type not in _LARGE:
        raise UsageError(f"can measure on cpu and cuda, not on {device.type}")

    def measure() -> bytes:
        copies = _measure_ddp(device)
        makers = EXCHANGES if exchanges is None else exchanges
        work = {name: _measure_work(make(), place, device) for name, make in makers.items()}
        return msgspec.json.encode(Overheads(**copies, work=work))

    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        together(group, lambda: b"")  # start together, or the first would measure an idle machine
        answers = together(group, measure)
    return _medians([msgspec.json.decode(answer, type=Overheads) for answer in answers])


@dataclass(frozen=True)
class SilentComm:
    """Collectives that return at once and send nothing, among ranks that are not there.

    With `echo` they fill their outputs with what this rank gives: once, so that an exchange does not compute with
    whatever lay in its memory, which may be slow numbers.
    """

    topology: Topology
    rank: int = 0
    echo: bool = False

    @property
    def size(self) -> int:
        return self.topology.ranks

    def level(self, name: str) -> Comm | None:
        """As the first rank, which leads everywhere."""
        level = next(level for level in (self.topology.whole, *self.topology.levels) if level.name == name)
        return dataclasses.replace(self, topology=self.topology.among(level)) if len(level.groups[0]) > 1 else None

    def all_reduce(self, tensor: Tensor) -> SilentWork:
        return SilentWork()

    def all_to_all(self, output: Tensor, input: Tensor) -> SilentWork:
        if self.echo:
            output.view(-1).copy_(input.view(-1))
        return SilentWork()

    def all_gather(self, output: Tensor, input: Tensor) -> SilentWork:
        if self.echo:
            output.view(self.size, -1).copy_(input.reshape(1, -1))
        return SilentWork()

    def reduce(self, tensor: Tensor, root: int) -> SilentWork:
        return SilentWork()

    def broadcast(self, tensor: Tensor, root: int) -> SilentWork:
        return SilentWork()


class SilentWork:
    def wait(self) -> None:
        pass


def _measure_work(exchange: Exchange, place: Topology, device: torch.device) -> Work:
    clock = clock_for(device)
    # As many for each rank, so that what one would send of its part is what any other could send of its own.
    ranks = place.ranks
    sizes = tuple(4 * ranks << max(0, round(math.log2(size / 4 / ranks))) for size in _BUCKET_BYTES[device.type])
    return _line(sizes, [_work_s(clock, exchange, place, size // 4, device) for size in sizes])


def _work_s(clock: Clock[Any], exchange: Exchange, place: Topology, numel: int, device: torch.device) -> float:
    layout = Layout.flat(numel, device=device)
    # Large ones everywhere, as in gradients: what an exchange selects must not all lie in one place.
    start = torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(device)
    flat = start.clone()
    echoing, silent = SilentComm(place, echo=True), SilentComm(place)
    state = exchange.prepare(layout, echoing)
    exchange.run(flat, state, echoing)
    marks = []
    for _ in range(_ROUNDS):
        flat.copy_(start)  # sums that are summed again would leave the numbers' range
        _let_host_run_ahead(device)
        before = clock.mark()
        work = exchange.run(flat, state, silent)
        if work is not None:
            work.wait()
        marks.append((before, clock.mark()))
    clock.settle()
    return statistics.median(clock.seconds(*pair) for pair in marks)


def _line(sizes: tuple[int, ...], seconds: list[float]) -> Work:
    """The line nearest in relative terms, or small buckets would not count; neither of its parts is below 0."""
    weights = 1 / np.maximum(seconds, 1e-9)
    slope, intercept = np.polyfit(sizes, seconds, 1, w=weights)
    if intercept < 0:
        squares = np.square(weights) * sizes
        slope, intercept = float(squares @ np.asarray(seconds)) / float(squares @ np.asarray(sizes)), 0.0
    if slope * sizes[-1] < 1e-9:  # less than any clock shows, or below 0
        slope, intercept = 0.0, statistics.median(seconds)
    return Work(fixed_s=_rounded(intercept), s_per_byte=_rounded(slope))


def _measure_ddp(device: torch.device) -> dict[str, float]:
    clock = clock_for(device)
    with group_of_one(device) as group:
        large = _LARGE[device.type]

        def wrapped(numel: int, bucket_cap_mb: float) -> nn.Module:
            return DDP(_Toy(numel, device), process_group=group, bucket_cap_mb=bucket_cap_mb, init_sync=False)

        variants: dict[str, nn.Module] = {
            "tiny": _Toy(_TINY, device),
            "tiny in one bucket": wrapped(_TINY, _ONE_BUCKET_MB),
            "tiny in many buckets": wrapped(_TINY, _MANY_BUCKETS_MB),
            "large": _Toy(large, device),
            "large in one bucket": wrapped(large, _ONE_BUCKET_MB),
        }
        for _ in range(3):  # DDP rebuilds its buckets after the first
            for model in variants.values():
                _backward(clock, model, device)
        marks = [{name: _backward(clock, model, device) for name, model in variants.items()} for _ in range(_ROUNDS)]
        clock.settle()
        del variants  # DDP objects must not outlive their group
    nbytes = 4 * _PARAMETERS * large

    def during(round_: dict[str, _Marks], name: str) -> float:
        return clock.seconds(round_[name].start, round_[name].ready)

    def after(round_: dict[str, _Marks], name: str) -> float:
        return clock.seconds(round_[name].ready, round_[name].end)

    return {
        "copy_in_s_per_byte": _typical(
            (
                during(one, "large in one bucket")
                - during(one, "large")
                - (during(one, "tiny in one bucket") - during(one, "tiny"))
            )
            / nbytes
            for one in marks
        ),
        "copy_out_s_per_byte": _typical(
            (after(one, "large in one bucket") - after(one, "tiny in one bucket")) / nbytes for one in marks
        ),
        "hook_s": _typical(
            (one["tiny in many buckets"].host_s - one["tiny in one bucket"].host_s) / (_PARAMETERS - 1) for one in marks
        ),
    }


@dataclass(frozen=True)
class _Marks:
    start: Any
    ready: Any
    """When the last gradient was there, and before DDP finishes its buckets."""
    end: Any
    host_s: float
    """From start to ready by the host's clock."""


def _backward(clock: Clock[Any], model: nn.Module, device: torch.device) -> _Marks:
    ready: list[Any] = []
    ready_s = 0.0

    def on_ready() -> None:
        nonlocal ready_s
        ready.append(clock.mark())
        ready_s = time.perf_counter()

    model.zero_grad()
    loss = model(on_ready)
    _let_host_run_ahead(device)
    start, start_s = clock.mark(), time.perf_counter()
    loss.backward()
    return _Marks(start, ready[0], clock.mark(), ready_s - start_s)


def _let_host_run_ahead(device: torch.device) -> None:
    wait = getattr(torch.cuda, "_sleep", None)  # private: without it, starts are part of what is measured
    if device.type == "cuda" and wait is not None:
        torch.cuda.synchronize()
        wait(_HEAD_START_CYCLES)


class _Toy(nn.Module):
    """Parameters whose gradients lie ready: backward only hands them out, one by one."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(numel, device=device) for _ in range(_PARAMETERS))
        self._gradient = torch.full((numel,), 1e-3, device=device)

    def forward(self, on_ready: Callable[[], None]) -> Tensor:
        x = torch.zeros((), device=self._gradient.device, requires_grad=True)
        for parameter in self.weights:
            x = _HandOut.apply(x, parameter, self._gradient)  # type: ignore[no-untyped-call]
        return _CallWhenReady.apply(x, on_ready)  # type: ignore[no-any-return, no-untyped-call]


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.gradient, None


class _CallWhenReady(torch.autograd.Function):
    """First in backward, so its callback comes before DDP's: they run in the order they were queued."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_ready: Callable[[], None]) -> Tensor:
        ctx.on_ready = on_ready
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(ctx.on_ready)
        return grad, None


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """A process group of this rank alone; the others need not know."""
    if dist.is_initialized():
        group: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        try:
            yield group
        finally:
            dist.destroy_process_group(group)
        return
    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        whole = dist.group.WORLD
        assert whole is not None  # noqa: S101 - it was made a moment ago
        yield whole
    finally:
        dist.destroy_process_group()


def _medians(everyone: list[Overheads]) -> Overheads:
    def over_ranks(value: Callable[[Overheads], float]) -> float:
        return statistics.median(map(value, everyone))

    return Overheads(
        copy_in_s_per_byte=over_ranks(lambda one: one.copy_in_s_per_byte),
        copy_out_s_per_byte=over_ranks(lambda one: one.copy_out_s_per_byte),
        hook_s=over_ranks(lambda one: one.hook_s),
        work={
            name: Work(
                fixed_s=over_ranks(lambda one: one.work[name].fixed_s),  # noqa: B023 - called right away
                s_per_byte=over_ranks(lambda one: one.work[name].s_per_byte),  # noqa: B023
            )
            for name in everyone[0].work
        },
    )


def _typical(values: Iterator[float]) -> float:
    return _rounded(max(0.0, statistics.median(values)))


def _rounded(value: float) -> float:
    """To four digits, which is more than it repeats to."""
    return float(f"{value:.4g}")
