"""Keeps, recomputes or moves away what the forward of a model's blocks leaves for their backward.

Built on torch's own parts: `checkpoint` recomputes, with its random state and autocast as they were, and saved-tensor
hooks move what autograd saves to pinned memory of the host and back, on a stream of their own. When backward comes to a
block, what the block before it needs is fetched already.

A recomputed BatchNorm does not count its batch twice: its running statistics stay as its first forward left them.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from syncline.errors import UsageError
from syncline.records.activations import KEEP, OFFLOAD, PARK, RECOMPUTE, WAYS

_SMALLEST_BYTES = 1 << 16
"""Smaller tensors stay where they are."""


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The rows of layers that a model is made of: what is listed in a Sequential or a ModuleList and has parts itself.
    The outermost, by name, in the order they are defined in."""
    found: dict[str, nn.Module] = {}
    names = {id(part): name for name, part in module.named_modules()}  # one for each, however often it is there

    def look(inside: nn.Module, prefix: str) -> None:
        listed = isinstance(inside, nn.Sequential | nn.ModuleList)
        for name, child in inside.named_children():
            full = f"{prefix}{name}"
            has_parts = any(True for _ in child.children()) and not isinstance(child, nn.Sequential | nn.ModuleList)
            if listed and has_parts and any(True for _ in child.parameters()):
                found.setdefault(names[id(child)], child)
            else:
                look(child, f"{full}.")

    look(module, "")
    return found


class Managed:
    """A module whose blocks do as they are told. `close` makes them ordinary again."""

    def __init__(self, module: nn.Module, ways: Mapping[str, str]) -> None:
        self._blocks = {name: block for name, block in module.named_modules() if name in ways}
        for name, way in ways.items():
            if name not in self._blocks:
                raise UsageError(f"the model has no block called {name}")
            if way not in WAYS:
                raise UsageError(f"{name} cannot be {way!r}: it is one of {', '.join(WAYS)}")
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        movers = [name for name, way in ways.items() if way in (OFFLOAD, PARK)]
        self._mover = _Mover(device, module) if movers else None
        self.ways = dict(ways)
        self._before: list[tuple[nn.Module, Any]] = []
        """Blocks that do something else now, and what they did if it was not their class's."""
        for name, way in ways.items():
            if way != KEEP:
                block = self._blocks[name]
                self._before.append((block, block.__dict__.get("forward")))
                block.forward = _Forward(block, block.forward, way, self._mover)

    def close(self) -> None:
        for block, before in self._before:
            del block.forward
            if before is not None:
                block.forward = before
        self._before = []


class _Forward:
    """In the place of a block's forward. A copy of the block, or one from a file, is an ordinary block again."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], way: str, mover: _Mover | None) -> None:
        self._block, self._forward, self._way, self._mover = block, forward, way, mover

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._forward, types.MethodType) and self._forward.__self__ is self._block:
            return types.MethodType, (self._forward.__func__, self._block)
        return _as_it_is, (self._forward,)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*inputs, **options)
        if self._way == RECOMPUTE:
            return recomputed(self._block, self._lean, *inputs, **options)
        assert self._mover is not None  # noqa: S101 - there is one where something moves
        with self._mover.block():
            if self._way == PARK:
                return recomputed(self._block, self._lean, *inputs, **options)
            return self._lean(*inputs, **options)

    def _lean(self, *inputs: Any, **options: Any) -> Any:
        with _casting_anew(inputs):
            return self._forward(*inputs, **options)


def _as_it_is(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _casting_anew(inputs: Any) -> contextlib.AbstractContextManager[Any]:
    """Autocast would keep what it casts of all weights until forward is over, in case somebody needs it again."""
    kind = next((leaf.device.type for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), "cpu")
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


def recomputed(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    for value in (*inputs, *options.values()):
        if hasattr(value, "get_seq_length"):  # Hugging Face's caches: recomputed, they would hold everything twice
            raise UsageError(
                f"a block gets a {type(value).__name__}, which remembers what it computes, and cannot be recomputed: "
                "build the model with use_cache=False"
            )
    norms = [part for part in block.modules() if isinstance(part, _NormBase) and part.track_running_stats]
    return checkpoint(
        forward,
        *inputs,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), _not_counting(norms)),
        **options,
    )


@contextlib.contextmanager
def _not_counting(norms: Sequence[_NormBase]) -> Iterator[None]:
    """BatchNorm sees a batch that it has seen before: what it counts with is thrown away. In training its results do
    not depend on that."""
    real = [(norm, dict(norm._buffers)) for norm in norms if norm.training]
    for norm, buffers in real:
        norm._buffers.update({name: _scratch(buffer) for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in real:
            norm._buffers.update(buffers)


def _scratch(buffer: Tensor | None) -> Tensor | None:
    if buffer is None:
        return None
    return torch.empty_like(buffer) if buffer.is_floating_point() else torch.zeros_like(buffer)


class _Mover:
    """Between a device and the host. On the CPU there is nowhere to move to: tensors are copied, as a rehearsal."""

    def __init__(self, device: torch.device, module: nn.Module) -> None:
        self._device = device
        self._weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._out = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._back = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._latest: weakref.ref[_Moved] | None = None
        """The block before this one. Only autograd keeps them: they go when its graph does."""
        self._leaving: list[tuple[Tensor, Any]] = []

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """What autograd saves inside is moved."""
        self._let_go()
        mine = _Moved(self, None if self._latest is None else self._latest())
        self._latest = weakref.ref(mine)
        try:
            with saved_tensors_hooks(mine.pack, mine.unpack):
                yield
        finally:
            mine.saved()

    def _let_go(self) -> None:
        """Of what has been copied to the host: its memory is free for what comes after."""
        for _, copied in self._leaving:
            if copied is not None:
                torch.cuda.current_stream(self._device).wait_event(copied)
        self._leaving.clear()

    def moves(self, tensor: Tensor) -> bool:
        return (
            tensor.device == self._device
            and tensor.layout == torch.strided
            and tensor.numel() * tensor.element_size() >= _SMALLEST_BYTES
            and tensor.untyped_storage().data_ptr() not in self._weights
            and tensor.untyped_storage().nbytes() <= 2 * tensor.numel() * tensor.element_size()
        )

    def to_host(self, tensor: Tensor) -> Tensor:
        there = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=self._device.type == "cuda"
        )
        if self._out is None:
            return there.copy_(tensor)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            there.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._leaving.append((tensor, copied))
        return there

    def fetch(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Back on the device, once the event has passed."""
        if self._back is None:
            return [tensor.clone() for tensor in tensors], None
        self._let_go()
        current = torch.cuda.current_stream(self._device)
        with_room = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self._device) for t in tensors]
        self._back.wait_stream(current)
        with torch.cuda.stream(self._back):
            for room, tensor in zip(with_room, tensors, strict=True):
                room.copy_(tensor, non_blocking=True)
                room.record_stream(self._back)  # whoever needs it may be gone before it has arrived
            arrived = torch.cuda.Event()
            arrived.record()
        return with_room, arrived


class _Moved:
    """What the backward of one block needs, in the host's memory."""

    def __init__(self, mover: _Mover, before: _Moved | None) -> None:
        self._mover, self._before = mover, before
        self._there: list[Tensor] = []
        self._places: dict[tuple[Any, ...], int] = {}
        self._sources: list[Tensor] = []
        """What was moved, while its block runs: a place in memory is not given to another tensor meanwhile."""
        self._here: list[Tensor] | None = None
        self._arrived: Any = None
        self._entered = False

    def pack(self, tensor: Tensor) -> Tensor | int:
        if not self._mover.moves(tensor):
            return tensor
        # The same tensor is saved by each operation that needs it, and moved once.
        key = (tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._places:
            self._places[key] = len(self._there)
            self._sources.append(tensor.detach())
            self._there.append(self._mover.to_host(self._sources[-1]))
        return self._places[key]

    def saved(self) -> None:
        """Its block's forward is over."""
        self._places.clear()
        self._sources.clear()

    def unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.fetch()
        if not self._entered:
            self._entered = True
            if self._arrived is not None:
                torch.cuda.current_stream(self._mover._device).wait_event(self._arrived)
            if self._before is not None:
                self._before.fetch()
                self._before = None
        assert self._here is not None  # noqa: S101 - fetched
        return self._here[packed]

    def fetch(self) -> None:
        if self._here is None:
            self._here, self._arrived = self._mover.fetch(self._there)
            self._there = []


def ways_of(module: nn.Module, activations: str | Mapping[str, str] | None) -> dict[str, str]:
    if activations is None or isinstance(activations, Mapping):
        return dict(activations or {})
    if activations not in WAYS:
        raise UsageError(f"activations is {activations!r}: it is one of {', '.join(WAYS)}, or by the names of blocks")
    blocks = find_blocks(module)
    if not blocks and activations != KEEP:
        raise UsageError(
            "the model has no rows of blocks (in a Sequential or a ModuleList) that could be recomputed: name modules, "
            f"as activations={{'layer': {activations!r}}}"
        )
    return dict.fromkeys(blocks, activations)
