"""The time of a step whose weights are gathered behind the next forward pass, and which buckets to all-reduce whole.

During backward, a lane sums the buckets in the order in which they are ready: in shards, or whole. Then the optimizer
steps, and the weights of buckets in shards are gathered in the reverse order, in which forward needs them. Forward is
assumed to use weights in the mirror image of backward: a bucket whose last gradient is ready after a share x of
backward is first needed after a share 1 − x of forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from syncline.exchange import Dense, Phase, Topology
from syncline.exchange.halves import AllGather, ReduceScatter
from syncline.predict.exchange_time import flow
from syncline.predict.timeline import Span, Timeline
from syncline.records.network import Network

_WORTH = 0.998
"""A whole bucket needs P times the memory for the optimizer's state, so it must save some of the step."""


@dataclass(frozen=True)
class BucketTimes:
    """One bucket, in seconds."""

    ready_s: float  # from the start of backward until its last gradient is ready
    whole_s: float  # its all-reduce
    scatter_s: float  # its reduce-scatter
    gather_s: float  # the all-gather of its weights


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
    link_s, spans, end_s = 0.0, [], {}
    for index, bucket in enumerate(buckets):
        what, took_s = ("all_reduce", bucket.whole_s) if index in whole else ("all_to_all", bucket.scatter_s)
        start_s = max(link_s, bucket.ready_s)
        link_s = end_s[str(index)] = start_s + took_s
        spans.append(Span(str(index), 0, what, start_s, link_s))
    clock_s = link_s = max(link_s, backward_s) + update_s
    computed_s = 0.0
    for index in reversed([index for index in range(len(buckets)) if index not in whole]):
        bucket, start_s = buckets[index], link_s
        link_s = end_s[str(index)] = start_s + bucket.gather_s
        spans.append(Span(str(index), 0, "all_gather", start_s, link_s))
        needed_s = forward_s * (1 - min(1.0, bucket.ready_s / backward_s if backward_s else 1.0))
        clock_s = max(clock_s + max(0.0, needed_s - computed_s), link_s)
        computed_s = max(computed_s, needed_s)
    return clock_s + forward_s - computed_s, Timeline(tuple(spans), end_s)


def best_whole(
    buckets: Sequence[BucketTimes], forward_s: float, backward_s: float, update_s: float = 0.0
) -> frozenset[int]:
    """Return the buckets to all-reduce as a whole, so that a step takes the least time.

    Whole buckets use the links while backward still computes, and leave less to gather. They should be spread evenly:
    forward needs those first that are ready last. So even spreads are tried, and the best one is improved bucket by
    bucket.
    """

    def time_s(whole: frozenset[int]) -> float:
        return overlapped(buckets, forward_s, backward_s, whole, update_s)[0]

    count = len(buckets)
    spreads = [frozenset(n * count // k for n in range(k)) for k in range(1, count + 1)]
    best, best_s = frozenset[int](), time_s(frozenset())
    for spread in spreads:
        if (spread_s := time_s(spread)) < _WORTH * best_s:
            best, best_s = spread, spread_s
    for index in range(count):
        other = best ^ {index}
        if (other_s := time_s(other)) < (_WORTH if index in other else 1.0) * best_s:
            best, best_s = other, other_s
    return best


def reductions(
    network: Network, topology: Topology, contents: Sequence[tuple[int, torch.dtype]], ready_s: Sequence[float]
) -> Iterator[BucketTimes]:
    """Yield the times of buckets with these elements and types, over links that are never idle."""
    rates = {link.name: link.bytes_per_s for link in network.links}

    def busy_s(phases: Sequence[Phase]) -> float:
        flows = [flow(network, phase) for phase in phases]
        loads = [max((nbytes / rates[link] for link, nbytes in f.load_bytes.items()), default=0.0) for f in flows]
        return sum(f.serial_s + max(f.spread_s, load_s) for f, load_s in zip(flows, loads, strict=True))

    for (numel, dtype), at_s in zip(contents, ready_s, strict=True):
        costs = (exchange.cost(numel, dtype, topology) for exchange in (Dense(), ReduceScatter(), AllGather()))
        yield BucketTimes(at_s, *(busy_s(cost.phases) for cost in costs))
