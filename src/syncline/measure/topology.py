"""Find the topology: hosts from an identity that each rank reports, racks from the measured rates."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_SLOWER = 1.3  # groups of hosts count as racks if the links between them are slower than those inside by this factor


def host_identity() -> str:
    """Return a text that is the same for all ranks of one host, and different on other hosts. It consists of the
    kernel's boot ID and the network namespace: containers and emulated hosts on one machine share the boot ID, and may
    share a host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def number(identities: Sequence[str]) -> tuple[int, ...]:
    """Number the identities in the order of their first appearance."""
    seen: dict[str, int] = {}
    return tuple(seen.setdefault(identity, len(seen)) for identity in identities)


def racks(matrix_bytes_per_s: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return the number of each host's rack. Hosts in a rack reach each other faster than other hosts. If there are no
    racks, all numbers are 0."""
    # Imported here, because it takes half a second and only probing needs it.
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    rates = np.asarray(matrix_bytes_per_s, dtype=float)
    one_rack = (0,) * len(rates)
    if len(rates) < 3:
        return one_rack
    slower = np.minimum(rates, rates.T)
    np.fill_diagonal(slower, np.inf)
    if slower.min() <= 0:
        return one_rack
    tree = linkage(squareform(1 / slower, checks=False), method="average")
    merges = tree[:, 2]
    jumps = merges[1:] / merges[:-1]
    widest = int(np.argmax(jumps))
    if jumps[widest] < _SLOWER:
        return one_rack
    cut = (merges[widest] * merges[widest + 1]) ** 0.5
    return number([str(label) for label in fcluster(tree, cut, criterion="distance")])
