"""What a collective puts on the wire, by backend: bytes, the links they cross, messages that wait for each other.

One table serves both sides of the ledger: an exchange's prediction adds up its phases from here, the engine counts each
call from here. What keeps the table itself honest is a test that compares it with the interface counters of emulated
hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence


def _chunk(elements: int, ranks: int) -> int:
    return -(-elements // ranks)


def _ring_all_reduce(elements: int, ranks: int) -> int:
    return 2 * (ranks - 1) * _chunk(elements, ranks)


def _one_chunk_to_each(elements: int, ranks: int) -> int:
    return (ranks - 1) * _chunk(elements, ranks)


def _ring_reduce(elements: int, ranks: int) -> int:
    """Gloo: a ring reduce-scatter, then everyone sends its chunk to the root."""
    return ranks * _chunk(elements, ranks) if ranks > 1 else 0


def _tree_broadcast(elements: int, ranks: int) -> int:
    """Gloo: a binomial tree, whose root sends once per doubling."""
    return elements * (ranks - 1).bit_length()


def _chain(elements: int, ranks: int) -> int:
    """NCCL: a pipelined ring, in which everyone sends everything on once."""
    return elements if ranks > 1 else 0


_SENT: dict[str, dict[str, Callable[[int, int], int]]] = {
    "gloo": {
        "all_reduce": _ring_all_reduce,
        "all_to_all": _one_chunk_to_each,
        "all_gather": _one_chunk_to_each,
        "reduce": _ring_reduce,
        "broadcast": _tree_broadcast,
    },
    "nccl": {
        "all_reduce": _ring_all_reduce,
        "all_to_all": _one_chunk_to_each,
        "all_gather": _one_chunk_to_each,
        "reduce": _chain,
        "broadcast": _chain,
    },
}

KINDS = tuple(_SENT["gloo"])


def sent_bytes(kind: str, elements: int, itemsize: int, ranks: int, backend: str = "gloo") -> int:
    """Bytes that the busiest of `ranks` sends in one collective over `elements` (all ranks' together for gathers)."""
    table = _SENT.get(backend, _SENT["gloo"])
    return table[kind](elements, ranks) * itemsize


def hops(kind: str, ranks: int, backend: str = "gloo") -> int:
    """Messages of one collective that wait for each other: what start-ups grow with."""
    if ranks <= 1:
        return 0
    doublings = (ranks - 1).bit_length()
    if kind == "all_reduce":
        # NCCL sends what is small up and down a tree, gloo everything around the ring, twice.
        return 2 * (doublings if backend == "nccl" else ranks - 1)
    if kind == "broadcast" and backend != "nccl":
        return doublings
    return ranks if kind == "reduce" and backend != "nccl" else ranks - 1


def uplink_bytes(kind: str, elements: int, itemsize: int, unit_of_rank: Sequence[int], backend: str = "gloo") -> int:
    """Bytes that one collective puts through the busiest uplink, in its busier direction.

    `unit_of_rank` says in which unit (host, rack) each rank sits; every unit has one uplink. Root is rank 0.
    """
    messages = uplink_messages(kind, unit_of_rank, backend)
    return messages * message_bytes(kind, elements, itemsize, len(unit_of_rank), backend)


def message_bytes(kind: str, elements: int, itemsize: int, ranks: int, backend: str = "gloo") -> int:
    """One message of a collective: everything along trees and chains, a chunk around rings and to each of all."""
    whole = kind == "broadcast" or (kind == "reduce" and backend == "nccl")
    return (elements if whole else _chunk(elements, ranks)) * itemsize


def uplink_messages(kind: str, unit_of_rank: Sequence[int], backend: str = "gloo") -> int:
    """How many messages pass the busiest uplink, whatever their size: what takes a look at every rank."""
    return max(sum(count for _, count in uplink) for uplink in uplinks(kind, [unit_of_rank], backend))


def uplinks(kind: str, groups: Sequence[Sequence[int]], backend: str = "gloo") -> set[tuple[tuple[int, int], ...]]:
    """What passes the uplinks of all units, out or in, while groups of ranks do the same side by side; alike ones once.

    Each group lists the units of its ranks. An uplink is pairs of a group's size and a number of messages.
    """
    passed: dict[tuple[str, int], Counter[int]] = {}
    for units in groups:
        for sender, receiver, times in _between_units(kind, units, backend):
            for uplink in (("out", sender), ("in", receiver)):
                passed.setdefault(uplink, Counter())[len(units)] += times
    return {tuple(sorted(counts.items())) for counts in passed.values()} or {()}


def _between_units(kind: str, units: Sequence[int], backend: str) -> Iterator[tuple[int, int, int]]:
    """From which unit to which other, and how often. Of an all-to-all's messages only how many leave each unit and
    reach it counts: there are too many to look at."""
    if kind == "all_to_all":
        for unit, count in Counter(units).items():
            yield unit, unit, count * (len(units) - count)
        return
    for times, edges in _messages(kind, len(units), backend):
        for sender, receiver in edges:
            if units[sender] != units[receiver]:
                yield units[sender], units[receiver], times


def _messages(kind: str, ranks: int, backend: str) -> list[tuple[int, list[tuple[int, int]]]]:
    """From rank to rank, and how often."""
    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    if kind in ("all_reduce", "all_gather"):
        return [(2 * (ranks - 1) if kind == "all_reduce" else ranks - 1, ring)]
    if backend == "nccl":
        return [(1, ring[:-1])]
    if kind == "broadcast":
        return [(1, [(rank - (1 << (rank.bit_length() - 1)), rank) for rank in range(1, ranks)])]
    return [(ranks - 1, ring), (1, [(rank, 0) for rank in range(1, ranks)])]
