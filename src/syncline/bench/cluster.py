"""Describe the cluster of a measurement, for result files."""

from __future__ import annotations

from syncline.cluster import ClusterSpec
from syncline.records.bench_result import Cluster


def cluster_of(spec: ClusterSpec, emulated: bool) -> Cluster:
    burst_bytes = None
    if emulated:
        from syncline.cluster import links  # needs pyroute2

        burst_bytes = links.burst_bytes(spec.rate_bps)
    same = len(set(spec.per_host)) == 1
    return Cluster(
        hosts=spec.hosts,
        per_host=spec.per_host[0] if same else list(spec.per_host),
        rate_bps=spec.rate_bps,
        device=spec.device,
        emulated=emulated,
        racks=spec.racks,
        trunk_rate_bps=spec.trunk_rate_bps,
        rank_order=spec.rank_order,
        burst_bytes=burst_bytes,
    )
