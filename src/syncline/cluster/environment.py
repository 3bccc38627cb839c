"""Environment variables and ports with which torch.distributed, torchrun, NCCL and gloo connect emulated hosts."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - for getaddrinfo, which a process that changed its user could not import
import re
import socket
import time
from collections.abc import Iterator

from syncline.cluster import links
from syncline.cluster.spec import ClusterSpec

LOOPBACK = "127.0.0.1"
MASTER_PORT = 29500  # always free in the cluster's own network namespaces
OUTER_JOB = re.compile(
    r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|PET_(RDZV_\w+|STANDALONE)|TORCHELASTIC_\w+|TORCH_ELASTIC_WORKER_IDENTICAL"
)
"""Variables of a job that started the caller. Commands must not inherit them, or they would join that job."""


def variables_of(
    spec: ClusterSpec, host: int, local_rank: int | None, *, shaped: bool, port: int = MASTER_PORT
) -> dict[str, str]:
    """Return the variables of a rank or, if `local_rank` is None, of a command that starts ranks, such as torchrun."""
    master, address, interface = LOOPBACK, LOOPBACK, "lo"
    if shaped:
        master, address, interface = links.host_address(0), links.host_address(host), links.HOST_INTERFACE
    variables = {"MASTER_ADDR": master, "MASTER_PORT": str(port)}
    if local_rank is None:
        nccl_host = f"host{host}"
        numbers = {"NNODES": str(spec.hosts), "NODE_RANK": str(host), "NPROC_PER_NODE": str(spec.per_host[host])}
        # The defaults of torchrun's options. The address is for a rendezvous that the user chooses.
        options = {f"PET_{name}": value for name, value in (variables | numbers).items()}
        variables |= numbers | options | {"PET_LOCAL_ADDR": address}
    else:
        rank = spec.ranks_of(host)[local_rank]
        nccl_host = f"rank{rank}"  # lets ranks that share a GPU form a communicator
        variables |= {"RANK": str(rank), "WORLD_SIZE": str(spec.world_size)}
        variables |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(spec.per_host[host])}
    variables |= {f"{library}_SOCKET_IFNAME": interface for library in ("GLOO", "NCCL", "TP")}
    variables |= {"SYNCLINE_HOST": str(host), "SYNCLINE_HOST_ADDR": address}
    if spec.device == "cuda":  # InfiniBand would bypass the emulated links
        variables |= {"NCCL_HOSTID": f"syncline-{nccl_host}", "NCCL_NET": "Socket"}
    return variables


@contextlib.contextmanager
def reserved_port(shaped: bool = False) -> Iterator[int]:
    """Reserve a port on the loopback interface: the kernel does not assign it to other sockets in this context.

    A bound socket with SO_REUSEADDR, which does not listen, holds the port. A server that names the port can still
    bind to it and listen. With `shaped`, the namespaces of the cluster have their own ports, and none is reserved.
    """
    if shaped:
        yield MASTER_PORT
        return
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
