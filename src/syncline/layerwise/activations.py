"""Keep, recompute or offload the activations of a model's blocks.

`torch.utils.checkpoint` recomputes, with the same random state and autocast. Saved-tensor hooks copy the tensors that
autograd saves to pinned host memory and back, on separate streams. While one block runs backward, the tensors of the
block before it are already being fetched.

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
from syncline.records.activations import KEEP, OFFLOAD, PARK, WAYS

_SMALLEST_BYTES = 1 << 16
"""Smaller tensors stay on the device."""


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in the order of their definition.

    A block is an outermost module that is listed in a Sequential or a ModuleList, and has submodules and parameters.
    """
    blocks: dict[str, nn.Module] = {}
    names = {id(part): name for name, part in module.named_modules()}  # one name for a module that is used repeatedly

    def search(parent: nn.Module) -> None:
        listed = isinstance(parent, nn.Sequential | nn.ModuleList)
        for child in parent.children():
            has_parts = any(True for _ in child.children()) and not isinstance(child, nn.Sequential | nn.ModuleList)
            if listed and has_parts and any(True for _ in child.parameters()):
                blocks.setdefault(names[id(child)], child)
            else:
                search(child)

    search(module)
    return blocks


class Managed:
    """Replaces the forward of a module's blocks by one that keeps, recomputes or offloads their activations.

    `activations` is one of `WAYS` for all blocks, or a mapping from block names to these.
    """

    def __init__(self, module: nn.Module, activations: str | Mapping[str, str] | None) -> None:
        if activations is not None and not isinstance(activations, Mapping):
            if activations not in WAYS:
                raise UsageError(
                    f"activations is {activations!r}: pass one of {', '.join(WAYS)}, or a mapping from block names"
                )
            blocks = find_blocks(module)
            if not blocks and activations != KEEP:
                raise UsageError(
                    "no blocks were found: the model has no Sequential or ModuleList of modules with submodules. Name "
                    f"the modules instead, like activations={{'layer': {activations!r}}}"
                )
            activations = dict.fromkeys(blocks, activations)
        self.ways = ways = dict(activations or {})
        blocks = dict(module.named_modules())
        for name, way in ways.items():
            if name not in blocks:
                raise UsageError(f"activations: the model has no module named {name!r}")
            if way not in WAYS:
                raise UsageError(f"activations: {name} is {way!r}: pass one of {', '.join(WAYS)}")
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        mover = _Mover(device, module) if {OFFLOAD, PARK} & set(ways.values()) else None
        self._before: list[tuple[nn.Module, Any]] = []
        """The changed blocks, each with its own `forward` attribute, if it had one."""
        for name, way in ways.items():
            if way != KEEP:
                block = blocks[name]
                self._before.append((block, block.__dict__.get("forward")))
                block.forward = _Forward(block, block.forward, way, mover if way in (OFFLOAD, PARK) else None)

    def close(self) -> None:
        """Restore the original forward of each block."""
        for block, before in self._before:
            del block.forward
            if before is not None:
                block.forward = before
        self._before = []


class _Forward:
    """Replaces a block's forward. A copied or unpickled block has its original forward again."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], way: str, mover: _Mover | None) -> None:
        self._block, self._forward, self._way, self._mover = block, forward, way, mover

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._forward, types.MethodType) and self._forward.__self__ is self._block:
            return types.MethodType, (self._forward.__func__, self._block)
        return _identity, (self._forward,)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*inputs, **options)
        with contextlib.nullcontext() if self._mover is None else self._mover.block():
            run = self._run if self._way == OFFLOAD else self._recompute
            return run(*inputs, **options)

    def _run(self, *inputs: Any, **options: Any) -> Any:
        """Run forward without autocast's cache, which would keep a cast copy of all weights until it ends."""
        kind = next((leaf.device.type for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), "cpu")
        if not torch.is_autocast_enabled(kind):
            return self._forward(*inputs, **options)
        with torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False):
            return self._forward(*inputs, **options)

    def _recompute(self, *inputs: Any, **options: Any) -> Any:
        """Run forward without saving its activations: the backward pass runs it again."""
        for value in (*inputs, *options.values()):
            if hasattr(value, "get_seq_length"):  # a Hugging Face cache would store everything twice
                raise UsageError(
                    f"a block with a {type(value).__name__} cannot be recomputed, because the cache stores its "
                    "results: build the model with use_cache=False"
                )
        norms = [part for part in self._block.modules() if isinstance(part, _NormBase) and part.track_running_stats]
        contexts = (contextlib.nullcontext(), _keep_statistics(norms))
        return checkpoint(self._run, *inputs, use_reentrant=False, context_fn=lambda: contexts, **options)


def _identity(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


@contextlib.contextmanager
def _keep_statistics(norms: Sequence[_NormBase]) -> Iterator[None]:
    """Replace running statistics by scratch buffers, because the first forward has counted this batch already.

    In training mode, the result of BatchNorm does not depend on its running statistics.
    """
    original = [(norm, dict(norm._buffers)) for norm in norms if norm.training]
    for norm, buffers in original:
        scratch = {name: None if buffer is None else torch.zeros_like(buffer) for name, buffer in buffers.items()}
        norm._buffers.update(scratch)
    try:
        yield
    finally:
        for norm, buffers in original:
            norm._buffers.update(buffers)


class _Mover:
    """Copies tensors between a device and host memory. On the CPU they are copied too, so that tests need no GPU."""

    def __init__(self, device: torch.device, module: nn.Module) -> None:
        self.device = device
        self._weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._out = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._back = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._latest: weakref.ref[_Moved] | None = None
        """The previous block. A weak reference, so that it is freed together with autograd's graph."""
        self._leaving: list[tuple[Tensor, Any]] = []
        """Tensors that are being copied to the host, with the event that ends the copy."""

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Move the tensors that autograd saves inside this context to the host."""
        self._release()
        moved = _Moved(self, None if self._latest is None else self._latest())
        self._latest = weakref.ref(moved)
        try:
            with saved_tensors_hooks(moved.pack, moved.unpack):
                yield
        finally:
            moved.packed.clear()

    def _release(self) -> None:
        """Free the device memory of tensors that were copied. The current stream waits for the copies first."""
        for _, copied in self._leaving:
            torch.cuda.current_stream(self.device).wait_event(copied)
        self._leaving.clear()

    def moves(self, tensor: Tensor) -> bool:
        return (
            tensor.device == self.device
            and tensor.layout == torch.strided
            and tensor.numel() * tensor.element_size() >= _SMALLEST_BYTES
            and tensor.untyped_storage().data_ptr() not in self._weights
            and tensor.untyped_storage().nbytes() <= 2 * tensor.numel() * tensor.element_size()
        )

    def to_host(self, tensor: Tensor) -> Tensor:
        copy = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=self.device.type == "cuda"
        )
        if self._out is None:
            return copy.copy_(tensor)
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            copy.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._leaving.append((tensor, copied))
        return copy

    def fetch(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Copy tensors back to the device. They are complete once the returned event has passed."""
        if self._back is None:
            return [tensor.clone() for tensor in tensors], None
        self._release()
        current = torch.cuda.current_stream(self.device)
        fetched = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self.device) for t in tensors]
        self._back.wait_stream(current)
        with torch.cuda.stream(self._back):
            for target, tensor in zip(fetched, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
                target.record_stream(self._back)  # it may be freed before the copy has ended
            arrived = torch.cuda.Event()
            arrived.record()
        return fetched, arrived


class _Moved:
    """The saved tensors of one block, in host memory until its backward pass needs them."""

    def __init__(self, mover: _Mover, before: _Moved | None) -> None:
        self._mover, self._before = mover, before
        self._on_host: list[Tensor] = []
        self.packed: dict[tuple[Any, ...], tuple[int, Tensor]] = {}
        """Tensors with their indices, kept during the forward so that no other tensor gets the same address."""
        self._on_device: list[Tensor] | None = None
        self._arrived: Any = None
        self._entered = False

    def pack(self, tensor: Tensor) -> Tensor | int:
        if not self._mover.moves(tensor):
            return tensor
        # Each operation that needs a tensor saves it. It is moved only once.
        key = (tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride())
        if key not in self.packed:
            self.packed[key] = len(self._on_host), tensor.detach()
            self._on_host.append(self._mover.to_host(tensor.detach()))
        return self.packed[key][0]

    def unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensors = self.fetch()
        if not self._entered:
            self._entered = True
            if self._arrived is not None:
                torch.cuda.current_stream(self._mover.device).wait_event(self._arrived)
            if self._before is not None:
                self._before.fetch()
                self._before = None
        return tensors[packed]

    def fetch(self) -> list[Tensor]:
        if self._on_device is None:
            self._on_device, self._arrived = self._mover.fetch(self._on_host)
            self._on_host = []
        return self._on_device
