"""Network interfaces, and which of them gloo and NCCL would use.

Jobs over several hosts fail most often here: if a host's own /etc/hosts maps its name to 127.0.0.1, gloo listens where
no other host can reach it, and NCCL may choose a container's bridge. Each follows rules of its own, which are repeated
here; `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` override them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import msgspec
import psutil

from syncline.dist.deadline import TooLateError, within

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_RESOLVE_S = 2.0
_FAMILIES = {socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}
_LAST_RESORTS = ("docker", "lo", "virbr")
"""Prefixes of interfaces that NCCL uses only if there is nothing else, in its order."""


class Interface(msgspec.Struct, frozen=True):
    name: str
    up: bool
    addresses: tuple[str, ...]
    families: tuple[str, ...]
    speed_bps: int | None  # None if the driver does not report it, as with most virtual interfaces


class Choice(msgspec.Struct, frozen=True):
    """Interfaces that a backend would use."""

    names: tuple[str, ...]
    why: str
    problem: str = ""  # why it cannot work at all


def interfaces() -> tuple[Interface, ...]:
    """Return the interfaces that have an address, in the kernel's order."""
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        if usable := [entry for entry in entries if entry.family in _FAMILIES]:
            stat = stats.get(name)
            addresses = tuple(entry.address.partition("%")[0] for entry in usable)
            families = tuple(dict.fromkeys(_FAMILIES[entry.family] for entry in usable))
            speed_bps = stat.speed * 10**6 if stat is not None and 0 < stat.speed < 10**7 else None
            found.append(Interface(name, stat is not None and stat.isup, addresses, families, speed_bps))
    return tuple(found)


def is_loopback(interface: Interface) -> bool:
    return any(address.startswith("127.") or address == "::1" for address in interface.addresses)


def outward(found: Sequence[Interface]) -> Interface | None:
    """Return the interface by which other hosts most likely reach this one."""
    able = [one for one in found if one.up and not is_loopback(one) and not one.name.startswith(_LAST_RESORTS)]
    return max(able, key=lambda one: one.speed_bps or 0, default=None)


def gloo_choice(found: Sequence[Interface], environment: Mapping[str, str] = os.environ) -> Choice:
    """Return the interfaces that the variable names, or the one of this host's name, or the loopback interface."""
    if named := environment.get(GLOO):
        names = tuple(filter(None, named.split(",")))
        missing = [name for name in names if name not in {one.name for one in found if one.up}]
        problem = f"{GLOO}={named}: no interface {missing[0]} is up and has an address" if missing else ""
        return Choice(names, f"{GLOO}={named}", problem)
    host = socket.gethostname()
    try:
        address = within(_RESOLVE_S, lambda: _own_address(host))
    except TooLateError:
        return Choice((), f"the name of this host, {host}", f"{host} could not be resolved in {_RESOLVE_S:g} s")
    names = tuple(one.name for one in found if address in one.addresses)
    if address is None or (not names and address.startswith("127.")):  # all of 127/8 is the loopback interface's
        names = tuple(one.name for one in found if is_loopback(one))[:1]
    return Choice(names, f"{host} does not resolve" if address is None else f"{host} resolves to {address}")


def _own_address(host: str) -> str | None:
    """Return the first address of this name that can be bound here, which is what gloo looks for."""
    try:
        candidates = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in candidates:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.bind(address)
                return str(address[0])
        except OSError:
            continue
    return None


def nccl_choice(found: Sequence[Interface], environment: Mapping[str, str] = os.environ) -> Choice:
    """Return all interfaces that match the variable; otherwise InfiniBand, then others, then bridges and loopback."""
    names = [one.name for one in found if one.up]
    if named := environment.get(NCCL):
        # Prefixes, whole names after `=`, and all others after `^`.
        rest = named.removeprefix("^")
        parts = tuple(filter(None, rest.removeprefix("=").split(",")))
        matching = [name for name in names if (name in parts if rest.startswith("=") else name.startswith(parts))]
        taken = tuple(name for name in names if (name in matching) is not named.startswith("^"))
        return Choice(taken, f"{NCCL}={named}", "" if taken else f"{NCCL}={named}: no interface that is up matches")
    infiniband = [name for name in names if name.startswith("ib")]
    others = [name for name in names if not name.startswith(_LAST_RESORTS)]
    fallbacks = [[name for name in names if name.startswith(prefix)] for prefix in _LAST_RESORTS]
    taken = tuple(next(filter(None, (infiniband, others, *fallbacks)), []))
    return Choice(taken, "its own order", "" if taken else "no interface is up")
