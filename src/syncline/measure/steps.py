"""What measuring a model's steps takes, whoever runs them: the parts of the model, clocks, and medians.

A step is a handful of marks that a clock can read later. On CUDA a mark is an event on the stream that does the work:
waiting for the device at each parameter would stretch the very gaps that communication is to hide in, and waiting
between steps would keep the host from running ahead as it does in training.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.dist.comm import gather_bytes
from syncline.errors import MismatchError, UsageError
from syncline.records.profile import Buffers, Gradient, Profile, RankTimes, Spread

Mark = TypeVar("Mark")


@dataclass(frozen=True)
class Subject:
    """A model taken apart: what its gradients and buffers are called, and what is wrapped around it."""

    model: nn.Module
    """Without DDP, but compiled where it was compiled: what computes a step without communication."""
    name: str
    ddp: DDP | None
    parameters: dict[str, nn.Parameter]
    """Those that get a gradient which DDP exchanges, by their names without wrappers."""
    buffers: tuple[Buffers, ...]
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module) -> Subject:
        inner, ddp, compiled_ddp = model, None, False
        while True:
            if isinstance(inner, DDP):
                ddp, compiled_ddp = inner, inner is not model
                inner = inner.module
            elif (original := getattr(inner, "_orig_mod", None)) is not None:
                inner = original
            else:
                break
        ignored = set(getattr(inner, "_ddp_params_and_buffers_to_ignore", ()))
        parameters = {
            name.replace("_orig_mod.", ""): p
            for name, p in inner.named_parameters()
            if p.requires_grad and name not in ignored
        }
        buffers = [buffer for name, buffer in inner.named_buffers() if name not in ignored]
        broadcast = ddp is None or ddp.broadcast_buffers
        return cls(
            model=model if ddp is None or compiled_ddp else ddp.module,
            name=type(inner).__name__,
            ddp=ddp,
            parameters=parameters,
            buffers=_by_type(buffers) if broadcast else (),
            device=_only_device(parameters),
        )

    @property
    def compiled_with_ddp(self) -> bool:
        """`torch.compile(DDP(net))`: DDP cannot be taken out of it."""
        return self.ddp is not None and self.model is not self.ddp.module

    def refuse_silent(self, silent: Sequence[str]) -> None:
        """Raises where parameters got a gradient and their hooks said nothing: a 0 for them would be a lie."""
        if silent:
            more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
            raise UsageError(
                f"{silent[0]}{more} got a gradient, but its hook did not fire, as under compiled autograd: when it is "
                "ready cannot be measured; turn compiled autograd off while measuring"
            )


def checked_loss(loss: object) -> Tensor:
    """What a step that must not run backward has returned."""
    if not isinstance(loss, Tensor):
        raise UsageError("step must return the loss as a tensor, and not run backward: that is done for it here")
    return loss


class Clock(Protocol[Mark]):
    """Marks moments now and tells the seconds between them later."""

    def mark(self) -> Mark: ...
    def seconds(self, start: Mark, end: Mark) -> float: ...
    def settle(self) -> None:
        """Wait until all marks made so far can be read."""


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        pass


class CudaClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # which need not be the current device's
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_for(device: torch.device) -> Clock[Any]:
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass
class StepMarks(Generic[Mark]):
    """The moments of one step, as the clock marked them."""

    start: Mark
    backward_start: Mark
    backward_end: Mark
    ready: dict[str, Mark]
    update: tuple[Mark, Mark] | None = None
    """Start and end of the optimizer's step, where it is watched."""
    earlier: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Start and end of passes that only accumulated gradients: nothing was exchanged behind them."""

    def read(self, clock: Clock[Mark]) -> StepTimes:
        return StepTimes(
            forward_s=clock.seconds(self.start, self.backward_start)
            + sum(clock.seconds(*span) for span in self.earlier),
            backward_s=clock.seconds(self.backward_start, self.backward_end),
            update_s=clock.seconds(*self.update) if self.update else 0.0,
            ready_s={name: clock.seconds(self.backward_start, mark) for name, mark in self.ready.items()},
        )


@dataclass(frozen=True)
class StepTimes:
    """The moments of one step in seconds; `ready_s` counts from the start of backward."""

    forward_s: float
    backward_s: float
    update_s: float
    ready_s: dict[str, float]

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


class Measured(msgspec.Struct, frozen=True):
    """What one rank found, and what the others need of it to see who waits for whom."""

    profile: Profile
    step_s: list[float]


def summarise(
    subject: Subject, times: Sequence[StepTimes], *, model_name: str | None, how: str, batch: int | None
) -> Measured:
    """The medians of one rank's steps."""
    backward_s = _median_s([one.backward_s for one in times])
    step_s = [one.step_s for one in times]
    return Measured(
        Profile(
            model=model_name or subject.name,
            gradients=_in_ready_order(subject.parameters, times, backward_s),
            forward_s=_median_s([one.forward_s for one in times]),
            backward_s=backward_s,
            update_s=_median_s([one.update_s for one in times]),
            device=subject.device.type,
            where=describe_hardware(subject.device),
            how=how,
            steps=len(times),
            batch=batch,
            buffers=subject.buffers,
            spread=quartiles(step_s),
        ),
        step_s,
    )


def together(group: dist.ProcessGroup | None, work: Callable[[], bytes]) -> list[bytes]:
    """Collective. What `work` returns on each rank; one that fails tells the others, which would wait for it."""
    if group is None:
        return [work()]
    failure: Exception | None = None
    try:
        told = b"+" + work()
    except Exception as error:  # noqa: BLE001 - raised again, once the others know
        failure = error
        told = f"-{type(error).__name__}: {error}".splitlines()[0].encode()
    answers = gather_bytes(group, told)
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if not answer.startswith(b"+"):
            raise MismatchError(f"rank {rank} could not be measured: {answer[1:].decode()}")
    return [answer[1:] for answer in answers]


def merge(everyone: Sequence[Measured]) -> Profile:
    """One profile of ranks that were measured at the same time: medians over them, and what each took."""
    profiles = [one.profile for one in everyone]
    if len(profiles) == 1:
        return profiles[0]
    for rank, profile in enumerate(profiles):
        _refuse_other_model(profiles[0], rank, profile)
    steps = min(len(one.step_s) for one in everyone)
    rounds = list(zip(*(one.step_s[-steps:] for one in everyone), strict=True))
    backward_s = _median_s([profile.backward_s for profile in profiles])
    ready_s = [{gradient.name: gradient.ready_s for gradient in profile.gradients} for profile in profiles]
    gradients = [
        msgspec.structs.replace(
            gradient, ready_s=min(_median_s([ready[gradient.name] for ready in ready_s]), backward_s)
        )
        for gradient in profiles[0].gradients
    ]
    by_pace = sorted(everyone, key=lambda one: statistics.median(one.step_s))
    return msgspec.structs.replace(
        profiles[0],
        gradients=tuple(sorted(gradients, key=lambda gradient: gradient.ready_s)),  # stable: ties as on rank 0
        forward_s=_median_s([profile.forward_s for profile in profiles]),
        backward_s=backward_s,
        update_s=_median_s([profile.update_s for profile in profiles]),
        where=" and ".join(sorted({profile.where for profile in profiles})),
        how=f"{profiles[0].how}, {len(profiles)} ranks at the same time",
        steps=steps,
        ranks=tuple(
            RankTimes(rank=rank, forward_s=one.forward_s, backward_s=one.backward_s, update_s=one.update_s)
            for rank, one in enumerate(profiles)
        ),
        spread=by_pace[(len(by_pace) - 1) // 2].profile.spread,
        jitter_s=_median_s([max(times) - statistics.median(times) for times in rounds]),
    )


def merge_over(group: dist.ProcessGroup | None, measure: Callable[[], Measured]) -> Profile:
    """Collective. The same profile on all ranks."""
    answers = together(group, lambda: msgspec.json.encode(measure()))
    return merge([msgspec.json.decode(answer, type=Measured) for answer in answers])


def describe_hardware(device: torch.device) -> str:
    """The processor that did the work, in words; no host names, since profiles are shared."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} logical cores"


def describe_method(device: torch.device, what: str, optimizer: torch.optim.Optimizer | None) -> str:
    clock = "CUDA events" if device.type == "cuda" else f"host clock, {torch.get_num_threads()} threads"
    update = type(optimizer).__name__ if optimizer else "no optimizer"
    return f"{what}, {clock}, {update}, torch {torch.__version__}"


def _by_type(buffers: Sequence[Tensor]) -> tuple[Buffers, ...]:
    total: dict[str, int] = {}
    for buffer in buffers:
        dtype = str(buffer.dtype).removeprefix("torch.")
        total[dtype] = total.get(dtype, 0) + buffer.numel() * buffer.element_size()
    return tuple(Buffers(dtype=dtype, bytes=nbytes) for dtype, nbytes in total.items())


def _in_ready_order(
    parameters: dict[str, nn.Parameter], times: Sequence[StepTimes], backward_s: float
) -> tuple[Gradient, ...]:
    """Medians per parameter, sorted; parameters with equal medians keep the order of the last step."""
    arrival = {name: place for place, name in enumerate(times[-1].ready_s)}
    ready_s = {
        # A parameter that is used in slow steps only has a later median than backward itself.
        name: min(_median_s([one.ready_s[name] for one in times if name in one.ready_s] or [0.0]), backward_s)
        for name in parameters
    }
    order = sorted(parameters, key=lambda name: (ready_s[name], arrival.get(name, -1)))
    return tuple(
        Gradient(
            name=name,
            shape=tuple(parameters[name].shape),
            dtype=str(parameters[name].dtype).removeprefix("torch."),
            bytes=parameters[name].numel() * parameters[name].element_size(),
            ready_s=ready_s[name],
        )
        for name in order
    )


def _median_s(values: Sequence[float]) -> float:
    """To the nanosecond, finer than any clock here; CUDA events of two streams may differ by less than 0."""
    return max(0.0, round(statistics.median(values), 9))


def quartiles(step_s: Sequence[float]) -> Spread:
    if len(step_s) == 1:
        return Spread(low_s=_median_s(step_s), high_s=_median_s(step_s))
    low_s, _, high_s = statistics.quantiles(step_s, n=4, method="inclusive")
    return Spread(low_s=_median_s([low_s]), high_s=_median_s([high_s]))


def _only_device(parameters: dict[str, nn.Parameter]) -> torch.device:
    devices = {p.device for p in parameters.values()}
    if not devices:
        raise UsageError("the model has no parameter that requires a gradient")
    if len(devices) > 1:
        raise UsageError(f"the model must sit on one device, not on {', '.join(sorted(map(str, devices)))}")
    device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"can measure on cpu and cuda, not on {device.type}")
    return device


def _refuse_other_model(first: Profile, rank: int, other: Profile) -> None:
    mine, theirs = (
        {gradient.name: f"{list(gradient.shape)} {gradient.dtype}" for gradient in profile.gradients}
        for profile in (first, other)
    )
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            raise MismatchError(
                f"the ranks have different models: {name} is {mine.get(name, 'missing')} on rank 0 and "
                f"{theirs.get(name, 'missing')} on rank {rank}"
            )
