"""Convert between buckets and their *caps*: the sizes in bytes at which DDP closes its buckets."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.records.profile import NamedTensor


def filled(gradients: Sequence[NamedTensor], caps: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the buckets that DDP makes after its first step, as indices into `gradients`.

    DDP fills buckets in ready order. A bucket holds one dtype and is closed when it reaches its cap. Each dtype starts
    with the first cap, and the last cap repeats.
    """
    open_buckets: dict[str, list[int]] = {}
    open_bytes: dict[str, int] = {}
    closed_count: dict[str, int] = {}
    closed: list[tuple[int, ...]] = []
    for index, gradient in enumerate(gradients):
        dtype = gradient.dtype
        open_buckets.setdefault(dtype, []).append(index)
        open_bytes[dtype] = open_bytes.get(dtype, 0) + gradient.nbytes
        count = closed_count.get(dtype, 0)
        if open_bytes[dtype] >= caps[min(count, len(caps) - 1)]:
            closed.append(tuple(open_buckets.pop(dtype)))
            open_bytes[dtype], closed_count[dtype] = 0, count + 1
    return (*closed, *(tuple(indices) for indices in open_buckets.values()))


def caps_of(gradients: Sequence[NamedTensor], buckets: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the caps from which `filled` makes these buckets; with several dtypes, those of the largest one."""
    by_dtype: dict[str, list[int]] = {}
    for indices in buckets:
        dtype = gradients[indices[0]].dtype
        by_dtype.setdefault(dtype, []).append(sum(gradients[index].nbytes for index in indices))
    most = max(by_dtype, key=lambda dtype: (sum(by_dtype[dtype]), dtype))
    return tuple(max(1, size) for size in by_dtype[most])
