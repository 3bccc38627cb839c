"""Recording and replay of a sequence of kernels as a CUDA graph.

Launching a kernel takes longer than many of these kernels run, and a bucket needs more than a dozen. A sequence is
therefore recorded when it runs for the second time with the same tensors, and replayed from then on. The first time,
its kernels are launched one by one, which compiles them. Recording launches nothing. If recording is not possible,
kernels are launched one by one in every step, which is only slower.

This calls the CUDA driver directly. `torch.cuda.graph` registers the random number generator, and then another thread
that draws random numbers during the recording, such as checkpointed dropout in a backward pass, gets an error.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

_THREAD_LOCAL = 1
"""Capture mode in which other threads may use the device while this one records."""


class Replay:
    """Records and replays one sequence, if that is possible. The sequence must not allocate memory, and must depend on
    nothing on the host but the arguments of the call."""

    def __init__(self, possible: bool) -> None:
        self._recorded_for: tuple[object, ...] = ()
        self._graph: _Graph | None = None
        self._possible = possible

    def __call__(self, kernels: Callable[[], None], *arguments: Tensor | float | None) -> None:
        """Run `kernels`, or replay them if all arguments have the same addresses and values as in the last call."""
        if not self._possible:
            kernels()
            return
        now = tuple([item.data_ptr() if isinstance(item, Tensor) else item for item in arguments])
        stream = torch.cuda.current_stream()
        if now != self._recorded_for:
            self._recorded_for, self._graph = now, None
        elif self._graph is None and stream != torch.cuda.default_stream():
            self._graph = _record(kernels, stream.cuda_stream)
            self._possible = self._graph is not None
        if self._graph is None:
            kernels()
        else:
            self._graph.launch(stream.cuda_stream)


class _Graph:
    def __init__(self, executable: ctypes.c_void_p, driver: ctypes.CDLL) -> None:
        self._executable, self._driver = executable, driver
        weakref.finalize(self, driver.cuGraphExecDestroy, executable)

    def launch(self, stream: int) -> None:
        code = self._driver.cuGraphLaunch(self._executable, ctypes.c_void_p(stream))
        if code != 0:
            raise RuntimeError(f"the CUDA driver could not launch a graph of kernels: error {code}")


def _record(kernels: Callable[[], None], stream: int) -> _Graph | None:
    """Return a graph of what `kernels` launches on the stream, or None if it cannot be recorded."""
    driver = _driver()
    if driver is None or driver.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), _THREAD_LOCAL) != 0:
        return None
    graph, executable, recorded = ctypes.c_void_p(), ctypes.c_void_p(), False
    # Garbage collection could free memory that this stream has used, and torch would record an event on the stream.
    collecting = gc.isenabled()
    gc.disable()
    try:
        kernels()
        recorded = True
    except RuntimeError:  # the driver refuses to record it; it may still run when launched one by one
        pass
    finally:
        if collecting:
            gc.enable()
        ended = driver.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)) == 0
        if recorded and ended:
            recorded = driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)) == 0
        if graph:
            driver.cuGraphDestroy(graph)
    return _Graph(executable, driver) if recorded and ended else None


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        _ = driver.cuStreamBeginCapture_v2, driver.cuGraphInstantiateWithFlags
    except (OSError, AttributeError):
        return None
    return driver
