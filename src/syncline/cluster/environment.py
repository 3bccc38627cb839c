"""The variables by which torch.distributed, torchrun, NCCL and gloo find each other on emulated hosts."""

from __future__ import annotations

from syncline.cluster.spec import ClusterSpec

LOOPBACK = "127.0.0.1"
MASTER_PORT = 29500
"""Inside the cluster's own namespaces no port can be taken."""


def host_variables(spec: ClusterSpec, host: int, *, shaped: bool, port: int = MASTER_PORT) -> dict[str, str]:
    """What every process of a host needs to find the other hosts, over the host's own link and no other."""
    if shaped:
        from syncline.cluster import links

        first_host = next(h for h in range(spec.hosts) if 0 in spec.ranks_of(h))
        master, address, interface = links.host_address(first_host), links.host_address(host), links.HOST_INTERFACE
    else:
        master, address, interface = LOOPBACK, LOOPBACK, "lo"
    variables = {
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "SYNCLINE_HOST": str(host),
        "SYNCLINE_HOST_ADDR": address,
    }
    if spec.device == "cuda":
        variables["NCCL_HOSTID"] = f"syncline-host{host}"
        variables["NCCL_NET"] = "Socket"  # InfiniBand would pass our links by
    return variables


def rank_variables(spec: ClusterSpec, host: int, local_rank: int) -> dict[str, str]:
    """What one rank needs on top: who it is."""
    rank = spec.ranks_of(host)[local_rank]
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(spec.per_host[host]),
    }
    if spec.device == "cuda":
        variables["NCCL_HOSTID"] = f"syncline-rank{rank}"  # lets ranks that share a GPU form a communicator
    return variables


def torchrun_variables(spec: ClusterSpec, host: int, *, shaped: bool, port: int = MASTER_PORT) -> dict[str, str]:
    """What makes a plain `torchrun train.py` join the others: each PET_ variable is the default of its option."""
    there = host_variables(spec, host, shaped=shaped, port=port)
    number = {"NNODES": str(spec.hosts), "NODE_RANK": str(host), "NPROC_PER_NODE": str(spec.per_host[host])}
    return {
        **number,
        **{f"PET_{name}": value for name, value in number.items()},
        "PET_MASTER_ADDR": there["MASTER_ADDR"],
        "PET_MASTER_PORT": there["MASTER_PORT"],
        "PET_LOCAL_ADDR": there["SYNCLINE_HOST_ADDR"],  # for a rendezvous of the user's own choice
    }


OUTER_JOB = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "PET_RDZV_BACKEND",
    "PET_RDZV_CONF",
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_ID",
    "PET_STANDALONE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_ELASTIC_WORKER_IDENTICAL",
)
"""Left by another job in the caller's environment, each of these would send a command to the wrong place."""
