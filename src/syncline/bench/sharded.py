"""Methods for models that are sharded with `fully_shard` (FSDP2): among all ranks, or inside hosts with replicas.

A model is sharded in its blocks, and the rest as one unit. The bytes of methods with replicas are those between
replicas, which cross the links between hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from syncline.cluster import ClusterSpec
from syncline.ddp.attach import attach
from syncline.ddp.handle import Handle
from syncline.errors import UsageError
from syncline.exchange import Exchange
from syncline.exchange.wire import sent_bytes
from syncline.layerwise.activations import find_blocks

SHARDED = ("fsdp", "fsdp+int4", "hsdp", "hsdp+dense", "hsdp+int4", "hsdp+local-15")


def check_sharded(methods: Sequence[str], spec: ClusterSpec, replayed: bool) -> None:
    """Raise a UsageError if a method for sharded models cannot run on this cluster, or with this workload."""
    chosen = next((method for method in methods if method in SHARDED), None)
    if chosen is None:
        return
    for problem, is_there in {
        f"{chosen} shards a real model, which a replayed profile is not: use --model": replayed,
        f"{chosen} needs at least two ranks: add hosts, or ranks per host": spec.world_size == 1,
        f"{chosen} needs the same number of ranks on each host": len(set(spec.per_host)) > 1,
        f"{chosen} needs ranks that are numbered host by host: use --rank-order host": spec.rank_order != "host",
    }.items():
        if is_there:
            raise UsageError(problem)


def shard_model(
    net: nn.Module, device: torch.device, per_host: int, *, native: bool, replicas: bool
) -> tuple[Any, Any]:
    """Shard a model in place, and return it with the mesh between its replicas, or None without `replicas`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    shape = (ranks // per_host, per_host) if replicas else (1, ranks)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    among = mesh if native and replicas else mesh["shard"]
    for block in find_blocks(net).values():
        fully_shard(block, mesh=among)
    return fully_shard(net, mesh=among), mesh["replicate"] if replicas else None


def attached(
    net: nn.Module, device: torch.device, per_host: int, exchange: Exchange, *, replicas: bool, **options: Any
) -> Handle:
    """Shard a model, and attach an exchange to it."""
    model, between = shard_model(net, device, per_host, native=False, replicas=replicas)
    return attach(model, exchange, replicate=between, **options)


def native_bytes(net: nn.Module, per_host: int, backend: str, *, replicas: bool, gradients: bool = True) -> int:
    """Return the bytes per step that the busiest rank sends with PyTorch's own FSDP, or between replicas with HSDP.

    Without `gradients`, they are those of gathering parameters. Blocks are gathered before forward and again before
    backward, and the rest once. gloo reduces by an all-reduce.
    """
    ranks = dist.get_world_size()
    blocks = {id(p) for block in find_blocks(net).values() for p in block.parameters()}
    shards, total = per_host if replicas else ranks, 0
    for parameter in net.parameters():
        rows = parameter.shape[0] if parameter.dim() else 1
        padded = -(-rows // shards) * shards * (parameter.numel() // max(1, rows))
        if replicas:
            total += sent_bytes("all_reduce", padded // shards, parameter.element_size(), ranks // shards, backend)
            continue
        gathers = 2 if id(parameter) in blocks else 1
        gathered = sent_bytes("all_gather", padded, parameter.element_size(), ranks, backend)
        total += gathered * (gathers + (0 if not gradients else 2 if backend == "gloo" else 1))
    return total
