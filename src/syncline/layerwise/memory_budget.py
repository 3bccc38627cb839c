"""Fit a training step into a memory budget, and check later that it fits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import UsageError, warn
from syncline.layerwise.gradient_pipeline import GradientPipeline
from syncline.layerwise.layer_optimizer import state_bytes
from syncline.layerwise.measure_blocks import measure_activations
from syncline.predict.memory import Choice, Training, choose, smallest_budget
from syncline.predict.schedule import MIB
from syncline.units import format_bytes

_WARM_STEPS = 4
"""Steps after which the optimizer's state and all residuals exist."""


def training_of(module: nn.Module, optimizer: Optimizer, pipeline: GradientPipeline, waiting_bytes: int) -> Training:
    """Return the bytes of all tensors of a training that are not activations."""
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    states = [bucket.state for bucket in pipeline.buckets if bucket.state is not None]
    return Training(
        parameter_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
        buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
        optimizer_bytes=int(state_bytes(optimizer) * trained),
        residual_bytes=sum(state.rests_bytes for state in states),
        workspace_bytes=sum(workspace.bytes for workspace in pipeline.workspaces),
        waiting_bytes=waiting_bytes,
    )


def choose_activations(
    module: nn.Module,
    step: Callable[[nn.Module], Tensor],
    training: Training,
    budget_bytes: int,
    residual: str | None,
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


def check_peak(choice: Choice | None, budget_bytes: int | None, steps: int, device: torch.device) -> None:
    """Measure the peak memory of one step, and warn if it exceeds both the prediction and the budget.

    Called before every step. Only one step is measured, when all persistent tensors exist. Nothing is measured without
    a memory budget, or on the CPU.
    """
    if choice is None or device.type != "cuda" or steps not in (_WARM_STEPS, _WARM_STEPS + 1):
        return
    if steps == _WARM_STEPS:
        torch.cuda.reset_peak_memory_stats(device)
        return
    peak = torch.cuda.max_memory_allocated(device)
    if peak > max(1.1 * choice.peak_bytes, budget_bytes or 0):
        warn(
            f"a step uses {format_bytes(peak)} of device memory, but {format_bytes(choice.peak_bytes)} were predicted: "
            "other tensors are on the device, or the batches are larger than the one that step= ran"
        )
