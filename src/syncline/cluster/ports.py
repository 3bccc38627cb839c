"""A free port for processes that cannot inherit a socket."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from syncline.cluster.environment import LOOPBACK


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port on the loopback interface that the kernel gives to nobody else inside the block.

    The socket that holds it is bound but does not listen, and allows reuse: a server that names the port can still
    bind and listen, while the kernel's own choices pass it by.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]
