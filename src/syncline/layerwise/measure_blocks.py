"""Measures what a model's forward and backward take of memory and time, block by block.

Each block is measured by itself, with the inputs that it gets in a real forward, so that nothing needs to fit but one
block. What is not in blocks is measured in a whole step in which all blocks are recomputed: the leanest there is.
Weights, buffers, gradients and the random state are left as they were.
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
from syncline.measure.preserve_state import as_it_was
from syncline.measure.steps import checked_loss
from syncline.memory_meter import Meter, metered
from syncline.records.activations import RECOMPUTE, Activations, Block, Line

Step = Callable[[nn.Module], Tensor]
"""Runs a forward and returns the loss."""
_TIMED = 3
_COPY_BYTES = 1 << 26


@dataclass
class _One:
    """A block, measured at one batch."""

    held: int = 0
    input: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass
class _Whole:
    """A lean step, measured at one batch."""

    before: int = 0
    behind_peak: int = 0
    before_peak: int = 0
    behind_s: float = 0.0
    blocks: dict[str, _One] = field(default_factory=dict)


def measure_activations(
    module: nn.Module, steps: Mapping[int, Step], blocks: Sequence[str] | None = None
) -> Activations:
    """`steps`: by batch, how to run a forward of that many samples; two of them tell what grows with the batch.
    `blocks`: their names, if not those that `find_blocks` finds."""
    found = find_blocks(module)
    names = list(found) if blocks is None else list(blocks)
    parts = dict(module.named_modules())
    for name in names:
        if name not in parts:
            raise UsageError(f"the model has no block called {name}: it has {', '.join(list(found)[:4]) or 'none'}")
    parameters = [p for p in module.parameters() if p.requires_grad]
    device = parameters[0].device
    measured: dict[int, _Whole] = {}
    with as_it_was(module, device):
        for parameter in module.parameters():
            parameter.grad = None
        for batch, step in sorted(steps.items()):
            measured[batch] = _measured(module, step, {name: parts[name] for name in names}, device)
    order = list(measured[max(measured)].blocks)

    def line(of: Callable[[_Whole], float]) -> Line:
        return Line.through([(batch, of(whole)) for batch, whole in measured.items()])

    def block_line(name: str, what: str) -> Line:
        return line(lambda whole: float(getattr(whole.blocks[name], what)))

    fields = ("held", "input", "forward_peak", "backward_peak", "forward_s", "backward_s")
    sizes = [p.numel() * p.element_size() for p in module.parameters()]
    return Activations(
        batches=tuple(sorted(measured)),
        blocks=tuple(Block(name=name, **{what: block_line(name, what) for what in fields}) for name in order),
        before=line(lambda whole: whole.before),
        behind_peak=line(lambda whole: whole.behind_peak),
        before_peak=line(lambda whole: whole.before_peak),
        behind_s=line(lambda whole: whole.behind_s),
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
        loss = None  # it ran backward
    checked_loss(loss)


def _measured(module: nn.Module, step: Step, blocks: Mapping[str, nn.Module], device: torch.device) -> _Whole:
    known = [*module.parameters(), *module.buffers()]
    ones: dict[str, _One] = {}
    with metered(device, known) as meter, _alone(blocks, meter, device, ones), torch.no_grad():
        _forward(module, step)
    with _alone(blocks, None, device, ones), torch.no_grad():
        step(module)
    used = {name: block for name, block in blocks.items() if name in ones}
    whole = _Whole(blocks=ones)
    with metered(device, known) as meter:
        _lean_step(module, step, used, meter, whole)
    inside_s = sum(2 * one.forward_s + one.backward_s for one in ones.values())
    managed = Managed(module, dict.fromkeys(used, RECOMPUTE))
    try:
        with _freeing([p for p in module.parameters() if p.requires_grad]):
            took_s = _seconds(lambda: step(module).backward(), device)
    finally:
        managed.close()
    whole.behind_s = max(0.0, took_s - inside_s)
    return whole


@contextlib.contextmanager
def _alone(
    blocks: Mapping[str, nn.Module], meter: Meter | None, device: torch.device, ones: dict[str, _One]
) -> Iterator[None]:
    """In forwards inside, each block is first run by itself: for its bytes with a meter, for its seconds without."""
    busy: list[str] = []

    def before(name: str) -> Callable[..., None]:
        def hook(block: nn.Module, inputs: Any, options: Any) -> None:
            if busy:
                return
            busy.append(name)
            try:
                _measure_one(block, inputs, options, meter, device, ones.setdefault(name, _One()))
            finally:
                busy.clear()

        return hook

    hooks = [block.register_forward_pre_hook(before(name), with_kwargs=True) for name, block in blocks.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _measure_one(
    block: nn.Module, inputs: Any, options: Any, meter: Meter | None, device: torch.device, one: _One
) -> None:
    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().requires_grad_(value.is_floating_point())

    inputs, options = tree_map(fresh, inputs), tree_map(fresh, options)
    taken = [leaf for leaf in tree_leaves((inputs, options)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    parameters = [p for p in block.parameters() if p.requires_grad]
    with torch.enable_grad(), _freeing(parameters):
        if meter is None:
            for number in range(1 + _TIMED):
                forward_s, backward_s = _timed(block, inputs, options, taken, device)
                if number:  # the first warms up
                    one.forward_s += forward_s / _TIMED
                    one.backward_s += backward_s / _TIMED
            return
        meter.restart()
        base = meter.now()
        results = block(*inputs, **options)
        one.held += meter.now() - base
        one.forward_peak += meter.peak() - base
        one.input += sum(leaf.numel() * leaf.element_size() for leaf in taken)
        meter.restart()
        _back_through(results)
        one.backward_peak += meter.peak() - base
        for leaf in taken:
            leaf.grad = None


def _timed(
    block: nn.Module, inputs: Any, options: Any, taken: Sequence[Tensor], device: torch.device
) -> tuple[float, float]:
    _wait(device)
    start = time.perf_counter()
    results = block(*inputs, **options)
    _wait(device)
    middle = time.perf_counter()
    _back_through(results)
    _wait(device)
    end = time.perf_counter()
    for leaf in taken:
        leaf.grad = None
    return middle - start, end - middle


def _back_through(results: Any) -> None:
    outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    torch.clear_autocast_cache()  # casts of weights, whose graph this backward has used up


def _lean_step(module: nn.Module, step: Step, blocks: Mapping[str, nn.Module], meter: Meter, whole: _Whole) -> None:
    """Marks where memory stands when the blocks are entered and left, forward and backward."""
    base = meter.now()
    marks: dict[str, int] = {}
    names = list(whole.blocks)

    def entered(block: nn.Module, inputs: Any, options: Any) -> None:
        if "entered" in marks:
            return
        marks["entered"] = meter.now()
        for leaf in tree_leaves((inputs, options)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: meter.restart())  # from here on, what comes before the blocks

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
    whole.before = marks.get("entered", base) - base
    whole.behind_peak = max(0, marks.get("behind", meter.peak()) - marks.get("left", base))
    whole.before_peak = max(0, meter.peak() - base) if names else 0


@contextlib.contextmanager
def _freeing(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients go as they come: what holds them, and for how long, is not the model's."""

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(free) for parameter in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    took = []
    for number in range(1 + _TIMED):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        if number:
            took.append(time.perf_counter() - start)
    return statistics.median(took)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _to_host_bps(device: torch.device) -> float:
    """Both ways at once, as a step that moves something does; 0 where there is no host to move to."""
    if device.type != "cuda":
        return 0.0
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    seconds = _seconds(lambda: _there_and_back(here, there), device)
    return 2 * _COPY_BYTES / seconds


def _there_and_back(here: Tensor, there: Tensor) -> None:
    there.copy_(here, non_blocking=True)
    here.copy_(there, non_blocking=True)
