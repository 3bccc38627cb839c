"""The membership of a replica, through the lighthouse of torchft.

torchft's own Manager is not used. It listens on all interfaces, sends the state of a replica with pickle, commits each
replica by itself, and raises a failed quorum again in every later one (docs/adr/0030-hosts-that-come-and-go.md).
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
from torch._C._distributed_c10d import TCPStore

from syncline.elastic.standing import Member, Standing
from syncline.errors import UsageError, first_line

_HEARTBEAT_S = 0.5
_ANSWER_S = 2.0  # time in which the lighthouse must answer a heartbeat
_ASK_S = 20.0
"""Time after which a quorum is asked for again. A request over a link that was cut may otherwise wait for minutes."""
_RETRY_S = 0.5
_CONNECT_S = 5.0

Quorum = tuple[Member, ...]


class Manager:
    """Make this process a replica that can leave and join a training at any time.

    Each process is one replica, with a complete copy of the model. Pass the manager to `syncline.attach`. It sends
    heartbeats to the lighthouse until `shutdown`, or until the process ends.

    Args:
        lighthouse: The address of torchft's lighthouse, as `http://HOST:PORT`.
        name: The name of this replica in messages and statistics. Default: the name of the host, with the number of
            the process.
        interface: The address or the name of the network interface on which this process listens for other replicas.
            Default: the one from which it reaches the lighthouse.

    Raises:
        UsageError: An argument is invalid, torchft is not installed, or the lighthouse does not answer.

    Example:
        >>> manager = syncline.elastic.Manager("http://10.0.0.1:29510", name="host-3")
        >>> handle = syncline.attach(net, syncline.Dense(), optimizer=optimizer, every=20, manager=manager)
    """

    def __init__(self, lighthouse: str, *, name: str | None = None, interface: str | None = None) -> None:
        host, port = _checked_lighthouse(lighthouse)
        self.lighthouse = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self.name = f"{socket.gethostname()}-{threading.get_native_id()}" if name is None else name
        if not isinstance(self.name, str) or not self.name.isprintable() or not 0 < len(self.name) <= 100:
            raise UsageError(f"name is {name!r}: pass a text of 1 to 100 printable characters")
        self.replica = f"{self.name}:{secrets.token_hex(8)}"
        self.address = _own_address(host, port) if interface is None else _address_of(interface)
        """The address on which this process listens."""
        self.is_used = False
        """Whether a model uses this manager."""
        self._client: Any = self._connect()
        self._store = _store_on(self.address)
        self.store = f"{self.address}/{self._store.port}"
        self.is_shut_down = False
        self._stopping = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="syncline-lighthouse", daemon=True)
        self._beats.start()

    def _connect(self) -> Any:
        """Return a client of the lighthouse that has answered."""
        try:
            from torchft.coordination import LighthouseClient
        except ImportError as error:
            text = f"a Manager needs torchft, which cannot be imported ({first_line(error)})"
            raise UsageError(f"{text}: pip install 'syncline[elastic]'") from error
        try:
            client = LighthouseClient(self.lighthouse, timedelta(seconds=_CONNECT_S))
            client.heartbeat(self.replica, timedelta(seconds=_ANSWER_S))
        except Exception as error:  # torchft raises errors of several types
            text = f"the lighthouse at {self.lighthouse} does not answer ({first_line(error)})"
            raise UsageError(f"{text}: start it with torchft_lighthouse, or pass its address") from error
        return client

    def _beat(self) -> None:
        client = None
        while not self._stopping.wait(_HEARTBEAT_S):
            try:
                client = client or self._connect()
                client.heartbeat(self.replica, timedelta(seconds=_ANSWER_S))
            except Exception:  # noqa: BLE001 - the lighthouse leaves this replica out until it hears from it again
                client = None

    def ask(self, standing: Standing) -> Future[Quorum]:
        """Ask for a quorum, and return a future of its members. It waits for as long as the lighthouse takes."""
        future: Future[Quorum] = Future()
        threading.Thread(target=self._ask, args=(standing, future), name="syncline-quorum", daemon=True).start()
        return future

    def _ask(self, standing: Standing, future: Future[Quorum]) -> None:
        data = msgspec.to_builtins(standing)
        step = standing.committed[1] if standing.committed else 0  # only for the lighthouse's own page
        while not self._stopping.is_set() and not future.cancelled():
            begun_s = time.monotonic()
            try:
                self._client = self._client or self._connect()
                options = {"store_address": self.store, "step": step, "data": data}
                quorum = self._client.quorum(self.replica, timedelta(seconds=_ASK_S), **options)
                members = tuple(filter(None, map(_member_of, quorum.participants)))
                # The lighthouse may still have had an older request of this replica.
                if any(member.replica == self.replica and member.standing == standing for member in members):
                    future.set_result(members)
                    return
            except Exception:  # noqa: BLE001 - asked again until it answers: training goes on meanwhile
                self._client = None
                if time.monotonic() - begun_s < _RETRY_S:
                    self._stopping.wait(_RETRY_S)
        future.cancel()

    def shutdown(self) -> None:
        """Leave the training. The other replicas continue without this one when its heartbeats have stopped."""
        self.is_shut_down = True
        self._stopping.set()


def _member_of(participant: Any) -> Member | None:
    """Return a member of a quorum, or None if it is another program that uses the same lighthouse."""
    try:
        standing = msgspec.convert(participant.data, Standing)
        return Member(participant.replica_id, participant.store_address, standing)
    except msgspec.ValidationError:
        return None


def _checked_lighthouse(address: object) -> tuple[str, int]:
    remedy = "pass the address of torchft's lighthouse, as http://HOST:PORT"
    try:
        parts = urlsplit(address if isinstance(address, str) else "")
        if parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/"):
            return parts.hostname, parts.port
    except ValueError:  # a port that is not a number
        pass
    raise UsageError(f"lighthouse is {address!r}: {remedy}")


def _own_address(host: str, port: int) -> str:
    """Return the address from which this host sends to another one. Nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as unused:
            unused.connect(address)
            return str(unused.getsockname()[0])
    except OSError as error:
        raise UsageError(f"there is no route to the lighthouse at {host}: {error.strerror or error}") from error


def _address_of(interface: object) -> str:
    """Return the address of an interface, which is given by an address or by its name."""
    by_name = {
        name: [a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
    }
    for name, addresses in by_name.items():
        if interface in (name, *addresses) and addresses:
            return addresses[0] if interface == name else str(interface)
    known = ", ".join(sorted(by_name))
    raise UsageError(f"interface is {interface!r}, which this host does not have: pass one of {known}, or its address")


def _store_on(address: str) -> TCPStore:
    """Start a store that listens on one address only. torch's own would listen on all of them."""
    family = socket.AF_INET6 if ipaddress.ip_address(address.partition("%")[0]).version == 6 else socket.AF_INET
    listening = socket.socket(family)
    try:
        listening.bind((address, 0))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UsageError(f"this process cannot listen on {address}: {error.strerror or error}") from error
    port = listening.getsockname()[1]
    return TCPStore(
        address, port, None, True, timedelta(seconds=_CONNECT_S), False, master_listen_fd=listening.detach()
    )
