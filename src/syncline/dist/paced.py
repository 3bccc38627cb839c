"""An all-to-all in rounds, so that every link carries one message at a time and reaches its rate.

The backends' own all-to-alls send to all ranks at once. Each link then receives from several senders, queues overflow,
and about a third of the rate is lost. Here, in round i, a rank sends to rank+i and receives from rank−i. A send counts
as complete when its bytes are buffered, so rounds would still run into each other. Therefore the receiver acknowledges
each round, and a rank starts its next round when its own message has been acknowledged. Over gloo a message has about
1 MB, and a larger buffer takes several turns of rounds, which was faster on eight hosts (ADR 0022).

When it loses: messages are small, because each round adds two short messages to the chain; or links are so fast that
processors limit the rate. `wire.protocol` decides which form is used; over gloo, `probe` measures the size from which
rounds are faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_TAGS = 1 << 28  # all-to-alls after which tags repeat
_MESSAGE_BYTES = 1_000_000
"""Approximate size of a message over gloo. NCCL sends whole messages."""


class PacedAllToAll:
    """The all-to-alls of one process group, in rounds. Called like `torch.distributed.all_to_all_single`."""

    def __init__(self) -> None:
        self._number = itertools.count(1)

    def __call__(self, output: Tensor, input: Tensor, *, group: dist.ProcessGroup, async_op: bool = True) -> PacedWork:
        # Several all-to-alls may be pending, so each has its own tags. All ranks issue them in the same order, and
        # therefore use the same tags. Tags 0 and 1 are left to other messages.
        tag = 2 * (1 + next(self._number) % _TAGS)
        work = PacedWork(_rounds(output, input, group, tag))
        if not async_op:
            work.wait()
        return work


class PacedWork:
    """An all-to-all in rounds. The thread that waits for it runs its rounds. On NCCL, rounds are only enqueued, and
    complete in the order of the stream. If several all-to-alls are pending, all ranks must wait for them in the same
    order, as they do if they run the same exchange."""

    def __init__(self, rounds: Iterator[None]) -> None:
        self._rounds = rounds
        self._error: Exception | None = None
        next(self._rounds)  # the first messages are on their way before anyone waits

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        try:
            for _ in self._rounds:
                pass
        except Exception as error:
            self._error = error  # an iterator that failed would look complete the next time
            raise


def _rounds(output: Tensor, input: Tensor, group: dist.ProcessGroup, tag: int) -> Iterator[None]:
    """Run the rounds, and yield once, after the first has started. If a rank has failed, waiting raises within gloo's
    timeout."""
    rank, size = group.rank(), group.size()
    sent, received = input.view(size, -1), output.view(size, -1)
    token, answer = torch.zeros(2, dtype=torch.uint8, device=input.device).split(1)
    exchange = _grouped if input.is_cuda else _pair
    turns = 1 if input.is_cuda else max(1, round(sent[0].nbytes / _MESSAGE_BYTES))
    pieces = zip(sent.chunk(turns, 1), received.chunk(turns, 1), strict=True)
    rounds = [(number, *piece) for piece in pieces for number in range(1, size)]
    for index, (number, out, into) in enumerate(rounds, 1):
        receiver, sender = (rank + number) % size, (rank - number) % size
        messages = exchange(group, out[receiver], receiver, into[sender], sender, tag)
        if index == 1:
            received[rank].copy_(sent[rank])
            yield
        for message in messages:
            message.wait()
        if index < len(rounds):
            for message in exchange(group, token, sender, answer, receiver, tag + 1):
                message.wait()


def _pair(group: Any, out: Tensor, receiver: int, into: Tensor, sender: int, tag: int) -> list[Any]:
    # The receive comes first: gloo is a quarter slower if data arrives before its receive is posted.
    return [group.recv([into], sender, tag), group.send([out], receiver, tag)]


def _grouped(group: Any, out: Tensor, receiver: int, into: Tensor, sender: int, _: int) -> list[Any]:
    """Enqueue a send and a receive as one NCCL group. NCCL has no tags, but runs them in the order of the stream."""
    to, source = (dist.get_global_rank(group, rank) for rank in (receiver, sender))
    pair = [dist.P2POp(dist.isend, out, to, group), dist.P2POp(dist.irecv, into, source, group)]
    works: list[Any] = dist.batch_isend_irecv(pair)
    return works
