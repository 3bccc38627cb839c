"""Reserve a free port for processes that cannot inherit a socket."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from syncline.cluster.environment import LOOPBACK


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
