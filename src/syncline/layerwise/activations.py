"""Keep, recompute or offload the activations of a model's blocks.

`torch.utils.checkpoint` recomputes, with the same random state and autocast. Saved-tensor hooks copy the tensors that
autograd saves to pinned host memory and back, on separate streams. While one block runs backward, the tensors of the
block before it are already being fetched.
"""

from __future__ import annotations

import contextlib
import functools
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

_SMALLEST_BYTES = 1 << 16  # smaller tensors stay on the device


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in the order of their definition.

    A block is an outermost module that is listed in a Sequential or a ModuleList, and has submodules and parameters.
    """
    blocks: dict[str, nn.Module] = {}
    lists = nn.Sequential | nn.ModuleList
    names = {id(part): name for name, part in module.named_modules()}  # one name for a module that is used repeatedly

    def search(parent: nn.Module) -> None:
        for child in parent.children():
            listed = isinstance(parent, lists) and not isinstance(child, lists)
            if listed and any(True for _ in child.children()) and any(True for _ in child.parameters()):
                blocks.setdefault(names[id(child)], child)
            else:
                search(child)

    search(module)
    return blocks


class Managed:
    """Replaces the forward of blocks: one of `WAYS` to handle the activations of all of them, or by block name."""

    def __init__(self, module: nn.Module, activations: str | Mapping[str, str] | None) -> None:
        known = ", ".join(WAYS)
        if activations is None or isinstance(activations, Mapping):
            self.ways = dict(activations or {})
        elif activations not in WAYS:
            raise UsageError(f"activations is {activations!r}: pass one of {known}, or a mapping from block names")
        else:
            self.ways = dict.fromkeys(find_blocks(module), activations)
            if not self.ways and activations != KEEP:
                text = "no blocks were found: the model has no Sequential or ModuleList of modules with submodules"
                raise UsageError(f"{text}. Name the modules instead, like activations={{'layer': {activations!r}}}")
        blocks = dict(module.named_modules())
        for name, way in self.ways.items():
            if name not in blocks:
                raise UsageError(f"activations: the model has no module named {name!r}")
            if way not in WAYS:
                raise UsageError(f"activations: {name} is {way!r}: pass one of {known}")
        mover = _Mover(module) if {OFFLOAD, PARK} & set(self.ways.values()) else None
        self._before: list[tuple[nn.Module, Any]] = []  # changed blocks, with their own `forward` if they had one
        for name, way in self.ways.items():
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
        return functools.partial, (self._forward,)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*inputs, **options)
        with contextlib.nullcontext() if self._mover is None else self._mover.block():
            run = self._run if self._way == OFFLOAD else self._recompute
            return run(*inputs, **options)

    def _run(self, *inputs: Any, **options: Any) -> Any:
        """Run forward without autocast's cache, which would keep a cast copy of all weights until it ends."""
        kind = next((leaf.device.type for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), "cpu")
        enabled = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False, enabled=enabled):
            return self._forward(*inputs, **options)

    def _recompute(self, *inputs: Any, **options: Any) -> Any:
        """Run forward without saving its activations: the backward pass runs it again."""
        for value in (*inputs, *options.values()):
            if hasattr(value, "get_seq_length"):  # a Hugging Face cache would store everything twice
                text = f"a block with a {type(value).__name__} cannot be recomputed, because it stores the results"
                raise UsageError(f"{text}: build the model with use_cache=False")
        norms = [part for part in self._block.modules() if isinstance(part, _NormBase) and part.track_running_stats]
        contexts = (contextlib.nullcontext(), _keep_statistics(norms))
        return checkpoint(self._run, *inputs, use_reentrant=False, context_fn=lambda: contexts, **options)


@contextlib.contextmanager
def _keep_statistics(norms: Sequence[_NormBase]) -> Iterator[None]:
    """Replace running statistics by scratch buffers, because the first forward has counted this batch already."""
    # In training mode, the result of BatchNorm does not depend on its running statistics.
    original = [(norm, dict(norm._buffers)) for norm in norms if norm.training]
    for norm, buffers in original:
        norm._buffers.update({name: None if old is None else torch.zeros_like(old) for name, old in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in original:
            norm._buffers.update(buffers)


class _Mover:
    """Copies tensors between a device and host memory. On the CPU they are copied too, so that tests need no GPU."""

    def __init__(self, module: nn.Module) -> None:
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        on_gpu = self.device.type == "cuda"
        self.out: Any = torch.cuda.Stream(self.device) if on_gpu else None
        self.back: Any = torch.cuda.Stream(self.device) if on_gpu else None
        self._latest: weakref.ref[_Moved] | None = None
        """The previous block. A weak reference, so that it is freed together with autograd's graph."""
        self.leaving: list[tuple[Tensor, Any]] = []  # on their way to the host, with the event that ends the copy

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Move the tensors that autograd saves inside this context to the host."""
        self.release()
        moved = _Moved(self, None if self._latest is None else self._latest())
        self._latest = weakref.ref(moved)
        try:
            with saved_tensors_hooks(moved.pack, moved.unpack):
                yield
        finally:
            moved.packed.clear()

    def release(self) -> None:
        """Free the device memory of tensors that were copied. The current stream waits for the copies first."""
        for _, copied in self.leaving:
            self.wait_for(copied)
        self.leaving.clear()

    def wait_for(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def moves(self, tensor: Tensor) -> bool:
        if tensor.device != self.device or tensor.layout != torch.strided or tensor.nbytes < _SMALLEST_BYTES:
            return False
        storage = tensor.untyped_storage()
        return storage.data_ptr() not in self._weights and storage.nbytes() <= 2 * tensor.nbytes

    def copy(self, targets: Sequence[Tensor], tensors: Sequence[Tensor], stream: Any) -> Any:
        """Copy tensors on a stream, after what is enqueued now. Return the event that ends it, or None on the CPU."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
            return None if stream is None else stream.record_event()


class _Moved:
    """The saved tensors of one block, in host memory until its backward pass needs them."""

    def __init__(self, mover: _Mover, before: _Moved | None) -> None:
        self._mover, self._before = mover, before
        self._on_host: list[Tensor] = []
        self.packed: dict[tuple[Any, ...], tuple[int, Tensor]] = {}
        """Tensors with their indices, kept during the forward so that no other tensor gets the same address."""
        self._on_device: list[Tensor] | None = None
        self._arrived: Any = None  # the event that ends the copy to the device, until backward has waited for it

    def pack(self, tensor: Tensor) -> Tensor | int:
        mover, own = self._mover, tensor.detach()
        if not mover.moves(tensor):
            return tensor
        # Each operation that needs a tensor saves it. It is moved only once.
        key = (tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride())
        if key not in self.packed:
            self.packed[key] = len(self._on_host), own
            pinned = mover.out is not None
            copy = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, pin_memory=pinned)
            if (copied := mover.copy([copy], [own], mover.out)) is not None:
                mover.leaving.append((own, copied))
            self._on_host.append(copy)
        return self.packed[key][0]

    def unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensors = self.fetch()
        self._mover.wait_for(self._arrived)
        self._arrived = None
        if self._before is not None:
            self._before.fetch()
            self._before = None
        return tensors[packed]

    def fetch(self) -> list[Tensor]:
        """Start to copy the tensors back to the device, unless that was done, and return them."""
        if self._on_device is None:
            self._mover.release()
            device, back = self._mover.device, self._mover.back
            fetched = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in self._on_host]
            self._arrived = self._mover.copy(fetched, self._on_host, back)
            for tensor in fetched if back is not None else ():
                tensor.record_stream(back)  # it may be freed before the copy has ended
            self._on_device, self._on_host = fetched, []
        return self._on_device
