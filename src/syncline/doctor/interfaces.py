"""Network interfaces, and which of them gloo and NCCL would take.

A job over several hosts fails most often here: a host's name that stands for 127.0.0.1 in its own /etc/hosts makes gloo
listen where no other host can reach it, and NCCL takes a container's bridge. Both choose by rules of their own, which
are followed here; `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` overrule them.
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
"""Beginnings of names that NCCL takes only where there is nothing else, in its order."""


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    up: bool
    addresses: tuple[str, ...]
    families: tuple[str, ...]
    speed_bps: int | None
    """As its driver says; None where it does not, as of most virtual ones."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend would take."""

    names: tuple[str, ...]
    why: str
    problem: str = ""
    """What keeps it from working at all."""


def interfaces() -> tuple[Interface, ...]:
    """Those that have an address, in the kernel's order."""
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        reachable = [entry for entry in entries if entry.family in _FAMILIES]
        if reachable:
            about = stats.get(name)
            speed = about.speed * 10**6 if about is not None and 0 < about.speed < 10**7 else None
            found.append(
                Interface(
                    name=name,
                    up=about is not None and about.isup,
                    addresses=tuple(entry.address.partition("%")[0] for entry in reachable),
                    families=tuple(dict.fromkeys(_FAMILIES[entry.family] for entry in reachable)),
                    speed_bps=speed,
                )
            )
    return tuple(found)


def is_loopback(interface: Interface) -> bool:
    return any(address.startswith("127.") or address == "::1" for address in interface.addresses)


def outward(found: Sequence[Interface]) -> Interface | None:
    """The one by which other hosts most likely reach this one."""
    able = [one for one in found if one.up and not is_loopback(one) and not one.name.startswith(_LAST_RESORTS)]
    return max(able, key=lambda one: one.speed_bps or 0, default=None)


def gloo_choice(found: Sequence[Interface], environment: Mapping[str, str] = os.environ) -> Choice:
    """The interfaces that are named, or the one that this host's own name leads to, or the loopback interface."""
    if named := environment.get(GLOO):
        names = tuple(name for name in named.split(",") if name)
        known = {one.name for one in found if one.up}
        missing = [name for name in names if name not in known]
        problem = f"{GLOO}={named}: no interface {missing[0]} is up and has an address" if missing else ""
        return Choice(names=names, why=f"{GLOO}={named}", problem=problem)
    host = socket.gethostname()
    try:
        address = within(_RESOLVE_S, lambda: _own_address(host))
    except TooLateError:
        return Choice(
            names=(), why=f"the name of this host, {host}", problem=f"{host} is not resolved in {_RESOLVE_S:g} s"
        )
    if address is None:
        return Choice(names=tuple(one.name for one in found if is_loopback(one))[:1], why=f"{host} does not resolve")
    names = tuple(one.name for one in found if address in one.addresses)
    if not names and address.startswith("127."):  # all of 127/8 is the loopback interface's
        names = tuple(one.name for one in found if is_loopback(one))[:1]
    return Choice(names=names, why=f"{host} resolves to {address}")


def _own_address(host: str) -> str | None:
    """The first address of this name that can be bound here, as gloo looks for it."""
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
    """All that match what is named; otherwise InfiniBand's, or those that are no bridge, or what is left."""
    names = [one.name for one in found if one.up]
    if named := environment.get(NCCL):
        taken = [name for name in names if _matches(name, named)]
        return Choice(
            names=tuple(taken),
            why=f"{NCCL}={named}",
            problem="" if taken else f"{NCCL}={named}: no interface that is up matches",
        )
    infiniband = [name for name in names if name.startswith("ib")]
    others = [name for name in names if not name.startswith(_LAST_RESORTS)]
    fallbacks = [[name for name in names if name.startswith(beginning)] for beginning in _LAST_RESORTS]
    taken = next((some for some in (infiniband, others, *fallbacks) if some), [])
    return Choice(names=tuple(taken), why="its own order", problem="" if taken else "no interface is up")


def _matches(name: str, pattern: str) -> bool:
    """NCCL's patterns: beginnings, or whole names after `=`; all others after `^`."""
    without = pattern.startswith("^")
    rest = pattern.removeprefix("^")
    exact = rest.startswith("=")
    parts = [part for part in rest.removeprefix("=").split(",") if part]
    found = any(name == part if exact else name.startswith(part) for part in parts)
    return found is not without
