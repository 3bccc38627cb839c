"""Kernels that follow each other in every step, launched as one: a CUDA graph.

What a host does to launch a kernel takes longer than many of these kernels run, and a bucket takes more than a dozen.
So a sequence is recorded the second time that it runs with the same tensors, and replayed from then on. The first time
it is launched one by one, because that compiles it. Recording launches nothing; where it is not possible, kernels are
launched one by one as before, and nobody notices but the clock.

It asks the driver itself: torch's own graphs bring along the generator of random numbers, and whoever draws some in
another thread while one is recorded, as a checkpointed dropout in backward does, gets an error.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_THREAD_LOCAL = 1
"""Other threads go on with whatever they do on the device while this one records."""


class Launch(Protocol):
    def __call__(self, kernels: Callable[[], None], *given: Tensor | float | None) -> None: ...


class Replay:
    """Of one sequence. It may not allocate, nor depend on anything on the host but what it is called with."""

    def __init__(self) -> None:
        self._with: tuple[object, ...] = ()
        self._graph: _Graph | None = None
        self._possible = True

    def __call__(self, kernels: Callable[[], None], *given: Tensor | float | None) -> None:
        """Runs `kernels`, which depend on what is given: tensors by their places, values as they are."""
        now = tuple([one.data_ptr() if isinstance(one, Tensor) else one for one in given])
        stream = torch.cuda.current_stream()
        if now != self._with:
            self._with, self._graph = now, None
            kernels()
            return
        if self._graph is None and self._possible and stream != torch.cuda.default_stream():
            self._graph = _recorded(kernels, stream.cuda_stream)
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
            raise RuntimeError(f"the CUDA driver did not launch a graph of kernels: error {code}")


def _recorded(kernels: Callable[[], None], stream: int) -> _Graph | None:
    """What `kernels` launches on the stream; None where it cannot be recorded."""
    driver = _driver()
    if driver is None or driver.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), _THREAD_LOCAL) != 0:
        return None
    graph, executable, recorded = ctypes.c_void_p(), ctypes.c_void_p(), False
    # What is collected meanwhile may be memory that this stream has used, and torch would note that on the stream.
    collecting = gc.isenabled()
    gc.disable()
    try:
        kernels()
        recorded = True
    except RuntimeError:  # what may not be recorded says so; launched one by one it may well run
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
