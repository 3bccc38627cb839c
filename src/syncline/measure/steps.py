"""Common parts of everything that times a model's steps: the model's parts, a clock, and medians over steps and ranks.
A step is a set of marks that a clock converts to seconds later. On CUDA they are events: waiting for the device would
stretch the gaps that communication is to hide in, and keep the host from running ahead as it does in training."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from syncline.dist.comm import gather_bytes
from syncline.errors import MismatchError, UsageError
from syncline.records.profile import Buffers, Gradient, Profile, RankTimes, Spread


@dataclass(frozen=True)
class Subject:
    """A model to measure, without its wrappers."""

    model: nn.Module  # it computes a step without communication: without DDP, but compiled if the user compiled it
    name: str
    ddp: DDP | None
    parameters: dict[str, nn.Parameter]  # those whose gradients DDP exchanges, by their names without wrappers
    buffers: tuple[Buffers, ...]
    device: torch.device
    batch: int | None

    @classmethod
    def of(cls, model: nn.Module, name: str | None = None, batch: int | None = None) -> Subject:
        inner: Any = model
        ddp, compiled_ddp = None, False
        while isinstance(inner, DDP) or hasattr(inner, "_orig_mod"):
            if isinstance(inner, DDP):
                ddp, compiled_ddp = inner, inner is not model
            inner = inner.module if isinstance(inner, DDP) else inner._orig_mod
        ignored = set(getattr(inner, "_ddp_params_and_buffers_to_ignore", ()))
        trained = [(n, p) for n, p in inner.named_parameters() if p.requires_grad and n not in ignored]
        parameters = {n.replace("_orig_mod.", ""): p for n, p in trained}
        buffer_bytes = Counter[str]()
        for buffer_name, buffer in inner.named_buffers():
            if buffer_name not in ignored and (ddp is None or ddp.broadcast_buffers):
                buffer_bytes[str(buffer.dtype).removeprefix("torch.")] += buffer.nbytes
        devices = sorted({str(p.device) for p in parameters.values()})
        if not devices:
            raise UsageError("the model has no parameter that requires a gradient")
        if any(hasattr(parameter, "_local_tensor") for parameter in parameters.values()):  # DTensors
            text = "the model is sharded"
            raise UsageError(f"{text}: profile it with syncline profile, or with syncline.fsdp.profile.profile_sharded")
        if len(devices) > 1:
            raise UsageError(f"the model must be on one device, not on {', '.join(devices)}")
        if (device := torch.device(devices[0])).type not in ("cpu", "cuda"):
            raise UsageError(f"the model must be on cpu or cuda, not on {device.type}")
        buffers = tuple(Buffers(dtype=dtype, bytes=nbytes) for dtype, nbytes in buffer_bytes.items())
        alone = model if ddp is None or compiled_ddp else ddp.module
        return cls(alone, name or type(inner).__name__, ddp, parameters, buffers, device, batch)

    def on_gradients(self, ready: Callable[[str], None]) -> list[RemovableHandle]:
        """Call a function with the name of each parameter whose gradient is ready."""
        parameters = self.parameters.items()
        return [p.register_post_accumulate_grad_hook(lambda _, name=name: ready(name)) for name, p in parameters]


def checked_loss(loss: object) -> Tensor:
    """Return the value of a user's step function, after checking that it is a tensor."""
    if not isinstance(loss, Tensor):
        raise UsageError("step must return the loss as a tensor, and must not call backward: Syncline calls it")
    return loss


class Clock:
    """Marks times now, and returns the seconds between them later. On CUDA, marks are events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None

    def mark(self) -> Any:
        if self._cuda is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._cuda))  # the model's device may not be the current one
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start) if self._cuda is None else float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        """Wait until all marks made so far can be read."""
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)


@dataclass
class StepMarks:
    """The marks of one step."""

    start: Any
    backward_start: Any
    backward_end: Any
    ready: dict[str, Any]
    update: tuple[Any, Any] | None = None  # start and end of the optimizer's step, if it is measured
    earlier: Sequence[tuple[Any, Any]] = ()  # start and end of passes that only accumulated gradients


class Measured(msgspec.Struct, frozen=True):
    """The profile of one rank, and the times of its steps, from which the jitter between ranks is computed."""

    profile: Profile
    step_s: list[float]


def summarise(
    subject: Subject, clock: Clock, steps: Sequence[StepMarks], optimizer: torch.optim.Optimizer | None, what: str
) -> Measured:
    """Return a profile with the medians of one rank's steps. `what` describes the steps."""
    clock.settle()
    forwards = [[(step.start, step.backward_start), *step.earlier] for step in steps]
    forward_s = [sum(clock.seconds(*span) for span in spans) for spans in forwards]
    backward_s = [clock.seconds(step.backward_start, step.backward_end) for step in steps]
    update_s = [clock.seconds(*step.update) if step.update else 0.0 for step in steps]
    ready_s = [{name: clock.seconds(step.backward_start, mark) for name, mark in step.ready.items()} for step in steps]
    step_s = [sum(times) for times in zip(forward_s, backward_s, update_s, strict=True)]
    timer = "CUDA events" if subject.device.type == "cuda" else f"host clock, {torch.get_num_threads()} threads"
    update = type(optimizer).__name__ if optimizer else "no optimizer"
    gradients = []
    for name, parameter in subject.parameters.items():
        # The median of a parameter that only slow steps use may be later than the median end of backward.
        when_s = min(_median_s([step[name] for step in ready_s if name in step] or [0.0]), _median_s(backward_s))
        shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
        gradients.append(Gradient(name=name, shape=shape, dtype=dtype, bytes=parameter.nbytes, ready_s=when_s))
    arrival = {name: index for index, name in enumerate(ready_s[-1])}  # decides between equal times
    gradients.sort(key=lambda gradient: (gradient.ready_s, arrival.get(gradient.name, -1)))
    profile = Profile(
        model=subject.name,
        gradients=tuple(gradients),
        forward_s=_median_s(forward_s),
        backward_s=_median_s(backward_s),
        update_s=_median_s(update_s),
        device=subject.device.type,
        where=describe_hardware(subject.device),
        how=f"{what}, {timer}, {update}, torch {torch.__version__}",
        steps=len(steps),
        batch=subject.batch,
        buffers=subject.buffers,
        spread=quartiles(step_s),
    )
    return Measured(profile, step_s)


def run_on_all_ranks(group: dist.ProcessGroup | None, work: Callable[[], bytes]) -> list[bytes]:
    """Run `work` on all ranks and return the result of each rank. Collective. If `work` fails on one rank, all ranks
    raise; otherwise the others would wait for it."""
    if group is None:
        return [work()]
    try:
        answer = b"+" + work()
    except Exception as error:
        gather_bytes(group, f"-{type(error).__name__}: {error}".splitlines()[0].encode())  # inform the other ranks
        raise
    answers = gather_bytes(group, answer)
    for rank, answer in enumerate(answers):
        if not answer.startswith(b"+"):
            raise MismatchError(f"the measurement failed on rank {rank}: {answer[1:].decode()}")
    return [answer[1:] for answer in answers]


def merge(measured: Sequence[Measured]) -> Profile:
    """Merge the profiles of ranks that were measured at the same time: medians over ranks, and the times of each."""
    profiles = [rank.profile for rank in measured]
    if len(profiles) == 1:
        return profiles[0]
    models = [{g.name: f"{list(g.shape)} {g.dtype}" for g in profile.gradients} for profile in profiles]
    for rank, name in ((rank, name) for rank, model in enumerate(models) for name in {**models[0], **model}):
        mine, theirs = models[0].get(name, "missing"), models[rank].get(name, "missing")
        if mine != theirs:
            difference = f"{name} is {mine} on rank 0 and {theirs} on rank {rank}"
            raise MismatchError(f"the ranks have different models: {difference}")
    steps = min(len(rank.step_s) for rank in measured)
    rounds = list(zip(*(rank.step_s[-steps:] for rank in measured), strict=True))
    backward_s = _median_s([profile.backward_s for profile in profiles])
    ready_s = [{gradient.name: gradient.ready_s for gradient in profile.gradients} for profile in profiles]
    gradients = [
        msgspec.structs.replace(entry, ready_s=min(_median_s([ready[entry.name] for ready in ready_s]), backward_s))
        for entry in profiles[0].gradients
    ]
    by_pace = sorted(measured, key=lambda rank: statistics.median(rank.step_s))
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
            RankTimes(rank=rank, forward_s=own.forward_s, backward_s=own.backward_s, update_s=own.update_s)
            for rank, own in enumerate(profiles)
        ),
        spread=by_pace[(len(by_pace) - 1) // 2].profile.spread,
        jitter_s=_median_s([max(times) - statistics.median(times) for times in rounds]),
    )


def merge_over(group: dist.ProcessGroup | None, measure: Callable[[], Measured]) -> Profile:
    """Run `measure` on all ranks and return the merged profile, the same on all ranks. Collective."""
    answers = run_on_all_ranks(group, lambda: msgspec.json.encode(measure()))
    return merge([msgspec.json.decode(answer, type=Measured) for answer in answers])


def describe_hardware(device: torch.device) -> str:
    """Return the name of the processor or GPU. It contains no host name, because profiles are shared."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return f"{name[1] if name else platform.machine()}, {os.cpu_count()} logical cores"


def _median_s(values: Sequence[float]) -> float:
    """Return the median, rounded to nanoseconds. The time between CUDA events of two streams may be negative."""
    return max(0.0, round(statistics.median(values), 9))


def quartiles(step_s: list[float]) -> Spread:
    low_s, _, high_s = statistics.quantiles(step_s, n=4, method="inclusive") if len(step_s) > 1 else step_s * 3
    return Spread(low_s=_median_s([low_s]), high_s=_median_s([high_s]))
