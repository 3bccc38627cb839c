"""The time of a step whose weights are gathered behind the next forward pass, and which buckets to all-reduce whole.

During backward, a lane sums the buckets in the order in which they are ready: in shards, or whole. Then the optimizer
steps, and the weights of buckets in shards are gathered in the order in which forward needs them. Where that was not
measured, forward is assumed to use weights in the mirror image of backward: a bucket whose last gradient is ready after
a share x of backward is first needed after a share 1 − x of forward.

A lane runs one collective after the other. While a link waits inside a collective, for the start-up or because messages
collide, it regains credit for a burst, up to the size of its burst. So short waits cost nothing on such a link.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from syncline.exchange import Cost, Dense, Exchange, Phase, Topology
from syncline.exchange.lossy_halves import halves_of
from syncline.predict.exchange_time import flow
from syncline.predict.timeline import Span, Timeline
from syncline.records.network import Network

_WORTH = 0.998
"""A whole bucket needs P times the memory for the optimizer's state, so it must save some of the step."""
_MOST_TRIALS = 40
"""Spreads, and changes of single buckets, that are tried. More take long with hundreds of buckets, and gain little."""
REDUCED, SCATTERED, GATHERED = "all_reduce", "reduce_scatter", "all_gather"
"""Names of the spans of a timeline."""


@dataclass(frozen=True)
class Transfer:
    """One collective, in seconds."""

    least_s: float  # on infinitely fast links
    busy_s: float = 0.0  # its bytes, at the rate of the busiest link
    wasted_s: float = 0.0  # time in which that link waits: the start-up, and collisions
    burst_s: float = 0.0  # the largest credit of that link


Transfers = tuple[Transfer, ...]


@dataclass(frozen=True)
class BucketTimes:
    """One bucket."""

    ready_s: float  # from the start of backward until its last gradient is ready
    whole: Transfers  # its all-reduce
    scatter: Transfers  # its reduce-scatter
    gather: Transfers  # the all-gather of its weights
    needed_s: float | None = None  # from the start of forward until its weights are used; None if it was not measured

    @classmethod
    def measured(
        cls, ready_s: float, whole_s: float, needed_s: float | None = None, gather: str = "fp32"
    ) -> BucketTimes:
        """Return the times of a bucket of which only the all-reduce is known. Halves take half as long, and weights in
        16 bits a quarter."""
        half, gathering = Transfer(whole_s / 2), Transfer(whole_s / (2 if gather == "fp32" else 4))
        return cls(ready_s, (Transfer(whole_s),), (half,), (gathering,), needed_s)

    def after_work(self, seconds: float) -> BucketTimes:
        """Return the bucket with an exchange that computes for some seconds. Half of that is part of either half."""
        if not seconds:
            return self
        work = Transfer(seconds / 2)
        whole, scatter, gather = (Transfer(seconds), *self.whole), (work, *self.scatter), (work, *self.gather)
        return replace(self, whole=whole, scatter=scatter, gather=gather)


@dataclass
class Line:
    """The busiest link of collectives that run one after the other."""

    free_s: float = 0.0
    credit_s: float = float("inf")

    def carry(self, ready_s: float, transfers: Transfers) -> tuple[float, float]:
        """Return the start and the end of collectives that are ready at some time."""
        start_s = now_s = max(self.free_s, ready_s)
        self.credit_s += start_s - self.free_s
        for transfer in transfers:
            before_s = min(transfer.burst_s, self.credit_s)
            credit_s = min(transfer.burst_s, before_s + transfer.wasted_s)
            on_link_s = transfer.wasted_s + transfer.busy_s - credit_s
            took_s = max(transfer.least_s, on_link_s)
            self.credit_s = max(0.0, before_s + took_s - transfer.busy_s) if on_link_s < took_s else 0.0
            now_s += took_s
        self.free_s = now_s
        return start_s, now_s


def needed_s(bucket: BucketTimes, forward_s: float, backward_s: float) -> float:
    """Return when forward uses the weights of a bucket."""
    if bucket.needed_s is not None:
        return min(bucket.needed_s, forward_s)
    return forward_s * (1 - min(1.0, bucket.ready_s / backward_s if backward_s else 1.0))


def gather_order(buckets: Sequence[BucketTimes], forward_s: float, backward_s: float) -> list[int]:
    """Return the buckets in the order in which forward needs their weights."""
    return sorted(range(len(buckets)), key=lambda index: (needed_s(buckets[index], forward_s, backward_s), -index))


def overlapped(
    buckets: Sequence[BucketTimes], forward_s: float, backward_s: float, whole: Collection[int], update_s: float = 0.0
) -> tuple[float, Timeline]:
    """Return the time of a step in which some buckets are all-reduced as a whole.

    Args:
        buckets: All buckets, in the order in which they are ready.
        forward_s, backward_s, update_s: Computation of forward, backward and the optimizer.
        whole: The indices of the buckets that are all-reduced as a whole.

    Returns:
        The time from the start of backward to the end of the next forward, and the exchanges in it.
    """
    link, spans, end_s = Line(), [], {}
    for index, bucket in enumerate(buckets):
        what, transfers = (REDUCED, bucket.whole) if index in whole else (SCATTERED, bucket.scatter)
        start_s, end_s[str(index)] = link.carry(bucket.ready_s, transfers)
        spans.append(Span(str(index), 0, what, start_s, end_s[str(index)]))
    clock_s = max(link.free_s, backward_s) + update_s
    stepped_s, computed_s, computing = clock_s, 0.0, list[tuple[float, float]]()
    for index in gather_order(buckets, forward_s, backward_s):
        if index not in whole:
            start_s, end_s[str(index)] = link.carry(stepped_s, buckets[index].gather)
            spans.append(Span(str(index), 0, GATHERED, start_s, end_s[str(index)]))
            until_s = max(computed_s, needed_s(buckets[index], forward_s, backward_s))
            computing.append((clock_s, clock_s + until_s - computed_s))
            clock_s = max(clock_s + until_s - computed_s, end_s[str(index)])
            computed_s = until_s
    computing.append((clock_s, clock_s + forward_s - computed_s))
    return computing[-1][1], Timeline(tuple(spans), end_s, _joined(computing))


def _joined(intervals: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Join consecutive intervals without a gap."""
    joined: list[tuple[float, float]] = []
    for start_s, end_s in intervals:
        if joined and start_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], end_s)
        elif end_s > start_s:
            joined.append((start_s, end_s))
    return tuple(joined)


def best_whole(
    buckets: Sequence[BucketTimes], forward_s: float, backward_s: float, update_s: float = 0.0
) -> frozenset[int]:
    """Return the buckets to all-reduce as a whole, so that a step takes the least time.

    Whole buckets use the links while backward still computes, and leave less to gather. They should be spread evenly:
    forward needs those first that are ready last. So even spreads are tried, and the best one is improved bucket by
    bucket.
    """

    # When weights are needed is computed once, and not for each trial.
    buckets = [replace(bucket, needed_s=needed_s(bucket, forward_s, backward_s)) for bucket in buckets]

    def time_s(whole: frozenset[int]) -> float:
        return overlapped(buckets, forward_s, backward_s, whole, update_s)[0]

    count = len(buckets)
    stride = -(-count // _MOST_TRIALS)
    spreads = [frozenset(n * count // k for n in range(k)) for k in (*range(1, count, stride), count)]
    best, best_s = frozenset[int](), time_s(frozenset())
    for spread in spreads:
        if (spread_s := time_s(spread)) < _WORTH * best_s:
            best, best_s = spread, spread_s
    for index in range(0, count, stride):
        other = best ^ {index}
        if (other_s := time_s(other)) < (_WORTH if index in other else 1.0) * best_s:
            best, best_s = other, other_s
    return best


def cost(exchange: Exchange, gather: str, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
    """Return the collectives of both halves of a bucket. In full, they send as many bytes as an all-reduce."""
    scatter, gathering, _ = halves_of(exchange, gather, numel, dtype, topology)
    return Cost(tuple(phase for half in (scatter, gathering) for phase in half.cost(numel, dtype, topology).phases))


def transfer(network: Network, phase: Phase) -> Transfer:
    """Return the times of one collective."""
    busy_s, fitted = network.busy_s(phase.kind, phase.elements, phase.itemsize, phase.level), flow(network, phase)
    least_s = fitted.serial_s + fitted.spread_s
    if not busy_s:
        return Transfer(least_s)
    name = max(busy_s, key=lambda name: busy_s[name])
    link = network.link(name)
    assert link is not None  # noqa: S101 - it is busy
    loaded_s, burst_s = fitted.load_bytes[name] / link.bytes_per_s, link.burst_bytes / link.bytes_per_s
    return Transfer(least_s, busy_s[name], fitted.serial_s + loaded_s - busy_s[name], burst_s)


def reductions(
    network: Network,
    topology: Topology,
    contents: Sequence[tuple[int, torch.dtype]],
    ready_s: Sequence[float],
    exchange: Exchange | None = None,
    gather: str = "fp32",
) -> Iterator[BucketTimes]:
    """Yield the times of buckets with these elements and types, whose gradients are sent to the owners of shards as
    `exchange` does it, by default `Dense()`, and whose weights are gathered in the format `gather`."""
    for (numel, dtype), at_s in zip(contents, ready_s, strict=True):
        scatter, gathering, _ = halves_of(exchange or Dense(), gather, numel, dtype, topology)
        parts = (half.cost(numel, dtype, topology).phases for half in (exchange or Dense(), scatter, gathering))
        whole, first, second = (tuple(transfer(network, phase) for phase in phases) for phases in parts)
        yield BucketTimes(at_s, whole, first, second)
