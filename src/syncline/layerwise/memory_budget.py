"""Fit a training step into a memory budget."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.layerwise.gradient_pipeline import GradientPipeline
from syncline.layerwise.layer_optimizer import state_bytes
from syncline.layerwise.measure_blocks import measure_activations
from syncline.predict.memory import Choice, Training, choose, smallest_budget
from syncline.predict.schedule import MIB
from syncline.units import format_bytes, parse_bytes


def budget_of(memory_budget: str | int | None, step: object, activations: object) -> int | None:
    """Return the memory budget in bytes. Raise unless `step` is given with it, and `activations` is not."""
    if memory_budget is None:
        return None
    budget_bytes = parse_bytes(memory_budget)
    if step is None:
        raise UsageError(
            "memory_budget needs step=, a function that runs a forward pass of the module and returns the loss, to "
            "measure the memory of a step"
        )
    if activations is not None:
        raise UsageError("memory_budget chooses what to do with activations: leave out activations")
    return budget_bytes


def training_of(module: nn.Module, pipeline: GradientPipeline) -> Training:
    """Return the bytes of all tensors of a training that are not activations."""
    sizes = [p.numel() * p.element_size() for p in pipeline.parameters.values()]
    elements = sum(p.numel() for p in pipeline.parameters.values())
    waiting = sum(sizes)
    if not pipeline.optimizer.at_end:
        waiting = min(waiting, pipeline.backlog_bytes + max(sizes))
    return Training(
        parameter_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
        buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
        optimizer_bytes=int(state_bytes(pipeline.optimizer.optimizer) * elements),
        residual_bytes=sum(bucket.state.rests_bytes for bucket in pipeline.buckets if bucket.state is not None),
        workspace_bytes=sum(workspace.bytes for workspace in pipeline.workspaces),
        waiting_bytes=waiting,
    )


def choose_activations(
    module: nn.Module, step: Callable[[nn.Module], Tensor], training: Training, budget_bytes: int, residual: str | None
) -> tuple[Choice, dict[str, str]]:
    """Measure the module, and choose the fastest way to fit a step into the budget.

    Returns:
        The choice, and what to do with the activations of each block, by its name.

    Raises:
        UsageError: Nothing fits. The message names the smallest budget that would.
    """
    measured = measure_activations(module, {1: step})
    choice = choose(measured, training, 1, budget_bytes, residual=residual)
    if choice is None:
        least = smallest_budget(measured, training, 1, residual=residual)
        raise UsageError(
            f"memory_budget is {format_bytes(budget_bytes)}, but this batch needs at least "
            f"{format_bytes(math.ceil(least / MIB) * MIB)}: raise the budget, or use a smaller batch"
        )
    return choice, {block.name: way for block, way in zip(measured.blocks, choice.ways, strict=True)}
