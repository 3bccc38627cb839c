"""Measure the memory and time of a model's forward and backward pass, block by block.

Each block is measured alone, with the inputs that it gets in a real forward, so only one block has to fit in memory.
The rest of the model is measured in a step that recomputes all blocks, which needs the least memory. Weights, buffers,
gradients and the random state are restored afterwards.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from syncline.errors import UsageError
from syncline.layerwise.activations import Managed, find_blocks
from syncline.measure.preserve_state import restored_on_exit
from syncline.measure.steps import checked_loss
from syncline.memory_meter import Meter, metered
from syncline.records.activations import RECOMPUTE, Activations, Block, Line

Step = Callable[[nn.Module], Tensor]
"""Runs a forward pass and returns the loss."""
_REPEATS = 3
_COPY_BYTES = 1 << 26


@dataclass
class _BlockCost:
    """The cost of one block at one batch size: bytes above the level before it, and seconds."""

    held: int = 0
    input: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass
class _StepCost:
    """The cost of a step at one batch size: its blocks, and the rest with all blocks recomputed."""

    before: int = 0
    behind_peak: int = 0
    before_peak: int = 0
    behind_s: float = 0.0
    blocks: dict[str, _BlockCost] = field(default_factory=dict)


def measure_activations(
    module: nn.Module, steps: Mapping[int, Step], blocks: Sequence[str] | None = None
) -> Activations:
    """Measure the activations of a module, block by block.

    Args:
        module: The module.
        steps: By batch size, a function that runs a forward pass with a batch of that size and returns the loss. With
            two sizes, the result separates the fixed costs from those that grow with the batch.
        blocks: The names of the blocks. By default, `find_blocks` finds them.

    Returns:
        Bytes and seconds of each block and of the rest of the model.

    Raises:
        UsageError: The model has no module of that name, or a step returns no loss.
    """
    default_blocks = find_blocks(module)
    names = list(default_blocks) if blocks is None else list(blocks)
    parts = dict(module.named_modules())
    for name in names:
        if name not in parts:
            known = ", ".join(list(default_blocks)[:4]) or "none"
            raise UsageError(f"the model has no block named {name!r}: its blocks are {known}")
    parameters = [p for p in module.parameters() if p.requires_grad]
    device = parameters[0].device
    measured: dict[int, _StepCost] = {}
    with restored_on_exit(module, device):
        for parameter in module.parameters():
            parameter.grad = None
        for batch, step in sorted(steps.items()):
            measured[batch] = _measure_step(module, step, {name: parts[name] for name in names}, device)
    order = list(measured[max(measured)].blocks)

    def line(cost_of: Callable[[_StepCost], float]) -> Line:
        return Line.through([(batch, cost_of(step)) for batch, step in measured.items()])

    def block_line(name: str, field: str) -> Line:
        return line(lambda step: float(getattr(step.blocks[name], field)))

    fields = ("held", "input", "forward_peak", "backward_peak", "forward_s", "backward_s")
    sizes = [p.numel() * p.element_size() for p in module.parameters()]
    return Activations(
        batches=tuple(sorted(measured)),
        blocks=tuple(Block(name=name, **{field: block_line(name, field) for field in fields}) for name in order),
        before=line(lambda step: step.before),
        behind_peak=line(lambda step: step.behind_peak),
        before_peak=line(lambda step: step.before_peak),
        behind_s=line(lambda step: step.behind_s),
        to_host_bps=_to_host_bps(device),
        parameter_bytes=sum(sizes),
        buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
        elements=sum(p.numel() for p in parameters),
        largest_bytes=max(sizes),
    )


def _forward(module: nn.Module, step: Step) -> None:
    try:
        loss = step(module)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        loss = None  # the step ran backward itself, which `checked_loss` explains
    checked_loss(loss)


def _measure_step(module: nn.Module, step: Step, blocks: Mapping[str, nn.Module], device: torch.device) -> _StepCost:
    known = [*module.parameters(), *module.buffers()]
    costs: dict[str, _BlockCost] = {}
    with metered(device, known) as meter, _alone(blocks, meter, device, costs), torch.no_grad():
        _forward(module, step)
    with _alone(blocks, None, device, costs), torch.no_grad():
        step(module)
    used = {name: block for name, block in blocks.items() if name in costs}
    total = _StepCost(blocks=costs)
    with metered(device, known) as meter:
        _lean_step(module, step, used, meter, total)
    inside_s = sum(2 * cost.forward_s + cost.backward_s for cost in costs.values())
    managed = Managed(module, dict.fromkeys(used, RECOMPUTE))
    try:
        with _freeing([p for p in module.parameters() if p.requires_grad]):
            took_s = _seconds(lambda: step(module).backward(), device)
    finally:
        managed.close()
    total.behind_s = max(0.0, took_s - inside_s)
    return total


@contextlib.contextmanager
def _alone(
    blocks: Mapping[str, nn.Module], meter: Meter | None, device: torch.device, costs: dict[str, _BlockCost]
) -> Iterator[None]:
    """Measure each block alone before it runs in a forward pass: its bytes if there is a meter, else its seconds."""
    busy: list[str] = []

    def before(name: str) -> Callable[..., None]:
        def hook(block: nn.Module, inputs: Any, options: Any) -> None:
            if busy:
                return
            busy.append(name)
            try:
                _measure_block(block, inputs, options, meter, device, costs.setdefault(name, _BlockCost()))
            finally:
                busy.clear()

        return hook

    hooks = [block.register_forward_pre_hook(before(name), with_kwargs=True) for name, block in blocks.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _measure_block(
    block: nn.Module, inputs: Any, options: Any, meter: Meter | None, device: torch.device, cost: _BlockCost
) -> None:
    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().requires_grad_(value.is_floating_point())

    inputs, options = tree_map(fresh, inputs), tree_map(fresh, options)
    needing_grad = [leaf for leaf in tree_leaves((inputs, options)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    parameters = [p for p in block.parameters() if p.requires_grad]
    with torch.enable_grad(), _freeing(parameters):
        if meter is None:
            for number in range(1 + _REPEATS):
                forward_s, backward_s = _timed(block, inputs, options, needing_grad, device)
                if number:  # the first run is a warm-up
                    cost.forward_s += forward_s / _REPEATS
                    cost.backward_s += backward_s / _REPEATS
            return
        meter.restart()
        base = meter.now()
        results = block(*inputs, **options)
        cost.held += meter.now() - base
        cost.forward_peak += meter.peak() - base
        cost.input += sum(leaf.numel() * leaf.element_size() for leaf in needing_grad)
        meter.restart()
        _back_through(results)
        cost.backward_peak += meter.peak() - base
        for leaf in needing_grad:
            leaf.grad = None


def _timed(
    block: nn.Module, inputs: Any, options: Any, needing_grad: Sequence[Tensor], device: torch.device
) -> tuple[float, float]:
    """Return the seconds of a block's forward and backward."""
    _wait(device)
    start = time.perf_counter()
    results = block(*inputs, **options)
    _wait(device)
    middle = time.perf_counter()
    _back_through(results)
    _wait(device)
    end = time.perf_counter()
    for leaf in needing_grad:
        leaf.grad = None
    return middle - start, end - middle


def _back_through(results: Any) -> None:
    outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    torch.clear_autocast_cache()  # this backward has freed the graph of the cached casts


def _lean_step(module: nn.Module, step: Step, blocks: Mapping[str, nn.Module], meter: Meter, total: _StepCost) -> None:
    """Measure the memory outside the blocks, in a step that recomputes all of them."""
    base = meter.now()
    marks: dict[str, int] = {}
    names = list(total.blocks)

    def entered(block: nn.Module, inputs: Any, options: Any) -> None:
        if "entered" in marks:
            return
        marks["entered"] = meter.now()
        for leaf in tree_leaves((inputs, options)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: meter.restart())  # the rest of the backward is before the blocks

    def came_back(_: Tensor) -> None:
        marks.setdefault("behind", meter.peak())

    def left(block: nn.Module, inputs: Any, result: Any) -> None:
        if "left" in marks:
            return
        marks["left"] = meter.now()
        meter.restart()
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(came_back)

    hooks = []
    if names:
        hooks.append(blocks[names[0]].register_forward_pre_hook(entered, with_kwargs=True))
        hooks.append(blocks[names[-1]].register_forward_hook(left))
    managed = Managed(module, dict.fromkeys(blocks, RECOMPUTE))
    try:
        with _freeing([p for p in module.parameters() if p.requires_grad]):
            meter.restart()
            step(module).backward()
    finally:
        managed.close()
        for hook in hooks:
            hook.remove()
    total.before = marks.get("entered", base) - base
    total.behind_peak = max(0, marks.get("behind", meter.peak()) - marks.get("left", base))
    total.before_peak = max(0, meter.peak() - base) if names else 0


@contextlib.contextmanager
def _freeing(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Free gradients as soon as they are accumulated, because they are not part of the activations."""

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(free) for parameter in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    """Return the median seconds of a call, after a warm-up."""
    times = []
    for number in range(1 + _REPEATS):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        if number:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _to_host_bps(device: torch.device) -> float:
    """Measure bytes per second of copies from and to pinned host memory. Return 0 if the device is the CPU."""
    if device.type != "cuda":
        return 0.0
    on_device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy_both() -> None:
        on_host.copy_(on_device, non_blocking=True)
        on_device.copy_(on_host, non_blocking=True)

    return 2 * _COPY_BYTES / _seconds(copy_both, device)
