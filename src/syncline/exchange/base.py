"""The contract between an exchange and the code that runs it.

An exchange replaces a flat bucket by its **sum** over the ranks. The engine multiplies the bucket by 1/world_size
first, in one place. Exchanges can therefore be nested (a mean of means over unequal groups would be wrong), and 16-bit
sums cannot overflow where plain DDP's would not. An exchange is straight-line code that works in place and calls only
its `Comm`. The lane that runs it owns the threads, streams and process groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from syncline.exchange.layout import Layout
from syncline.exchange.topology import Cost, Topology, Tree


class Work(Protocol):
    """A collective that was issued. Its buffers must not be used until `wait` returns."""

    def wait(self) -> None: ...


class Comm(Protocol):
    """The collectives that an exchange may call, among the ranks of one level.

    Every rank of a group must issue the same collectives in the same order. Each call returns at once; its result is
    available after `wait`.
    """

    @property
    def rank(self) -> int:
        """Number of this rank in its group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def topology(self) -> Topology:
        """The groups of ranks, and the levels below them."""

    def level(self, name: str) -> Comm | None:
        """Return the `Comm` of this rank's group at another level; None if the rank is alone or in no group there."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum `tensor` over the ranks, in place."""

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        """Send the i-th of `size` equal parts of `input` to rank i; `output` receives them in rank order."""

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Collect every rank's `input` in `output`, in rank order."""

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        """Sum `input` over the ranks; `output` receives this rank's of `size` equal parts. Use it only on NCCL: gloo
        would send as many bytes as in an all-reduce."""

    def reduce(self, tensor: Tensor, root: int) -> Work:
        """Sum over the ranks into the root's `tensor`. The contents on other ranks are undefined afterwards."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Copy the root's `tensor` to all ranks."""


@dataclass(frozen=True)
class Rounding:
    """A bound on the error of each element: `of_sum · Σ|x_r| + of_largest · max|x| + absolute`.

    The sum is over the ranks' values of that element, the maximum over the whole bucket on all ranks.
    """

    of_sum: float
    of_largest: float = 0.0
    absolute: float = 0.0

    @classmethod
    def of_summation(cls, dtype: torch.dtype, ranks: int) -> Rounding:
        """Return a bound for adding `ranks` numbers of this type in any order."""
        return cls(ranks * torch.finfo(dtype).eps)


class State:
    """The buffers and the residual of an exchange for one bucket.

    This base class has no residual. A state with a residual overrides `kept`, `state_bytes`, `tensors`, `load`, `begin`
    and `settle`.
    """

    def describe(self) -> str:
        """Return the path that this bucket takes, for exchanges that have several."""
        return ""

    def kept(self) -> Tensor | None:
        """Return the residual, one element per element of the bucket; None for exchanges without one."""
        return None

    @property
    def state_bytes(self) -> int:
        """Bytes that the state occupies between steps, buffers excluded."""
        return 0

    def tensors(self, layout: Layout) -> dict[str, dict[str, Tensor]]:
        """Return what a checkpoint must contain, given the layout that the state was prepared with: tensors in their
        parameter's logical shape, by parameter name and then by kind, such as `residual`."""
        return {}

    def load(self, layout: Layout, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace the state by a result of `tensors`, without communication. The tensors may come from a different
        layout. Parameters of this bucket that are missing start with zeros."""

    def average(self, share: float) -> bool:
        """Return whether `run` multiplies the bucket by `share` (1/world_size) itself, in a pass that it makes anyway.
        Otherwise the engine does it before `run`."""
        return False

    def begin(self, step: int, scale: Tensor | None = None) -> None:
        """Begin a step, after `step` others. `scale` is the loss scale of a GradScaler, a 0-dim tensor by which this
        step's gradients are multiplied. The residual must have the same scale during the step; `tensors` returns it
        unscaled."""

    def finite(self, flat: Tensor) -> Tensor:
        """Return whether the sum that `run` left in `flat` is finite, as a 0-dim tensor. Override it if `run` computes
        this anyway."""
        return torch.isfinite(flat).all()

    def track_applied(self) -> None:
        """Ask for `applied_here` in all later steps. Call it once, after `prepare`."""

    def applied_here(self) -> Tensor | None:
        """Return which elements of the step's result contain an entry of this rank, as a bool tensor with one flag per
        element; None if all elements do, as in a bucket that is sent dense. Valid after `run` and before `settle`, if
        `track_applied` was called; the next step overwrites it. Must not synchronise with the host."""
        return None

    @property
    def settles(self) -> bool:
        """True if the state overrides `settle`."""
        return type(self).settle is not State.settle

    def settle(self, applied: Tensor) -> None:
        """End a step, after all of its buckets: keep what `run` changed where `applied` is true, and restore the
        previous state where it is false. Must not synchronise with the host.

        Args:
            applied: Whether the optimizer gets the result, as `torch.where` takes it: a 0-dim tensor, false if any
                bucket of the step was not finite, or one flag per element of the bucket, false also for parameters
                that no rank has used and whose gradients DDP therefore leaves alone.
        """


@runtime_checkable
class Exchange(Protocol):
    """An algorithm that sums a bucket over the ranks.

    Implementations are frozen dataclasses, and their fields are their settings. `docs/guide/own_exchange.md` builds
    one.
    """

    @property
    def lossless(self) -> bool:
        """True if the result equals the sum, apart from the order of summation."""

    @property
    def keeps(self) -> bool:
        """True if the exchange has a residual."""

    @property
    def waits(self) -> bool:
        """True if `run` waits for a collective. If it only issues collectives, it needs no thread and starts sooner."""

    def prepare(self, layout: Layout, comm: Comm) -> State:
        """Return the state for one bucket, given the `Comm` that `run` will get. May communicate."""

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        """Replace the bucket `flat` by its sum over the ranks.

        Returns:
            The last collective if it may still be running: the lane starts its next bucket meanwhile. None if the sum
            is complete.
        """

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        """Return the collectives that `run` issues for a bucket of `numel` elements."""

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        """Return a bound on the difference between the gradients and the applied values plus the residual."""


@runtime_checkable
class UsesLevels(Protocol):
    """An exchange that uses the levels of a tree of ranks in addition to the group of all ranks."""

    def tree(self, detected: Tree, ranks: int) -> Tree:
        """Return the tree to create groups for, given the detected tree of hosts and racks."""


def default_lanes(exchange: Exchange, backend: str) -> int:
    """Return the number of lanes to use by default.

    On gloo, an exchange that waits between its collectives gets two, so that another bucket uses the links meanwhile.
    NCCL gets one: its streams do not wait for the host, and additional communicators would compete with each other.
    """
    return 2 if exchange.waits and backend == "gloo" else 1


@dataclass
class Counter:
    """Bytes sent by the busiest rank, per level."""

    sent_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, level: str, sent: int) -> None:
        """Count `sent` more bytes at a level."""
        self.sent_bytes[level] = self.sent_bytes.get(level, 0) + sent
