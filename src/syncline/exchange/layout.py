"""The layout of a flat bucket: which parameter's gradient is stored where."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.exchange.workspace import Workspace


@dataclass(frozen=True)
class Slot:
    """The position of one parameter's gradient in a flat bucket."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Stride of the gradient in the bucket. A channels-last gradient is stored channels-last."""
    offset: int
    numel: int

    def view(self, flat: Tensor) -> Tensor:
        """Return a view of this parameter's part of a flat bucket, in its logical shape."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


def stride_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    """Return the stride that DDP gives a parameter's gradient in a bucket: the parameter's own if its memory has no
    gaps and no overlaps, and that of a contiguous tensor otherwise."""
    return parameter.stride() if is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements have no gaps or overlaps in memory, for any order of dimensions."""
    expected = 1
    dimensions = ((size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    for size, stride in sorted(dimensions, key=lambda dimension: dimension[1]):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Layout:
    """The contents of a flat bucket, its dtype and its device.

    Example:
        >>> layout = Layout.flat(1000)
        >>> layout.numel, layout.buffer("received", 4, 250).shape
        (1000, torch.Size([4, 250]))
    """

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    device: torch.device
    workspace: Workspace | None = field(default=None, compare=False)
    """Memory shared with buckets that never run at the same time; None if this bucket has its own buffers."""

    @classmethod
    def flat(cls, numel: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Layout:
        """Return the layout of a bucket that holds one vector, for tests and benchmarks."""
        return cls((Slot("flat", (numel,), (1,), 0, numel),), dtype, torch.device(device))

    @property
    def numel(self) -> int:
        """Number of elements in the bucket."""
        return sum(slot.numel for slot in self.slots)

    def buffer(self, kind: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for `run` to work in.

        Args:
            kind: A name that tells this buffer apart from the exchange's other buffers.
            shape: The shape of the buffer.
            dtype: The type of its elements, by default the bucket's.

        Returns:
            A tensor of zeros. If the layout has a workspace, other buckets overwrite it between steps.
        """
        dtype = self.dtype if dtype is None else dtype
        if self.workspace is not None:
            return self.workspace.take(kind, shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def piece(self, start: int, numel: int) -> Layout:
        """Return the layout of `numel` elements from `start`, in memory order. Elements beyond the end of the bucket
        are padding: a slot whose name is empty."""
        slots = []
        for slot in self.slots:
            first, end = max(start, slot.offset), min(start + numel, slot.offset + slot.numel)
            if first < end:
                slots.append(Slot(slot.name, (end - first,), (1,), first - start, end - first))
        if (padding := start + numel - max(start, self.numel)) > 0:
            slots.append(Slot("", (padding,), (1,), numel - padding, padding))
        workspace = None if self.workspace is None else self.workspace.part(str(start))
        return Layout(tuple(slots), self.dtype, self.device, workspace)
