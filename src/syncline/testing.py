"""Checks of the laws that every exchange must keep, to run on your own exchange.

    from syncline.testing import check_laws
    check_laws(MyExchange(density=0.1))

The checks run all ranks in one process, over a `Comm` that is stricter than a network (`syncline.dist.local_comm`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.dist.local_comm import LocalComm, run_ranks
from syncline.errors import MismatchError, UsageError
from syncline.exchange import Comm, Exchange, Hierarchical, Layout, State, Topology, Tree, UsesLevels

Inputs = Sequence[Sequence[Tensor]]
"""Gradients by step, then by rank."""

_STEPS = 4
_COARSE = 1e-3


class LawBrokenError(AssertionError):
    """An exchange breaks a law. The message names the law and the input."""


@dataclass
class Ran:
    """The record of `run_steps` on one rank. Lists have one item per step."""

    results: list[Tensor]
    kept: list[Tensor | None]
    """Residuals."""
    memory: list[dict[str, Tensor]]
    """Contents of a checkpoint."""
    calls: list[tuple[object, ...]]
    """All collectives: level, kind, elements, type and root."""
    sent_bytes: dict[str, int]
    """Bytes counted over all steps, per level; and below, those that `cost` predicts."""
    predicted_bytes: dict[str, int]


def run_steps(
    exchange: Exchange, inputs: Inputs, applied: Mapping[int, Tensor] | None = None, topology: Topology | None = None
) -> list[Ran]:
    """Run some steps of an exchange on all ranks, as training would.

    Args:
        exchange: The exchange.
        inputs: The gradients of each step and rank.
        applied: Overrides the argument of `State.settle`, by step. By default a step is applied if it is finite.
        topology: The levels of the ranks, by default those of `place_ranks`.

    Returns:
        What each rank saw.

    Raises:
        LawBrokenError: Ranks issued different collectives.

    Example:
        >>> ran = run_steps(Dense(), [[torch.ones(3), torch.ones(3)]])
        >>> ran[0].results[0]
        tensor([2., 2., 2.])
    """
    topology = topology or place_ranks(exchange, len(inputs[0]))
    first = inputs[0][0]
    layout = Layout.flat(first.numel(), first.dtype, first.device)

    def main(comm: LocalComm) -> Ran:
        state = exchange.prepare(layout, comm)
        comm.counter.sent_bytes.clear()
        before = len(comm.log)
        ran = Ran([], [], [], [], {}, {})
        for number, gradients in enumerate(inputs):
            flat = gradients[comm.rank].clone()
            finite = _run_step(exchange, flat, state, comm, number)
            state.settle((applied or {}).get(number, finite).to(finite.device))
            ran.results.append(flat)
            ran.kept.append(None if (residual := state.kept()) is None else residual.clone())
            saved = [(name, *item) for name, kinds in state.tensors(layout).items() for item in kinds.items()]
            ran.memory.append({f"{name}/{kind}": tensor.clone() for name, kind, tensor in saved})
        ran.calls = comm.log[before:]
        ran.sent_bytes = dict(comm.counter.sent_bytes)
        cost = exchange.cost(layout.numel, layout.dtype, comm.topology)
        ran.predicted_bytes = {level: sent * len(inputs) for level, sent in cost.sent_bytes.items()}
        return ran

    try:
        return run_ranks(topology, main)
    except MismatchError as error:
        raise LawBrokenError(f"ranks do not issue the same collectives: {error}") from error


def _run_step(exchange: Exchange, flat: Tensor, state: State, comm: Comm, number: int) -> Tensor:
    """Run one step up to `settle`, and return whether its result is finite."""
    state.begin(number)
    last = exchange.run(flat, state, comm)
    if last is not None:
        last.wait()
    return state.finite(flat)


def place_ranks(exchange: Exchange, ranks: int) -> Topology:
    """Return a flat topology or, for an exchange with levels, its own levels or hosts of two ranks each."""
    if not isinstance(exchange, UsesLevels):
        return Topology.flat(ranks)
    tree = exchange.tree(Tree.of_hosts([rank // 2 for rank in range(ranks)]), ranks)
    return dataclasses.replace(Topology.flat(ranks), levels=tree.levels)


def conservation(exchange: Exchange, ranks: int, numel: int, dtype: torch.dtype, device: str) -> None:
    """Check that what was applied plus the residuals equals what came in. The sums must be exact for small integers,
    and within `Exchange.rounding` otherwise. Without a residual, an exchange that rounds to steps of the largest value
    need not be exact for integers.

    An exchange with a `decay` multiplies its residuals by it before each step. With `mean="contributors"`, the law is
    weighted: in each step and for each element, what was applied times count/P plus the residuals equals what came in.
    P is the number of ranks that exchange, and count an integer from 1 to P. Both need not be exact for integers."""
    bound = exchange.rounding(dtype, ranks)
    weights, decay = _weights(exchange, ranks), _decay(exchange)
    exact_integers = exchange.lossless or exchange.keeps or bound.of_largest < _COARSE
    exact_integers = exact_integers and decay == 1 and weights == [1.0]
    for what in ("small integers", "normal", "small", "heavy-tailed"):
        inputs = _inputs(what, ranks, numel, dtype, device)
        ran = run_steps(exchange, inputs)
        error, allowed = torch.zeros(2, numel, dtype=torch.float64, device=device)
        kept = torch.zeros_like(error)
        for number, step in enumerate(inputs):
            came_in = _sum(step) + decay * kept
            kept = _sum(tensor for rank in ran if (tensor := rank.kept[number]) is not None)
            if what != "small integers" or not exact_integers:
                largest = max(tensor.abs().max() for tensor in step).to(torch.float64)
                allowed += bound.of_sum * _sum(tensor.abs() for tensor in step)
                allowed += bound.of_largest * largest + bound.absolute
            applied = ran[0].results[number].to(torch.float64)
            missing = torch.stack([came_in - kept - weight * applied for weight in weights])
            error += missing.gather(0, missing.abs().argmin(0, keepdim=True))[0]
            _require_within(error.abs(), allowed, f"conservation on {what}")


def _weights(exchange: Exchange, ranks: int) -> list[float]:
    """Return the factors that what was applied may have in the law of conservation."""
    topology = place_ranks(exchange, ranks)
    if isinstance(exchange, Hierarchical):
        outermost = [level.ranks for level in topology.levels if level.ranks > 1]
        exchange, ranks = exchange.across, (outermost or [1])[-1]
    if getattr(exchange, "mean", None) != "contributors":
        return [1.0]
    return [count / ranks for count in range(1, ranks + 1)]


def _decay(exchange: Exchange) -> float:
    """Return the factor for residuals before each step."""
    decay = getattr(exchange.across if isinstance(exchange, Hierarchical) else exchange, "decay", None)
    return 1.0 if decay is None else float(decay)


def agreement(exchange: Exchange, ranks: int, numel: int, dtype: torch.dtype, device: str) -> None:
    """Check that all ranks get bit-identical results in every step."""
    ran = run_steps(exchange, _inputs("heavy-tailed", ranks, numel, dtype, device))
    for step, mine in enumerate(ran[0].results):
        for rank, theirs in enumerate(other.results[step] for other in ran):
            same = torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
            _require(same, f"agreement: the result of step {step} differs between rank {rank} and rank 0")


def says_what_it_keeps(exchange: Exchange, ranks: int, numel: int, dtype: torch.dtype, device: str) -> None:
    """Check that an exchange whose `keeps` is False has no residual, and nothing to save."""
    if not exchange.keeps:
        ran = run_steps(exchange, _inputs("normal", ranks, numel, dtype, device))
        kept = [rank for rank in ran if any(rank.memory) or any(tensor is not None for tensor in rank.kept)]
        _require(not kept, "says what it keeps: `keeps` is False, but the exchange has a residual or something to save")


def identity(exchange: Exchange, ranks: int, numel: int, dtype: torch.dtype, device: str) -> None:
    """Check that one rank alone gets its input back, and that a lossless exchange computes the sum."""
    if ranks > 1 and not exchange.lossless:
        return
    inputs = _inputs("normal", ranks, numel, dtype, device)
    for gradients, result in zip(inputs, run_steps(exchange, inputs)[0].results, strict=True):
        error = (_sum(gradients) - result.to(torch.float64)).abs()
        allowed = (ranks - 1) * torch.finfo(dtype).eps * _sum(tensor.abs() for tensor in gradients)
        _require_within(error, allowed, "identity")


def honesty(exchange: Exchange, ranks: int, numel: int, dtype: torch.dtype, device: str) -> None:
    """Check that the bytes counted on the busiest rank equal the bytes predicted, per level."""
    ran = run_steps(exchange, _inputs("normal", ranks, numel, dtype, device))
    for level in {level for rank in ran for level in (*rank.sent_bytes, *rank.predicted_bytes)}:
        counted = max(rank.sent_bytes.get(level, 0) for rank in ran)
        predicted = max(rank.predicted_bytes.get(level, 0) for rank in ran)
        _require(counted == predicted, f"honesty: {counted} bytes counted at level {level}, {predicted} predicted")


def commit_on_success(exchange: Exchange, ranks: int, numel: int, dtype: torch.dtype, device: str) -> None:
    """Check that a step that is not finite, in this bucket or another, changes neither state nor later results."""
    before, after = _inputs("normal", ranks, numel, dtype, device)[:2]
    without = run_steps(exchange, [before, after])
    for culprit in (float("nan"), float("inf"), -float("inf")):
        broken = [tensor.clone() for tensor in after]
        broken[-1][numel // 2] = culprit
        ran = run_steps(exchange, [before, broken, after])
        for rank, ours in enumerate(ran):
            seen = not bool(torch.isfinite(ours.results[1]).all())
            _require(seen, f"commit: the result on rank {rank} is finite, but the last rank's input contains {culprit}")
        _require_same_memory(ran, without, f"a step with {culprit}")
    elsewhere = run_steps(exchange, [before, after, after], applied={1: torch.tensor(False)})
    _require_same_memory(elsewhere, without, "a step in which another bucket was non-finite")


def partial_application(exchange: Exchange, ranks: int, numel: int, dtype: torch.dtype, device: str) -> None:
    """Check that `settle` with one flag per element restores the elements that were not applied, and only those."""
    inputs = _inputs("normal", ranks, numel, dtype, device)[:2]
    applied = torch.arange(numel, device=device) % 3 != 0
    whole, part = run_steps(exchange, inputs), run_steps(exchange, inputs, applied={1: applied})
    for rank, (mine, theirs) in enumerate(zip(part, whole, strict=True)):
        for name, tensor in theirs.memory[1].items():
            expected = torch.where(applied, tensor, mine.memory[0].get(name, torch.zeros_like(tensor)))
            same = torch.equal(mine.memory[1][name], expected)
            _require(same, f"partial application: {name} on rank {rank} is wrong after a step that was applied in part")


def data_independence(exchange: Exchange, ranks: int, numel: int, dtype: torch.dtype, device: str) -> None:
    """Check that the collectives and their shapes do not depend on the data."""
    zeros = [[torch.zeros(numel, dtype=dtype, device=device) for _ in range(ranks)] for _ in range(_STEPS)]
    single = [[zeros[0][0].index_fill(0, torch.tensor(numel - 1, device=device), 1), *step[1:]] for step in zeros]
    drawn = [_inputs(kind, ranks, numel, dtype, device) for kind in ("normal", "heavy-tailed")]
    calls = [[rank.calls for rank in run_steps(exchange, inputs)] for inputs in (zeros, single, *drawn)]
    _require(all(other == calls[0] for other in calls), f"data independence: {calls}")


def no_host_synchronisation(exchange: Exchange, ranks: int, numel: int, dtype: torch.dtype, device: str) -> None:
    """Check that `run` and `settle` never wait for the device, on CUDA."""
    if not device.startswith("cuda"):
        return
    inputs = _inputs("normal", ranks, numel, dtype, device)
    run_steps(exchange, inputs)  # compiles kernels and allocates buffers
    layout = Layout.flat(numel, dtype, device)

    def main(comm: LocalComm) -> None:
        state = exchange.prepare(layout, comm)
        flat = inputs[0][comm.rank].clone()
        comm.all_reduce(torch.zeros(1)).wait()  # the mode applies to the whole process: all ranks must be prepared
        torch.cuda.set_sync_debug_mode("error")
        state.settle(_run_step(exchange, flat, state, comm, 0))

    try:
        run_ranks(place_ranks(exchange, ranks), main)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise LawBrokenError(f"host synchronisation: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")


_LAWS = [conservation, agreement, identity, says_what_it_keeps, honesty, commit_on_success]
_LAWS += [partial_application, data_independence, no_host_synchronisation]
LAWS = {law.__name__: law for law in _LAWS}


def check_laws(
    exchange: Exchange,
    *,
    ranks: Sequence[int] = (1, 2, 3, 7),
    numels: Sequence[int] = (1, 5, 1000),
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    device: str = "cpu",
) -> None:
    """Check all laws of an exchange.

    Args:
        exchange: The exchange.
        ranks: Numbers of ranks to run.
        numels: Sizes of the bucket.
        dtypes: Types of the bucket.
        device: `cpu` or `cuda`.

    Raises:
        LawBrokenError: A law does not hold; the first one that was found.
        UsageError: `exchange` is not an exchange.

    Example:
        >>> check_laws(Dense(wire="bf16"))
    """
    if isinstance(exchange, type) or not isinstance(exchange, Exchange):
        raise UsageError(f"{exchange!r} is not an exchange: pass an instance that has all of Exchange's members")
    for law, size, numel, dtype in itertools.product(LAWS.values(), ranks, numels, dtypes):
        try:
            law(exchange, size, numel, dtype, device)
        except LawBrokenError as error:
            raise LawBrokenError(f"{error} ({size} ranks, {numel} × {dtype})") from None


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise LawBrokenError(what)


def _require_within(error: Tensor, allowed: Tensor, what: str) -> None:
    worst = int((error - allowed).argmax())
    off = f"element {worst} is off by {error[worst].item():.3g}, allowed {allowed[worst].item():.3g}"
    _require(bool((error <= allowed).all()), f"{what}: {off}")


def _require_same_memory(ran: Sequence[Ran], reference: Sequence[Ran], what: str) -> None:
    """Check that the second step changed neither the memory nor the last step's result."""
    for rank, (ours, theirs) in enumerate(zip(ran, reference, strict=True)):
        for name, tensor in ours.memory[0].items():
            _require(torch.equal(tensor, ours.memory[1][name]), f"commit: {what} changed {name} on rank {rank}")
        _require(torch.equal(ours.results[-1], theirs.results[-1]), f"commit: {what} changed the next on rank {rank}")


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return sum((tensor.to(torch.float64) for tensor in tensors), torch.zeros((), dtype=torch.float64))


def _inputs(kind: str, ranks: int, numel: int, dtype: torch.dtype, device: str) -> list[list[Tensor]]:
    """Draw random gradients: small integers, from a normal distribution, small ones, or from a heavy-tailed one."""
    generator = torch.Generator().manual_seed(1000 * ranks + numel)

    def draw() -> Tensor:
        normal = functools.partial(torch.randn, numel, generator=generator)
        scale = normal().clamp(-3, 3).exp() if kind == "heavy-tailed" else 1.0
        drawn = torch.randint(-8, 9, (numel,), generator=generator) if kind == "small integers" else normal()
        return (drawn * scale).to(dtype).to(device) * (2**-10 if kind == "small" else 1)

    return [[draw() for _ in range(ranks)] for _ in range(_STEPS)]


__all__ = ["LAWS", "LawBrokenError", "Ran", "check_laws", "place_ranks", "run_steps"]
