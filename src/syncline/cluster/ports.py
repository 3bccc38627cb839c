"""Free ports, and waiting for a server."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - for getaddrinfo, which a process that changed its user could not import
import socket
import time
from collections.abc import Iterator

from syncline.cluster.environment import LOOPBACK

_POLL_S = 0.005


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
            if time.monotonic() + _POLL_S > end:
                raise
            time.sleep(_POLL_S)
