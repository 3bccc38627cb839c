"""How much memory tensors take: now, and at most since somebody last asked.

On CUDA the allocator knows. On the CPU nobody does, so every operation's results are followed from when they are made
until their memory is freed, in the thread that asked and in those that ask to be followed too (`followed`). What an
operation needs only while it runs is not seen there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(Protocol):
    """Bytes of tensors on one device."""

    def now(self) -> int: ...

    def peak(self) -> int:
        """The most since `restart`."""

    def restart(self) -> None: ...


@contextlib.contextmanager
def metered(device: torch.device, known: Iterable[Tensor] = ()) -> Iterator[Meter]:
    """A meter for what happens inside. `known`: tensors that are there already and count."""
    if device.type == "cuda":
        meter = _Allocator(device)
        meter.restart()
        yield meter
        return
    followed_ones = _Followed()
    for tensor in known:
        followed_ones.note(tensor)
    _followers.append(followed_ones)
    try:
        with _Follow(followed_ones):
            yield followed_ones
    finally:
        _followers.remove(followed_ones)


def followed() -> contextlib.AbstractContextManager[Any]:
    """For a thread that works for others: what it makes counts, where somebody counts."""
    return _Follow(_followers[-1]) if _followers else contextlib.nullcontext()


class _Allocator:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class _Followed:
    def __init__(self) -> None:
        self._lock = threading.RLock()  # memory may be freed while it is counted, in the same thread
        self._bytes: dict[int, int] = {}
        self._watches: dict[int, Any] = {}
        self._now = self._peak = 0

    def note(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key in self._bytes:
                return
            size = storage.nbytes()
            # torch keeps a storage's Python object as long as the storage: it goes when the memory does.
            self._watches[key] = weakref.ref(storage, functools.partial(self._freed, key))
            self._bytes[key] = size
            self._now += size
            self._peak = max(self._peak, self._now)

    def _freed(self, key: int, _: object) -> None:
        with self._lock:
            self._watches.pop(key, None)
            self._now -= self._bytes.pop(key, 0)

    def now(self) -> int:
        return self._now

    def peak(self) -> int:
        return self._peak

    def restart(self) -> None:
        with self._lock:
            self._peak = self._now


class _Follow(TorchDispatchMode):
    def __init__(self, noting: _Followed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noting = noting

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._noting.note(leaf)
        return result


_followers: list[_Followed] = []
