"""Measure the memory and time of a model's forward and backward pass, block by block.

Each block is measured alone, with the inputs that it gets in a real forward, so only one block has to fit in memory.
The rest of the model is measured in a step that recomputes all blocks, which needs the least memory. Weights, buffers,
gradients and the random state are restored afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

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
    blocks: dict[str, _BlockCost] = field(default_factory=lambda: defaultdict(_BlockCost))
    """The cost of each block, by name. Blocks are in the order in which they run."""


def measure_activations(module: nn.Module, steps: Mapping[int, Step]) -> Activations:
    """Measure the activations of a module, block by block.

    `steps` has, by batch size, a function that runs a forward pass with a batch of that size and returns the loss. With
    two sizes, the result separates the fixed costs from those that grow with the batch.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    device = parameters[0].device
    with restored_on_exit(module, device):
        for parameter in module.parameters():
            parameter.grad = None
        measured = {batch: _measure_step(module, step, device) for batch, step in sorted(steps.items())}

    def line(cost_of: Callable[[_StepCost], float]) -> Line:
        return Line.through([(batch, cost_of(step)) for batch, step in measured.items()])

    def block_line(name: str, field: str) -> Line:
        return line(lambda step: float(getattr(step.blocks[name], field)))

    fields = ("held", "input", "forward_peak", "backward_peak", "forward_s", "backward_s")
    order = list(measured[max(measured)].blocks)
    sizes = [p.numel() * p.element_size() for p in module.parameters()]
    return Activations(
        batches=tuple(measured),
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


def _measure_step(module: nn.Module, step: Step, device: torch.device) -> _StepCost:
    known = [*module.parameters(), *module.buffers()]
    blocks, total = find_blocks(module), _StepCost()
    with metered(device, known) as meter, torch.no_grad():
        _forward(module, step, blocks, lambda name, *call: _weigh(meter, total.blocks[name], *call))
    with torch.no_grad():  # again, because a meter slows down the CPU
        _forward(module, step, blocks, lambda name, *call: _time(device, total.blocks[name], *call))
    recomputed = Managed(module, dict.fromkeys(total.blocks, RECOMPUTE))
    with contextlib.closing(recomputed), _freeing(module):
        with metered(device, known) as meter:
            _weigh_rest(module, step, [blocks[name] for name in total.blocks], meter, total)
        step_s = _median_s(lambda: step(module).backward(), device)
    inside_s = sum(2 * cost.forward_s + cost.backward_s for cost in total.blocks.values())
    total.behind_s = max(0.0, step_s - inside_s)
    return total


def _forward(module: nn.Module, step: Step, blocks: Mapping[str, nn.Module], measure: Callable[..., None]) -> None:
    """Run a forward pass, and call `measure` for each block before it runs, with its name and its inputs."""
    busy = False

    def before(name: str, block: nn.Module, inputs: Any, options: Any) -> None:
        nonlocal busy
        if busy:  # `measure` runs the block
            return
        busy = True
        try:
            inputs, options = tree_map(_detached, inputs), tree_map(_detached, options)
            with torch.enable_grad(), _freeing(block):
                measure(name, block, inputs, options)
        finally:
            busy = False

    with contextlib.ExitStack() as hooks:
        for name, block in blocks.items():
            hook = functools.partial(before, name)
            hooks.enter_context(block.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            loss = step(module)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            loss = None  # the step ran backward itself, which `checked_loss` explains
        checked_loss(loss)


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value


def _needing_grad(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _weigh(meter: Meter, cost: _BlockCost, block: nn.Module, inputs: Any, options: Any) -> None:
    """Measure the bytes of a block."""
    meter.restart()
    base = meter.now()
    results = block(*inputs, **options)
    cost.held += meter.now() - base
    cost.forward_peak += meter.peak() - base
    cost.input += sum(leaf.numel() * leaf.element_size() for leaf in _needing_grad((inputs, options)))
    meter.restart()
    _back_through(results)
    cost.backward_peak += meter.peak() - base


def _time(device: torch.device, cost: _BlockCost, block: nn.Module, inputs: Any, options: Any) -> None:
    """Measure the seconds of a block's forward and backward, after a warm-up."""
    for number in range(1 + _REPEATS):
        start = _now_s(device)
        results = block(*inputs, **options)
        middle = _now_s(device)
        _back_through(results)
        end = _now_s(device)
        for leaf in _needing_grad((inputs, options)):
            leaf.grad = None
        if number:
            cost.forward_s += (middle - start) / _REPEATS
            cost.backward_s += (end - middle) / _REPEATS


def _back_through(results: Any) -> None:
    outputs = _needing_grad(results)
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    torch.clear_autocast_cache()  # this backward has freed the graph of the cached casts


def _weigh_rest(module: nn.Module, step: Step, blocks: Sequence[nn.Module], meter: Meter, total: _StepCost) -> None:
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
    total.before = marks.get("entered", base) - base
    total.behind_peak = max(0, marks.get("behind", meter.peak()) - marks.get("left", base))
    total.before_peak = max(0, meter.peak() - base) if blocks else 0


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
