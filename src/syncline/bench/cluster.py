"""The emulated cluster of a measurement: its description for result files, and its links."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import msgspec

from syncline.cluster import ClusterSpec, Rank, launch, why_not_shaped
from syncline.measure.probe import probe
from syncline.records.bench_result import Cluster
from syncline.records.network import Network

OnProgress = Callable[[int, int], None]
"""Called with the part that is done, and the whole."""


def cluster_of(spec: ClusterSpec, emulated: bool) -> Cluster:
    burst_bytes = None
    if emulated:
        from syncline.cluster import links  # needs pyroute2

        burst_bytes = links.burst_bytes(spec.rate_bps)
    same = len(set(spec.per_host)) == 1
    fields = dataclasses.asdict(spec) | {"per_host": spec.per_host[0] if same else list(spec.per_host)}
    return Cluster(**fields, emulated=emulated, burst_bytes=burst_bytes)


def network_of(answer: object, spec: ClusterSpec, emulated: bool) -> Network:
    """Return the network that a rank probed, with the nominal rates of emulated links."""
    network = msgspec.convert(answer, Network)
    return network.with_nominal_rates(spec.rate_bps, spec.trunk_rate_bps) if emulated else network


def report_progress(rank: Rank, done: float, of: float) -> None:
    """Report progress from rank 0 to the launching process."""
    if rank.rank == 0:
        rank.say([round(done), round(of)])


def reported_to(on_progress: OnProgress | None) -> Callable[[int, Any], None]:
    """Return the event handler for `launch` that passes on the calls of `report_progress`."""
    return lambda _rank, event: None if on_progress is None else on_progress(*event)


def probe_emulated(spec: ClusterSpec, budget_s: float, on_progress: OnProgress | None = None) -> Network:
    """Probe the links of an emulated cluster; the result has their nominal rates too."""

    def main(rank: Rank) -> object:
        rank.init_process_group(timeout_s=max(60.0, 4 * budget_s))
        report = functools.partial(report_progress, rank) if rank.rank == 0 else None
        return msgspec.to_builtins(probe(budget_s=budget_s, on_progress=report))

    answers = launch(spec, main, deadline_s=120 + 6 * budget_s, on_event=reported_to(on_progress))
    return network_of(answers[0], spec, why_not_shaped() is None)
