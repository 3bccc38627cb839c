"""Methods for models that are sharded with `fully_shard` (FSDP2): among all ranks, or inside hosts with replicas.

A model is sharded in its blocks, and the rest as one unit. The bytes of methods with replicas are those between
replicas, which cross the links between hosts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from syncline.cluster import ClusterSpec
from syncline.ddp.attach import attach
from syncline.ddp.handle import Handle
from syncline.errors import UsageError
from syncline.exchange import Exchange, Topology, for_updates, wire
from syncline.exchange.scatter import Scatter
from syncline.exchange.wire import sent_bytes
from syncline.fsdp.profile import profile_sharded
from syncline.layerwise.activations import find_blocks
from syncline.measure.beside import measure_beside
from syncline.measure.overhead import measure_overheads
from syncline.measure.probe import probe
from syncline.predict.sharded import SHARDED
from syncline.records.network import Network
from syncline.records.profile import Profile


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
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(device, per_host if replicas else dist.get_world_size())
    among = mesh if native and replicas else mesh["shard"]
    for block in find_blocks(net).values():
        fully_shard(block, mesh=among)
    return fully_shard(net, mesh=among), mesh["replicate"] if replicas else None


def _mesh(device: torch.device, shards: int) -> Any:
    """Return the mesh of all ranks, each replica of which has this many shards."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (dist.get_world_size() // shards, shards)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


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


def probe_for_shards(device: torch.device, per_host: int, budget_s: float) -> Network:
    """Collective: probe the links. On CUDA, also the reduce-scatters of FSDP, and collectives inside hosts and between
    them at the same time."""
    if device.type != "cuda":
        return probe(budget_s=budget_s)
    network = probe(budget_s=budget_s, kinds=(*wire.KINDS, wire.REDUCE_SCATTER))
    hosts = dist.get_world_size() // per_host
    if hosts == 1 or per_host == 1:
        return network
    mesh = _mesh(device, per_host)
    beside = measure_beside(mesh["shard"].get_group(), mesh["replicate"].get_group(), device)
    return msgspec.structs.replace(network, beside=beside)


def profile_shards(
    net: nn.Module,
    loss_of: Callable[[], torch.Tensor],
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    name: str,
    device: torch.device,
    per_host: int,
    methods: Sequence[str],
) -> Profile:
    """Collective: profile a model sharded among one rank, and the own work of these methods' exchanges."""
    model, _ = shard_model(net, device, 1, native=False, replicas=True)
    optimizer = optimizer_of(model.parameters())
    profile = profile_sharded(model, lambda _: loss_of(), steps=8, warmup=3, optimizer=optimizer, model_name=name)
    ranks, backend = dist.get_world_size(), "nccl" if device.type == "cuda" else "gloo"
    found = []
    for replicas, among in ((True, ranks // per_host), (False, ranks)):
        exchanges = {
            method: functools.partial(_exchange_of, method)
            for method in methods
            if SHARDED[method].replicas == replicas and (SHARDED[method].exchange or SHARDED[method].updates)
        }
        topology = Topology.flat(among, backend)
        found.append(measure_overheads(device, exchanges, topology=topology, group=dist.group.WORLD))
    work = found[0].work | found[1].work
    return msgspec.structs.replace(profile, overheads=msgspec.structs.replace(found[0], work=work))


def _exchange_of(name: str) -> Exchange:
    method = SHARDED[name]
    if method.updates is not None:
        return for_updates(method.updates.exchange, method.updates.every)
    assert method.exchange is not None  # noqa: S101 - the caller has checked
    return method.exchange if method.replicas else Scatter(method.exchange)
