"""Who sits where: hosts from what ranks say of themselves, racks from what links carry."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

_SLOWER = 1.3
"""Hosts whose traffic is slower than this between groups than inside them are in different racks."""


def host_identity() -> str:
    """The same for the ranks of one host and for no others: the kernel's boot, and the network namespace in it, since
    containers and emulated hosts share the former and may share a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text().strip()} {namespace.readlink()}"
    except OSError:
        import socket

        return socket.gethostname()


def number(identities: Sequence[str]) -> tuple[int, ...]:
    """Identities as numbers, in the order of their first appearance."""
    seen: dict[str, int] = {}
    return tuple(seen.setdefault(identity, len(seen)) for identity in identities)


def racks(matrix_bytes_per_s: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Groups of hosts that reach each other faster than the rest; all in one where there are no such groups."""
    # Here, because half a second of importing is more than commands that do not probe should pay.
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    rates = np.asarray(matrix_bytes_per_s, dtype=float)
    hosts = len(rates)
    if hosts < 3:
        return (0,) * hosts
    slower = np.minimum(rates, rates.T)
    np.fill_diagonal(slower, np.inf)
    if slower.min() <= 0:
        return (0,) * hosts
    tree = linkage(squareform(1 / slower, checks=False), method="average")
    merges = tree[:, 2]
    jumps = merges[1:] / merges[:-1]
    widest = int(np.argmax(jumps))
    if jumps[widest] < _SLOWER:
        return (0,) * hosts
    cut = (merges[widest] * merges[widest + 1]) ** 0.5
    return number([str(label) for label in fcluster(tree, cut, criterion="distance")])
