"""Remember probed networks between runs, in a file per cluster under `$XDG_CACHE_HOME/syncline/networks`.

Rank 0 reads and writes the file, and the other ranks get its contents. Emulated hosts are never remembered, because
clusters with different rates look alike. A file that is damaged, old or incomplete is ignored.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import torch
import torch.distributed as dist

from syncline.dist.comm import backend_of, gather_bytes, group_device
from syncline.errors import SynclineError
from syncline.measure.topology import host_identity
from syncline.records.network import Network

MAX_AGE = datetime.timedelta(days=7)
_VIRTUAL = ("lo", "veth", "docker", "br-", "virbr", "cali", "cni", "flannel")
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_P2P_DISABLE")


def cache_folder() -> Path:
    """Return the folder of remembered networks."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "syncline" / "networks"


def cached_path(group: dist.ProcessGroup) -> Path | None:
    """Return where the network of these ranks is remembered; None if it cannot be. Collective."""
    identities = [data.decode().partition("\n") for data in gather_bytes(group, _identity().encode())]
    hosts = {host for host, _, _ in identities}
    boots = {host.split()[0] for host in hosts}
    if len(boots) < len(hosts):  # several hosts on one machine are emulated, or containers with arbitrary limits
        return None
    cluster = {"ranks": [interfaces for *_, interfaces in identities], "backend": backend_of(group)}
    key = json.dumps({**cluster, "device": group_device(group).type}, sort_keys=True)
    try:
        return cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    except RuntimeError:  # there is no home folder
        return None


def recall(group: dist.ProcessGroup, path: Path | None, kinds: Sequence[str]) -> Network | None:
    """Return the remembered network, if rank 0 has one with these collectives. Collective."""
    data = b""
    if group.rank() == 0 and path is not None:
        with contextlib.suppress(SynclineError, OSError):
            network = Network.load(path)
            if _is_recent(network.date) and set(kinds) <= kinds_of(network):
                data = msgspec.json.encode(network)
    data = gather_bytes(group, data)[0]
    return msgspec.json.decode(data, type=Network) if data else None


def remember(group: dist.ProcessGroup, path: Path | None, network: Network) -> None:
    """Write the network on rank 0, unless the file has more collectives. Nothing happens if that is not possible."""
    if group.rank() == 0 and path is not None:
        with contextlib.suppress(SynclineError, OSError):
            known = Network.load(path)
            if _is_recent(known.date) and kinds_of(network) < kinds_of(known):
                return
        with contextlib.suppress(SynclineError, OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            network.save(path)  # replaces the file at once, or not at all


def kinds_of(network: Network) -> set[str]:
    """Return the kinds of collectives that were measured."""
    return {entry.kind for entry in network.collectives}


def _is_recent(date: str) -> bool:
    try:
        age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(date)
    except (ValueError, TypeError):
        return False
    return datetime.timedelta(0) <= age <= MAX_AGE


def _identity() -> str:
    """Return the host of this rank, and in a second line the properties of the host that a network depends on."""
    stats = psutil.net_if_stats()
    interfaces = sorted(
        [name, stat.speed, stat.mtu] for name, stat in stats.items() if stat.isup and not name.startswith(_VIRTUAL)
    )
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    nccl = list(torch.cuda.nccl.version()) if dist.is_nccl_available() else None
    properties = [socket.gethostname(), interfaces, variables, torch.__version__, nccl]
    return f"{host_identity()}\n{json.dumps(properties, sort_keys=True)}"
