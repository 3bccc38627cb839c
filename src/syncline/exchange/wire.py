"""What a collective puts on the wire: bytes sent by the busiest rank, by backend.

One table serves both sides of the ledger: an exchange's prediction adds up its phases from here, the engine counts each
call from here. What keeps the table itself honest is a test that compares it with the interface counters of emulated
hosts.
"""

from __future__ import annotations

from collections.abc import Callable


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
