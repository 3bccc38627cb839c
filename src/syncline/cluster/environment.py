"""Environment variables and ports with which torch.distributed, torchrun, NCCL and gloo connect emulated hosts."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - for getaddrinfo, which a process that changed its user could not import
import socket
import time
from collections.abc import Iterator

from syncline.cluster.spec import ClusterSpec

LOOPBACK = "127.0.0.1"
MASTER_PORT = 29500
"""Always free in the cluster's own network namespaces."""


def host_variables(spec: ClusterSpec, host: int, *, shaped: bool, port: int = MASTER_PORT) -> dict[str, str]:
    """Return the variables for all processes of a host: addresses, and the interface of the host's link."""
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
        variables["NCCL_NET"] = "Socket"  # InfiniBand would bypass the emulated links
    return variables


def rank_variables(spec: ClusterSpec, host: int, local_rank: int) -> dict[str, str]:
    """Return the additional variables of one rank: its numbers."""
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
    """Return the variables of a host for a plain `torchrun train.py`: PET_ variables are the defaults of options."""
    common = host_variables(spec, host, shaped=shaped, port=port)
    numbers = {"NNODES": str(spec.hosts), "NODE_RANK": str(host), "NPROC_PER_NODE": str(spec.per_host[host])}
    return {
        **common,
        **numbers,
        **{f"PET_{name}": value for name, value in numbers.items()},
        "PET_MASTER_ADDR": common["MASTER_ADDR"],
        "PET_MASTER_PORT": common["MASTER_PORT"],
        "PET_LOCAL_ADDR": common["SYNCLINE_HOST_ADDR"],  # for a rendezvous that the user chooses
    }


OUTER_JOB = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("PET_RDZV_BACKEND", "PET_RDZV_CONF", "PET_RDZV_ENDPOINT", "PET_RDZV_ID", "PET_STANDALONE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    "TORCH_ELASTIC_WORKER_IDENTICAL",
)
"""Variables of a job that started the caller. Commands must not inherit them, or they would join that job."""


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port on the loopback interface: the kernel does not assign it to other sockets in this context.

    A bound socket with SO_REUSEADDR, which does not listen, holds the port. A server that names the port can still
    bind to it and listen.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]


def wait_for_listener(address: str, port: int, timeout_s: float) -> None:
    """Wait until the port accepts connections; raise `OSError` after the timeout.

    torch's TCPStore would retry only after most of a second, and its errors are pages of C++.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() + 0.005 > end:
                raise
            time.sleep(0.005)
