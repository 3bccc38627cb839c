"""Ranks that outlive another wait for each other here, before they end."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from syncline.cluster import Rank


def wait_for(rank: Rank, *ranks: int) -> None:
    """Until all of these have come here. The store is in rank 0's process, which stays until all have seen it."""
    store, limit = dist.distributed_c10d._get_default_store(), timedelta(seconds=30)
    store.set(f"{rank.rank} is through", "")
    store.wait([f"{other} is through" for other in ranks], limit)
    store.set(f"{rank.rank} has seen it", "")
    if rank.rank == 0:
        store.wait([f"{other} has seen it" for other in ranks], limit)
