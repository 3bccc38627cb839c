"""Code that the engines for gradients of DDP and of sharded models share: residuals, and what a handle asks for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from syncline.exchange import Layout
from syncline.runtime.bucket_runner import Bucket, BucketRunner, Residuals
from syncline.runtime.stats import Stats


class GradientEngine:
    """Base class of engines after whose steps all ranks have the same weights."""

    exchanges_gradients = True
    runner: BucketRunner
    buckets: dict[Any, Bucket]

    def __post_init__(self) -> None:
        self._stored: dict[str, dict[str, Tensor]] = {}  # residuals of parameters whose bucket is not prepared yet
        self._lock = threading.Lock()

    @property
    def steps(self) -> int:
        return self.runner.steps

    def stats(self) -> Stats:
        return self.runner.stats()

    def synced(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # all ranks always have the same weights

    def finish(self) -> None:
        """Do nothing: all ranks always have the same weights."""

    def wait(self) -> None:
        """Do nothing: a backward pass ends when all gradients have been exchanged."""

    def residuals(self) -> dict[str, Mapping[str, Tensor]]:
        """Return all residuals by parameter name and kind. They are not copies, and change in the next step."""
        residuals: dict[str, Mapping[str, Tensor]] = dict(self._stored)
        for bucket in self.buckets.values():
            if bucket.state is not None:
                residuals |= bucket.state.tensors(bucket.layout)
        return residuals

    def _take_residuals(self, bucket: Bucket) -> dict[str, dict[str, Tensor]]:
        """Take the stored residuals of the parameters of a bucket."""
        with self._lock:
            mine = {name: self._stored.pop(name) for name in names_in(bucket.layout) if name in self._stored}
        for tensor in (tensor for kinds in mine.values() for tensor in kinds.values()):
            if tensor.is_cuda:  # allocated on backward's stream: its memory must last until this lane has read it
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return mine

    def _load_prepared(self) -> None:
        """Give buckets that are prepared already their stored residuals."""
        for bucket in self.buckets.values():
            if bucket.state is not None:
                bucket.state.load(bucket.layout, self._take_residuals(bucket))


def names_in(layout: Layout) -> tuple[str, ...]:
    return tuple(slot.name for slot in layout.slots)


def copied(residuals: Residuals) -> dict[str, dict[str, Tensor]]:
    return {name: {kind: t.detach().clone() for kind, t in kinds.items()} for name, kinds in residuals.items()}
