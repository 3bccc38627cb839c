"""Fit a training step into a memory budget: measure the memory and time of a model, block by block, and choose.

Each block is measured alone, with the inputs that it gets in a real forward, so only one block has to fit in memory.
The rest of the model is measured in a step that recomputes all blocks, which needs the least memory. Weights, buffers,
gradients and the random state are restored afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from syncline.errors import UsageError
from syncline.layerwise.activations import Managed, find_blocks
from syncline.layerwise.gradient_pipeline import GradientPipeline
from syncline.layerwise.layer_optimizer import state_bytes
from syncline.measure.preserve_state import restored_on_exit
from syncline.measure.steps import checked_loss
from syncline.memory_meter import Meter, metered
from syncline.predict.memory import Choice, Training, choose, smallest_budget
from syncline.predict.schedule import MIB
from syncline.records.activations import RECOMPUTE, Activations, Block, Line
from syncline.units import format_bytes, parse_bytes

Step = Callable[[nn.Module], Tensor]
"""Runs a forward pass and returns the loss."""
_REPEATS = 3
_COPY_BYTES = 1 << 26


Costs = defaultdict[str, float]
"""Bytes and seconds, by the name of a field of `Block` or `Activations`."""


def budget_of(memory_budget: str | int | None, step: object, activations: object) -> int | None:
    """Return the memory budget in bytes. Raise unless `step` is given with it, and `activations` is not."""
    if memory_budget is None:
        return None
    if step is None:
        raise UsageError("memory_budget needs step=, a function that runs a forward pass and returns the loss")
    if activations is not None:
        raise UsageError("memory_budget chooses what to do with activations: leave out activations")
    return parse_bytes(memory_budget)


def training_of(module: nn.Module, pipeline: GradientPipeline) -> Training:
    """Return the bytes of all tensors of a training that are not activations."""
    sizes = [p.nbytes for p in pipeline.parameters.values()]
    elements = sum(p.numel() for p in pipeline.parameters.values())
    most = sum(sizes) if pipeline.optimizer.at_end else pipeline.backlog_bytes + max(sizes)
    return Training(
        parameter_bytes=sum(p.nbytes for p in module.parameters()),
        buffer_bytes=sum(b.nbytes for b in module.buffers()),
        optimizer_bytes=int(state_bytes(pipeline.optimizer.optimizer) * elements),
        residual_bytes=sum(bucket.state.state_bytes for bucket in pipeline.buckets if bucket.state is not None),
        workspace_bytes=sum(workspace.bytes for workspace in pipeline.workspaces),
        waiting_bytes=min(most, sum(sizes)),
    )


def choose_activations(
    module: nn.Module, step: Step, pipeline: GradientPipeline, budget_bytes: int, residual: str | None
) -> tuple[Choice, dict[str, str]]:
    """Measure the module, and return the fastest way to fit a step into the budget, and that of each block by name."""
    training, measured = training_of(module, pipeline), measure_activations(module, {1: step})
    choice = choose(measured, training, 1, budget_bytes, residual=residual)
    if choice is None:
        least = math.ceil(smallest_budget(measured, training, 1, residual=residual) / MIB) * MIB
        needs = f"memory_budget is {format_bytes(budget_bytes)}, but this batch needs at least {format_bytes(least)}"
        raise UsageError(f"{needs}: raise the budget, or use a smaller batch")
    return choice, {block.name: way for block, way in zip(measured.blocks, choice.ways, strict=True)}


def measure_activations(module: nn.Module, steps: Mapping[int, Step]) -> Activations:
    """Measure the activations of a module, block by block, with steps by batch size.

    With two sizes, the result separates the fixed costs from those that grow with the batch.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    device = parameters[0].device
    with restored_on_exit(module, device):
        for parameter in module.parameters():
            parameter.grad = None
        measured = {batch: _measure_step(module, step, device) for batch, step in sorted(steps.items())}
    rest, blocks = zip(*measured.values(), strict=True)

    def lines(costs: Sequence[Costs]) -> dict[str, Any]:
        """Return the line through the costs at all batch sizes, for each field."""
        batches = list(zip(measured, costs, strict=True))
        return {field: Line.through([(batch, cost[field]) for batch, cost in batches]) for field in costs[-1]}

    sizes = [p.nbytes for p in module.parameters()]
    return Activations(
        batches=tuple(measured),
        blocks=tuple(Block(name=name, **lines([step[name] for step in blocks])) for name in blocks[-1]),
        **lines(rest),
        to_host_bps=_to_host_bps(device),
        parameter_bytes=sum(sizes),
        buffer_bytes=sum(b.nbytes for b in module.buffers()),
        elements=sum(p.numel() for p in parameters),
        largest_bytes=max(sizes),
    )


def _measure_step(module: nn.Module, step: Step, device: torch.device) -> tuple[Costs, dict[str, Costs]]:
    """Return the costs outside the blocks, with all of them recomputed, and those of each block, in running order."""
    blocks, costs, busy = find_blocks(module), defaultdict[str, Costs](lambda: defaultdict(float)), False

    def before(name: str, block: nn.Module, inputs: Any, options: Any) -> None:
        """Measure a block before it runs in a forward pass, with its inputs."""
        nonlocal busy
        if not busy:  # measuring runs the block
            busy = True
            with torch.enable_grad(), _freeing(block):
                _measure(device, costs[name], block, *tree_map(_detached, (inputs, options)))
            busy = False

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, block in blocks.items():
            hooks.enter_context(block.register_forward_pre_hook(functools.partial(before, name), with_kwargs=True))
        try:
            loss = step(module)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            loss = None  # the step ran backward itself, which `checked_loss` explains
        checked_loss(loss)
    with contextlib.closing(Managed(module, dict.fromkeys(costs, RECOMPUTE))), _freeing(module):
        with metered(device, [*module.parameters(), *module.buffers()]) as meter:
            rest = _weigh_rest(module, step, [blocks[name] for name in costs], meter)
        step_s = _median_s(lambda: step(module).backward(), device)
    inside_s = sum(2 * cost["forward_s"] + cost["backward_s"] for cost in costs.values())
    rest["behind_s"] = max(0.0, step_s - inside_s)
    return rest, costs


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value


def _needing_grad(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _measure(device: torch.device, cost: Costs, block: nn.Module, inputs: Any, options: Any) -> None:
    """Measure the bytes of a block, which also warms it up, and then the seconds of its forward and backward."""
    given = [leaf for leaf in tree_leaves((inputs, options)) if isinstance(leaf, Tensor)]
    with metered(device, [*block.parameters(), *block.buffers(), *given]) as meter:
        base = meter.now()
        results = block(*inputs, **options)
        cost["held"] += meter.now() - base
        cost["forward_peak"] += meter.peak() - base
        cost["input"] += sum(leaf.nbytes for leaf in given if leaf.requires_grad)
        meter.restart()
        _back_through(results)
        cost["backward_peak"] += meter.peak() - base
    for _ in range(_REPEATS):
        for leaf in given:
            leaf.grad = None
        start = _now_s(device)
        results = block(*inputs, **options)
        middle = _now_s(device)
        _back_through(results)
        cost["forward_s"] += (middle - start) / _REPEATS
        cost["backward_s"] += (_now_s(device) - middle) / _REPEATS


def _back_through(results: Any) -> None:
    outputs = _needing_grad(results)
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    torch.clear_autocast_cache()  # this backward has freed the graph of the cached casts


def _weigh_rest(module: nn.Module, step: Step, blocks: Sequence[nn.Module], meter: Meter) -> Costs:
    """Measure the bytes outside the blocks, in a step that recomputes all of them."""
    base = meter.now()
    marks: dict[str, int] = {}

    def entered(block: nn.Module, inputs: Any, options: Any) -> None:
        if "entered" not in marks:
            marks["entered"] = meter.now()
            for leaf in _needing_grad((inputs, options)):
                leaf.register_hook(lambda _: meter.restart())  # the rest of the backward is before the blocks

    def came_back(_: Tensor) -> None:
        marks.setdefault("behind", meter.peak())

    def left(block: nn.Module, inputs: Any, result: Any) -> None:
        if "left" not in marks:
            marks["left"] = meter.now()
            meter.restart()
            for leaf in _needing_grad(result):
                leaf.register_hook(came_back)

    with contextlib.ExitStack() as hooks:
        if blocks:
            hooks.enter_context(blocks[0].register_forward_pre_hook(entered, with_kwargs=True))
            hooks.enter_context(blocks[-1].register_forward_hook(left))
        meter.restart()
        step(module).backward()
    before, behind_peak = marks.get("entered", base) - base, marks.get("behind", meter.peak()) - marks.get("left", base)
    before_peak = max(0, meter.peak() - base) if blocks else 0
    return defaultdict(float, before=before, behind_peak=max(0, behind_peak), before_peak=before_peak)


@contextlib.contextmanager
def _freeing(module: nn.Module) -> Iterator[None]:
    """Free gradients as soon as they are accumulated, because they are not part of the activations."""

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    with contextlib.ExitStack() as hooks:
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(free))
        yield


def _median_s(call: Callable[[], None], device: torch.device) -> float:
    """Return the median seconds of a call, after a warm-up."""
    times = []
    for _ in range(1 + _REPEATS):
        start = _now_s(device)
        call()
        times.append(_now_s(device) - start)
    return statistics.median(times[1:])


def _now_s(device: torch.device) -> float:
    """Wait for the device, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _to_host_bps(device: torch.device) -> float:
    """Measure bytes per second of copies from and to pinned host memory. Return 0 if the device is the CPU."""
    if device.type != "cuda":
        return 0.0
    on_device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy_both() -> None:
        on_host.copy_(on_device, non_blocking=True)
        on_device.copy_(on_host, non_blocking=True)

    return 2 * _COPY_BYTES / _median_s(copy_both, device)
