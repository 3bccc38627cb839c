"""Measure how much memory tensors use, now and at the peak.

On CUDA, the allocator counts. On the CPU, a dispatch mode tracks the results of every operation until their memory is
freed, in the thread that called `metered` and in threads that use `followed`. Temporary memory inside an operation is
not counted there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextlib.contextmanager
def metered(device: torch.device, known: Iterable[Tensor] = ()) -> Iterator[Meter]:
    """Yield a meter that counts the bytes of tensors inside the block. `known` are existing tensors that count, too."""
    if device.type == "cuda":
        meter = _Allocator(device)
        meter.restart()
        yield meter
        return
    tracker = _Tracker()
    for tensor in known:
        tracker.note(tensor)
    _trackers.append(tracker)
    try:
        with _TrackResults(tracker):
            yield tracker
    finally:
        _trackers.remove(tracker)


def followed() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a worker thread's tensors count for the current meter, if there is one."""
    return _TrackResults(_trackers[-1]) if _trackers else contextlib.nullcontext()


class _Allocator:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def peak(self) -> int:
        """Return the largest number of bytes since `restart`."""
        return int(torch.cuda.max_memory_allocated(self._device))

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class _Tracker:
    """Counts the memory of CPU tensors."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant, because garbage collection may call _freed inside note
        self._storages: dict[int, tuple[int, Any]] = {}
        """Bytes of each storage, and a weak reference that reports when it is freed."""
        self._now = self._peak = 0

    def note(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key in self._storages:
                return
            size = storage.nbytes()
            # torch keeps the storage's Python object alive as long as the storage, so it ends with the memory.
            self._storages[key] = size, weakref.ref(storage, functools.partial(self._freed, key))
            self._now += size
            self._peak = max(self._peak, self._now)

    def _freed(self, key: int, _: object) -> None:
        with self._lock:
            self._now -= self._storages.pop(key, (0, None))[0]

    def now(self) -> int:
        return self._now

    def peak(self) -> int:
        return self._peak

    def restart(self) -> None:
        with self._lock:
            self._peak = self._now


class _TrackResults(TorchDispatchMode):
    def __init__(self, tracker: _Tracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._tracker.note(leaf)
        return result


Meter = _Allocator | _Tracker
_trackers: list[_Tracker] = []
