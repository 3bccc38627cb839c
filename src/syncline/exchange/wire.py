"""Bytes and messages of each collective, by backend.

The same table serves the prediction of an exchange's cost and the engine's counters, so the two cannot differ.
`tests/test_wire.py` compares the table with the interface counters of emulated hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

KINDS = ("all_reduce", "all_to_all", "all_gather", "reduce", "broadcast")
PACED = "paced_all_to_all"
"""An all-to-all in rounds, in which every rank sends to one other and receives from one other (`dist.paced`)."""
PACED_FROM_BYTES = 300_000
"""Smallest buffer that is sent in rounds if the links were not measured. On 4 and 8 hosts at 100 and 200 Mbit/s, rounds
are at least as fast as gloo's own all-to-all from 300 kB on, and half as fast at 200 kB."""
PACED_NCCL_MESSAGE_BYTES = 512 * 1024
"""Smallest message of an all-to-all that NCCL sends in rounds. Between four ranks with 1 Gbit/s links, a step with few
bits then takes 186 ms instead of 239 ms. Over 10 Gbit/s links, smaller messages would take longer (ADR 0022)."""
REDUCE_SCATTER = "reduce_scatter"
"""NCCL's own reduce-scatter: a ring, like its all-gather. gloo has none that sends fewer bytes than an all-reduce."""
NEVER_BYTES = 1 << 40  # no buffer is as large


def protocol(kind: str, nbytes: int, ranks: int, level: str, backend: str, paced_bytes: int | None) -> str:
    """Return how a collective of `nbytes` runs: as `PACED`, or as the kind itself.

    Ranks of one host share no link. Two ranks cannot collide, but over gloo, large messages in both directions still
    take turns: a rank sends only after the other has asked for it, and this question waits behind the other's message.

    Args:
        level: Name of the level of its groups.
        paced_bytes: Smallest buffer that is sent in rounds; None if it was not measured.
    """
    least_ranks = 2 if backend == "gloo" else 3
    if kind != "all_to_all" or ranks < least_ranks or level == "local" or backend not in ("gloo", "nccl"):
        return kind
    if paced_bytes is None:
        paced_bytes = PACED_FROM_BYTES if backend == "gloo" else ranks * PACED_NCCL_MESSAGE_BYTES
    return PACED if nbytes >= paced_bytes else kind


def sent_bytes(kind: str, elements: int, itemsize: int, ranks: int, backend: str = "gloo") -> int:
    """Return the bytes that the busiest rank sends in one collective of a kind in `KINDS`. `elements` is the size of
    the whole buffer: for an all-gather, of its output."""
    return _messages_sent(kind, ranks, backend) * message_bytes(kind, elements, itemsize, ranks, backend)


def message_bytes(kind: str, elements: int, itemsize: int, ranks: int, backend: str = "gloo") -> int:
    """Return the bytes of one message: the whole tensor in trees and chains, one chunk in rings and all-to-alls."""
    whole = kind == "broadcast" or (kind == "reduce" and backend == "nccl")
    return (elements if whole else -(-elements // ranks)) * itemsize


def _messages_sent(kind: str, ranks: int, backend: str) -> int:
    """Return the number of messages that the busiest rank sends."""
    if ranks == 1:
        return 0
    if kind in ("reduce", "broadcast") and backend == "nccl":
        return 1  # a pipelined chain, in which each rank forwards everything once
    if kind == "reduce":
        return ranks  # a ring reduce-scatter, after which every rank sends its chunk to the root
    if kind == "broadcast":
        return (ranks - 1).bit_length()  # a binomial tree, whose root sends once per doubling
    return (2 if kind == "all_reduce" else 1) * (ranks - 1)


def hops(kind: str, ranks: int, backend: str = "gloo") -> int:
    """Return the length of the longest chain of messages in a collective, to which start-ups are proportional."""
    if ranks <= 1:
        return 0
    if backend != "nccl":
        return _messages_sent(kind, ranks, backend)
    # NCCL sends small messages of an all-reduce up and down a tree.
    return 2 * (ranks - 1).bit_length() if kind == "all_reduce" else ranks - 1


def uplink_bytes(kind: str, elements: int, itemsize: int, unit_of_rank: Sequence[int], backend: str = "gloo") -> int:
    """Return the bytes that one collective sends over the busiest uplink, in its busier direction. Every unit (host or
    rack) has one uplink. The root of the collective is rank 0."""
    messages = max(sum(count for _, count in uplink) for uplink in uplinks(kind, [unit_of_rank], backend))
    return messages * message_bytes(kind, elements, itemsize, len(unit_of_rank), backend)


def uplinks(kind: str, groups: Sequence[Sequence[int]], backend: str = "gloo") -> set[tuple[tuple[int, int], ...]]:
    """Return the messages on the uplinks of all units, while groups of ranks run the same collective concurrently.
    `groups` has, for each group, the units of its ranks. The result has, for each uplink and direction, pairs of a
    group size and a number of messages; equal ones appear once."""
    passed: dict[tuple[str, int], Counter[int]] = {}
    for units in groups:
        for sender, receiver, times in _between_units(kind, units, backend):
            for uplink in (("out", sender), ("in", receiver)):
                passed.setdefault(uplink, Counter())[len(units)] += times
    return {tuple(sorted(counts.items())) for counts in passed.values()} or {()}


def _between_units(kind: str, units: Sequence[int], backend: str) -> Iterator[tuple[int, int, int]]:
    """Yield sender unit, receiver unit and number of messages. An all-to-all has too many pairs of ranks to list, so
    only the number of messages that leave and enter each unit is computed."""
    if kind in ("all_to_all", PACED):
        for unit, count in Counter(units).items():
            yield unit, unit, count * (len(units) - count)
        return
    for times, edges in _messages(kind, len(units), backend):
        for sender, receiver in edges:
            if units[sender] != units[receiver]:
                yield units[sender], units[receiver], times


def _messages(kind: str, ranks: int, backend: str) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return the edges between ranks, with the number of times that each is used."""
    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    if kind in ("all_reduce", "all_gather", REDUCE_SCATTER):
        return [(_messages_sent(kind, ranks, backend), ring)]
    if backend == "nccl":
        return [(1, ring[:-1])]
    if kind == "broadcast":
        return [(1, [(rank - (1 << (rank.bit_length() - 1)), rank) for rank in range(1, ranks)])]
    return [(ranks - 1, ring), (1, [(rank, 0) for rank in range(1, ranks)])]
