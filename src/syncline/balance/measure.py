"""Measure how long steps of different batch sizes take on each rank, and divide a batch among the ranks.

All ranks measure at the same time and for the same time, so that ranks on one host disturb each other as in training.
The model runs without communication. Each round measures the batches that the rounds before it suggest.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.balance.division import RankCost, divide, equal_batches, fitted
from syncline.balance.shares import Count, Shares
from syncline.dist.comm import gather_bytes
from syncline.errors import UsageError
from syncline.health.meeting import meeting, same_on_all_ranks
from syncline.measure.preserve_state import Weights, restored_on_exit
from syncline.measure.steps import run_on_all_ranks
from syncline.memory_meter import metered
from syncline.runtime.validation import check_positive, group_or_default, named_parameters, only_device
from syncline.units import format_bytes, parse_bytes

StepOfBatch = Callable[[nn.Module, int], object]

_MOST_TOTAL = 1 << 30
_FIRST = (0.25, 0.5, 1.0)  # batches that are measured first, as shares of an equal one
_ROUNDS = 3  # rounds that measure suggested batches, beside equal ones
_LEAST_STEPS, _ENOUGH_STEPS = 3, 12  # steps of each batch that are timed; the latter on the slowest rank
_WORTH = 0.02  # batches stay equal if others save a smaller share of a step


def shares(
    model: nn.Module,
    step_of_batch: StepOfBatch,
    total: int = 256,
    *,
    memory_budget: str | int | None = None,
    budget_s: float = 20.0,
    count: Count | None = None,
    quiet: bool = False,
) -> Shares:
    """Measure how fast each rank is, and divide a batch so that all ranks finish their part at the same time.

    All ranks call this at the same time. Weights, buffers, gradients and random number generators keep their values.
    Pass the result to `attach`, which weights gradients by samples, and deal the dataset with its `sampler`.

    Args:
        model: The model, in DistributedDataParallel or not.
        step_of_batch: Runs one forward and backward on the module it gets, with a batch of as many samples as its
            second argument says. The loss must be the mean over the samples, as in training.
        total: Number of samples of all ranks in a step.
        memory_budget: The memory of this rank for weights, gradients and activations, such as `"8GiB"`. Subtract what
            the optimizer needs. It may differ between ranks. Default: no limit.
        budget_s: Time that measuring may take, in seconds. Three steps of each batch size are run in any case.
        count: Function that gets the arguments of the model's forward and returns their number of samples, for
            `attach`. Default: the first dimension of the first tensor.
        quiet: Print nothing. By default rank 0 prints the result.

    Returns:
        The batch of each rank, the same on all ranks. They are equal if others would save less than 2 % of a step.

    Raises:
        UsageError: An argument is invalid, `step_of_batch` changed a weight, or the memory does not suffice.
        MismatchError: The ranks passed different arguments, or one of them failed.

    Example:
        >>> def step(model, samples):  # doctest: +SKIP
        ...     loss_fn(model(inputs[:samples]), labels[:samples]).backward()
        >>> shares = syncline.shares(model, step, total=256)  # doctest: +SKIP
        >>> loader = DataLoader(data, batch_sampler=shares.sampler(data))  # doctest: +SKIP
        >>> handle = syncline.attach(model, shares=shares)  # doctest: +SKIP
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, nn.Module):
        raise UsageError(f"model is a {type(inner).__name__}: pass an nn.Module")
    group = group_or_default(inner.process_group if isinstance(inner, DDP) else None)
    module: nn.Module = inner.module if isinstance(inner, DDP) else model
    parameters = named_parameters(module, ())
    device = only_device(parameters)
    with same_on_all_ranks(group, device, "the arguments of shares", "shares") as fields:
        _check(inner, step_of_batch, total, group.size())
        check_positive(budget_s=budget_s)
        budget = None if memory_budget is None else parse_bytes(memory_budget)
        fields |= {"total": total, "budget_s": budget_s}
    with meeting(group, "shares", users=True), restored_on_exit(module, device):
        measuring = _Measuring(group, module, device, step_of_batch, Weights(parameters))
        batches, equal_s, step_s = measuring.divided(total, float(budget_s), budget)
    chosen = Shares(batches, group.rank(), equal_s, step_s, count)
    if not quiet and group.rank() == 0:
        print(f"syncline: {chosen.describe()}", file=sys.stderr)
    return chosen


def _check(model: nn.Module, step_of_batch: object, total: Any, ranks: int) -> None:
    if not callable(step_of_batch):
        text = "pass a function of the model and a number of samples, which runs forward and backward"
        raise UsageError(f"shares(model, step_of_batch): step_of_batch is {step_of_batch!r}: {text}")
    if not isinstance(total, int) or isinstance(total, bool) or not 1 <= total < _MOST_TOTAL:
        raise UsageError(f"total is {total!r}: it must be the number of samples of all ranks in a step")
    if total < ranks:
        raise UsageError(f"total is {total}, but each of the {ranks} ranks needs at least one sample")
    if isinstance(model, DDP) and model.static_graph:
        text = "a step outside of DDP would count as the first one of its static graph"
        raise UsageError(f"{text}: call shares with the module, before DDP is built")


class _Measuring:
    """Runs steps of one model on all ranks at the same time."""

    def __init__(
        self, group: dist.ProcessGroup, module: nn.Module, device: torch.device, step: StepOfBatch, weights: Weights
    ) -> None:
        self._group, self._module, self._device, self._step = group, module, device, step
        self._weights = weights
        self._times: list[list[tuple[int, float]]] = [[] for _ in range(group.size())]
        """Samples and seconds of what was measured on each rank, in the order of time."""

    def divided(
        self, total: int, budget_s: float, memory_budget: int | None
    ) -> tuple[tuple[int, ...], float | None, float | None]:
        """Collective: return the best batches, and the seconds of the slowest rank with equal ones and with these."""
        ranks = self._group.size()
        equal = equal_batches(total, ranks)
        if ranks == 1 and memory_budget is None:
            return equal, None, None
        memory = None if memory_budget is None else _Memory(memory_budget)
        most = self._most_samples(memory, [max(1, equal[0] // 4), max(2, equal[0] // 2)])
        window_s = budget_s / (1 + len(_FIRST) + 2 * _ROUNDS)
        for part in (_FIRST[0], *_FIRST):  # the very first steps are slower
            wanted = [max(1, round(part * batch)) for batch in equal]
            self._measure(
                [w if limit is None else min(w, limit) for w, limit in zip(wanted, most, strict=True)], window_s
            )
        for times in self._times:
            del times[0]
        measured: dict[tuple[int, ...], list[float]] = {}
        for _ in range(_ROUNDS):
            suggested, most = self._within_memory(total, most, memory)
            for batches in dict.fromkeys([equal, suggested] if _fit(equal, most) else [suggested]):
                measured.setdefault(batches, []).append(self._measure(batches, window_s))
            if suggested == equal:
                break
        step_s = {batches: statistics.median(times) for batches, times in measured.items()}
        best = min(step_s, key=lambda batches: step_s[batches])
        if equal not in measured or not _fit(equal, most):
            expected_s = [cost.seconds(batch) for cost, batch in zip(self._costs(most), equal, strict=True)]
            return best, max(expected_s), step_s[best]
        equal_s = step_s[equal]
        if step_s[best] > (1 - _WORTH) * equal_s:
            best = equal
        return best, equal_s, step_s[best]

    def _within_memory(
        self, total: int, most: Sequence[int | None], memory: _Memory | None
    ) -> tuple[tuple[int, ...], list[int | None]]:
        """Collective: return the batches that the times so far suggest, and the most samples of each rank. If memory is
        limited, a step with this rank's batch is run first, to see whether it really fits."""
        while True:
            suggested = self._suggested(total, most)
            if all(limit is None for limit in most):
                return suggested, list(most)
            before, most = most, self._most_samples(memory, [suggested[self._group.rank()]])
            if _fit(suggested, most):
                return suggested, list(most)
            most = [
                min((limit for limit in limits if limit is not None), default=None)
                for limits in zip(before, most, strict=True)
            ]

    def _suggested(self, total: int, most: Sequence[int | None]) -> tuple[int, ...]:
        """Collective: return the batches that the times so far suggest. The first rank decides, because processors
        may round differently."""
        batches = divide(total, self._costs(most))
        first = gather_bytes(self._group, ",".join(map(str, batches)).encode())[0]
        return tuple(map(int, first.split(b",")))

    def _costs(self, most: Sequence[int | None]) -> list[RankCost]:
        return [RankCost(*fitted(times), limit) for times, limit in zip(self._times, most, strict=True)]

    def _measure(self, batches: Sequence[int], window_s: float) -> float:
        """Collective: time steps with these batches on all ranks at once, and return the slowest rank's seconds."""
        own = batches[self._group.rank()]
        if known := [(times[-1], batch) for times, batch in zip(self._times, batches, strict=True) if times]:
            longest_s = max(seconds * max(1.0, batch / n) for (n, seconds), batch in known)
            window_s = min(window_s, _ENOUGH_STEPS * longest_s)

        def work() -> bytes:
            end_s, seconds = time.monotonic() + window_s, list[float]()
            while len(seconds) < _LEAST_STEPS or time.monotonic() < end_s:
                seconds.append(self._timed(own))
            return repr(statistics.median(seconds)).encode()

        seconds = [float(answer) for answer in run_on_all_ranks(self._group, work)]
        for times, batch, step_s in zip(self._times, batches, seconds, strict=True):
            times.append((batch, max(step_s, 1e-9)))
        return max(seconds)

    def _timed(self, samples: int) -> float:
        for parameter in self._module.parameters():
            parameter.grad = None
        began_s = time.monotonic()
        self._step(self._module, samples)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic() - began_s

    def _most_samples(self, memory: _Memory | None, sizes: Sequence[int]) -> list[int | None]:
        """Collective: measure the memory of steps with these batches on this rank, and return how many samples each
        rank has memory for. The first step also shows whether it changes a weight."""

        def work() -> bytes:
            for samples in sizes:
                peak = self._peak_bytes(samples)
                if memory is not None:
                    memory.note(samples, peak)
            if (changed := self._weights.changed()) is not None:
                self._weights.restore()
                text = "it must run forward and backward only, without optimizer.step()"
                raise UsageError(f"step_of_batch changed {changed}: {text}. The weights have been restored")
            return b"" if memory is None else str(memory.most_samples).encode()

        return [int(answer) if answer else None for answer in run_on_all_ranks(self._group, work)]

    def _peak_bytes(self, samples: int) -> int:
        """Return the memory of weights, buffers, gradients and activations in a step."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        for parameter in self._module.parameters():
            parameter.grad = None
        with metered(self._device, tensors) as meter:
            others = meter.now() - sum(tensor.nbytes for tensor in tensors)
            self._timed(samples)
            return meter.peak() - others


def _fit(batches: Sequence[int], most: Sequence[int | None]) -> bool:
    """Return whether each rank has memory for its batch."""
    return all(limit is None or batch <= limit for batch, limit in zip(batches, most, strict=True))


class _Memory:
    """The memory of steps with different batches, and how many samples a budget permits."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._peaks: dict[int, int] = {}  # bytes by number of samples

    def note(self, samples: int, peak: int) -> None:
        self._peaks[samples] = peak

    @property
    def most_samples(self) -> int:
        """The most samples that fit, by a line through the two largest batches that were measured.

        Raises:
            UsageError: Not even one sample fits.
        """
        (few, low), (many, high) = sorted(self._peaks.items())[-2:]
        per_sample = max(1.0, (high - low) / (many - few))
        most = int(many + (self._budget - high) // per_sample)
        most = min([most, *(n - 1 for n, peak in self._peaks.items() if peak > self._budget)])
        if most < 1:
            needs = f"a step with {few} samples needs {format_bytes(low)}"
            raise UsageError(f"memory_budget is {format_bytes(self._budget)}, but {needs}: raise the budget")
        return most
