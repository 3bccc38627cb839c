"""The contract between an exchange and everything else.

An exchange replaces a flat gradient bucket by its **sum** over the ranks. The engine divides by the number of ranks
beforehand, once: so exchanges compose (a mean of means over unequal groups would be wrong), and 16-bit sums cannot
overflow where plain DDP's would not.

It reads like pseudo-code: straight-line, in place, calling nothing but its `Comm`. Threads, streams and process groups
belong to the lane that runs it. `syncline.testing` holds the laws that every exchange keeps, to check your own with.
"""

from __future__ import annotations

import dataclasses
from collections import Counter as Counts
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from syncline.exchange import wire
from syncline.exchange.workspace import Workspace

if TYPE_CHECKING:
    from syncline.exchange.tree import Tree

WORLD = "world"
"""The level at which all ranks meet."""


@dataclass(frozen=True)
class Slot:
    """Where one parameter's gradient lies in a flat bucket."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Of the gradient in the bucket: a channels-last gradient lies channels-last there."""
    offset: int
    numel: int

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor, in its logical shape."""
        return flat[self.offset : self.offset + self.numel].as_strided(
            self.shape, self.stride, flat.storage_offset() + self.offset
        )


def stride_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    """The stride with which DDP lays a parameter's gradient out in a bucket: the parameter's own if its memory has no
    gaps and no overlaps, and that of a contiguous tensor otherwise."""
    return parameter.stride() if is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    dimensions = ((size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    for size, stride in sorted(dimensions, key=lambda dimension: dimension[1]):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Layout:
    """What a flat bucket holds."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    device: torch.device
    workspace: Workspace | None = field(default=None, compare=False)
    """Shared with other buckets, which never run at the same time; None for buffers of its own."""

    def buffer(self, kind: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for an exchange to run in, with zeros in it; where it is shared, with anything, after the first."""
        dtype = self.dtype if dtype is None else dtype
        if self.workspace is not None:
            return self.workspace.take(kind, shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    def piece(self, start: int, numel: int) -> Layout:
        """A part of the bucket, in memory order; what lies beyond the end is padding, without a name."""
        slots = []
        for slot in self.slots:
            first, end = max(start, slot.offset), min(start + numel, slot.offset + slot.numel)
            if first < end:
                slots.append(Slot(slot.name, (end - first,), (1,), first - start, end - first))
        if (padding := start + numel - max(start, self.numel)) > 0:
            slots.append(Slot("", (padding,), (1,), numel - padding, padding))
        workspace = None if self.workspace is None else self.workspace.part(str(start))
        return Layout(tuple(slots), self.dtype, self.device, workspace)

    @classmethod
    def flat(cls, numel: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Layout:
        """A bucket of one nameless vector, for tests and benchmarks."""
        slot = Slot(name="flat", shape=(numel,), stride=(1,), offset=0, numel=numel)
        return cls((slot,), dtype, torch.device(device))


class Work(Protocol):
    """A collective that was issued; its buffers must be left alone until `wait` returns."""

    def wait(self) -> None: ...


class Comm(Protocol):
    """What an exchange may call: collectives among the ranks of one level, issued in the same order on all of them.

    Each returns at once; its result is there after `wait`.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def topology(self) -> Topology:
        """Who meets whom here."""

    def level(self, name: str) -> Comm | None:
        """The same, among the ranks that this one meets at another level; None where it meets nobody."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sums `tensor` over the ranks, in place."""

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        """Sends the i-th of `size` equal parts of `input` to rank i; `output` receives them in rank order."""

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Collects every rank's `input` in `output`, in rank order."""

    def reduce(self, tensor: Tensor, root: int) -> Work:
        """Sums over the ranks into the root's `tensor`; the others' contents are undefined afterwards."""

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Copies the root's `tensor` to everyone."""


@dataclass(frozen=True)
class Level:
    """Groups of ranks that meet side by side, in an order of their own; no rank is in two of them."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """Of the largest group."""
        return max(map(len, self.groups))

    @property
    def sizes(self) -> list[int]:
        """That its groups have, each once."""
        return sorted({len(group) for group in self.groups})

    @property
    def equal(self) -> bool:
        return len(self.sizes) == 1

    def led_by(self, below: Level) -> Level:
        """Only the groups of those ranks that come first in theirs at the level below."""
        leaders = {group[0] for group in below.groups}
        return Level(self.name, tuple(group for group in self.groups if group[0] in leaders))


@dataclass(frozen=True)
class Topology:
    """Who meets whom, and what carries their bytes."""

    whole: Level
    """Those among whom an exchange runs. Several groups do the same side by side."""
    levels: tuple[Level, ...] = ()
    """Into which they are divided, from the inside out, for exchanges that climb them."""
    backend: str = "gloo"
    seconds: Callable[[Cost], float] | None = None
    """What a cost comes to on these links, for exchanges that choose by it; None where nothing is known of them."""

    @property
    def ranks(self) -> int:
        return self.whole.ranks

    @classmethod
    def flat(cls, ranks: int, backend: str = "gloo") -> Topology:
        return cls(Level(WORLD, (tuple(range(ranks)),)), (), backend)

    def among(self, level: Level) -> Topology:
        """For an exchange that runs among the groups of one level."""
        return dataclasses.replace(self, whole=level, levels=())


@dataclass(frozen=True)
class Phase:
    """One collective of an exchange: what a predictor needs to know of it."""

    kind: str
    level: Level
    """The groups that run it side by side."""
    elements: int
    itemsize: int
    sent_by: tuple[tuple[int, int], ...]
    """Sizes of its groups, and bytes that the busiest rank of one of this size sends."""

    @classmethod
    def of(cls, kind: str, elements: int, itemsize: int, topology: Topology) -> Phase:
        level = topology.whole
        sent = [wire.sent_bytes(kind, elements, itemsize, ranks, topology.backend) for ranks in level.sizes]
        return cls(kind, level, elements, itemsize, tuple(zip(level.sizes, sent, strict=True)))

    @property
    def sent_bytes(self) -> int:
        """By the busiest rank."""
        return max(sent for _, sent in self.sent_by)

    @property
    def ranks(self) -> int:
        return self.level.ranks


@dataclass(frozen=True)
class Cost:
    """What an exchange puts on the wire for one bucket, phase by phase in the order it runs them."""

    phases: tuple[Phase, ...]
    chunks: int = 1
    """How many parts of the bucket go through as many phases each, one close behind the other: the phases of the first,
    then those of the second, and so on."""

    @property
    def parts(self) -> tuple[tuple[Phase, ...], ...]:
        """By chunk."""
        each = len(self.phases) // self.chunks
        return tuple(self.phases[start : start + each] for start in range(0, each * self.chunks, max(each, 1)))

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Per level, by a rank of the group that sends most in all."""
        total: dict[str, Counts[int]] = {}
        for phase in self.phases:
            total.setdefault(phase.level.name, Counts()).update(dict(phase.sent_by))
        return {level: max(by_size.values()) for level, by_size in total.items()}


@dataclass(frozen=True)
class Rounding:
    """How far a result may be from the true sum: `of_sum · Σ|x_r| + of_largest · max|x| + absolute`, per element.

    The maximum is over the whole bucket on all ranks.
    """

    of_sum: float
    of_largest: float = 0.0
    absolute: float = 0.0

    @classmethod
    def of_summation(cls, dtype: torch.dtype, ranks: int) -> Rounding:
        """What any order of adding `ranks` numbers of this type may lose."""
        return cls(ranks * torch.finfo(dtype).eps)


class State:
    """What an exchange keeps of one bucket between steps. This one keeps nothing; keepers override all of it."""

    def describe(self) -> str:
        """Which way this bucket goes, for exchanges that have several."""
        return ""

    def kept(self) -> Tensor | None:
        """What came in and was not applied yet, like the bucket; None for exchanges that apply everything."""
        return None

    @property
    def rests_bytes(self) -> int:
        """What it will keep between steps."""
        return 0

    def tensors(self, layout: Layout) -> dict[str, dict[str, Tensor]]:
        """By parameter name, then by kind, in logical shape: what a checkpoint must hold."""
        return {}

    def load(self, layout: Layout, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Takes over what `tensors` returned, here or from another layout, in place of all that it keeps: parameters
        of this bucket that are not named start anew. Without communication."""

    def average(self, share: float) -> bool:
        """Whether it multiplies what comes in by `share` itself, in a pass that it makes anyway. If not, it comes in
        multiplied."""
        return False

    def begin(self, step: int, scale: Tensor | None = None) -> None:
        """A step begins, after so many. `scale`: its gradients are multiplied by this 0-dim tensor, as GradScaler does.
        What is kept is in that measure from then on, and in the gradients' own in `tensors`."""

    def finite(self, flat: Tensor) -> Tensor:
        """Whether the sum that `run` left in `flat` is, as a 0-dim tensor; for those who know without looking."""
        return torch.isfinite(flat).all()

    @property
    def settles(self) -> bool:
        """Whether the end of a step means anything to it."""
        return type(self).settle is not State.settle

    def settle(self, applied: Tensor) -> None:
        """End a step, after all of its buckets: keep what `run` changed where `applied` is true, and put back what was
        there before where it is false. Must not synchronise with the host.

        Args:
            applied: Whether the optimizer gets the result, as `torch.where` takes it: a 0-dim tensor, false if any
                bucket of the step was not finite, or one flag per element of the bucket, false also for parameters
                that no rank has used and whose gradients DDP therefore leaves alone.
        """


@runtime_checkable
class Exchange(Protocol):
    """One way to sum gradients over ranks. Implementations are frozen dataclasses: their fields are their settings."""

    @property
    def lossless(self) -> bool:
        """Whether the result is the sum, to summation order."""

    @property
    def keeps(self) -> bool:
        """Whether part of what comes in may wait in its state for later steps."""

    @property
    def waits(self) -> bool:
        """Whether `run` waits for a collective. One that only issues needs no thread to wait in, and starts sooner."""

    def prepare(self, layout: Layout, comm: Comm) -> State:
        """Buffers and memory for one bucket; may communicate."""

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        """Replaces `flat` by its sum over the ranks. What it returns, if anything, is the last thing to wait for:
        the lane goes on with its next bucket meanwhile."""

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        """What `run` will put on the wire for a bucket of this size."""

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        """How far the applied plus the kept may be from what came in."""


def default_lanes(exchange: Exchange, backend: str) -> int:
    """Two where an exchange waits between its collectives, so that another uses the links meanwhile. Not on CUDA: there
    the stream goes on by itself, and more communicators than needed get in each other's way."""
    return 2 if exchange.waits and backend == "gloo" else 1


@runtime_checkable
class Climbing(Protocol):
    """An exchange that meets at the levels of a tree, beside the level of all ranks."""

    def tree(self, found: Tree, ranks: int) -> Tree:
        """The tree to make groups for, given the one that was found."""


def settings(exchange: object) -> dict[str, Any]:
    """An exchange's type and fields, nested exchanges included, as JSON: what all ranks must agree on."""
    described: dict[str, Any] = {"type": type(exchange).__name__}
    if dataclasses.is_dataclass(exchange):
        for entry in dataclasses.fields(exchange):
            value = getattr(exchange, entry.name)
            described[entry.name] = settings(value) if isinstance(value, Exchange) else _listed(value)
    return described


def _listed(value: Any) -> Any:
    """As it comes back from a file."""
    return [_listed(one) for one in value] if isinstance(value, tuple) else value


def from_settings(described: Mapping[str, Any], types: Mapping[str, type]) -> Any:
    """The exchange that `settings` described, out of those `types`; `ValueError` says what does not fit."""
    name = described.get("type")
    if not isinstance(name, str) or name not in types:
        raise ValueError(f"no exchange is of type {name!r}; known: {', '.join(types)}")
    fields = {field.name for field in dataclasses.fields(types[name])}
    unknown = sorted(described.keys() - fields - {"type"})
    if unknown:
        raise ValueError(f"{name} has no setting {unknown[0]!r}; it has: {', '.join(sorted(fields)) or 'none'}")
    given = {
        key: from_settings(value, types) if isinstance(value, Mapping) else value
        for key, value in described.items()
        if key != "type"
    }
    try:
        return types[name](**given)
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from error


@dataclass
class Counter:
    """Bytes sent by the busiest rank, per level."""

    sent_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, level: str, sent: int) -> None:
        self.sent_bytes[level] = self.sent_bytes.get(level, 0) + sent
