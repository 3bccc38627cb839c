"""Calls that all ranks make together: whoever fails to come is named.

`agreement` compares; here, a collective that fails because a rank has not come raises an error that says which.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from syncline.dist.agreement import agree, current_device
from syncline.dist.comm import backend_of, group_timeout
from syncline.errors import MismatchError, SynclineError, first_line
from syncline.health import failure
from syncline.health.heartbeat import vigil
from syncline.health.suspects import Suspect, is_collective, suspected


def meet(
    group: dist.ProcessGroup, fingerprint: Mapping[str, Any], what: str = "what is attached", call: str = "attach"
) -> None:
    """`agree`, in the words of somebody who called something that all ranks must call."""
    with meeting(group, call):
        agree(group, fingerprint, what)


@contextlib.contextmanager
def meeting(group: dist.ProcessGroup, call: str, *, users: bool = False) -> Iterator[None]:
    """All ranks do what is inside; if they do not, the error says who is missing, as far as can be known. `users`:
    inside is their own code too, whose errors are theirs."""
    with vigil() as found:
        if found is not None:
            found.came(group.group_name)
        try:
            yield
        except SynclineError:
            raise
        except RuntimeError as error:
            if users and "ExchangeError:" in str(error):
                raise
            if not is_collective(error):
                if found is not None:
                    found.say(f"{type(error).__name__}: {first_line(error)}", own=True)
                raise
            told = f"the ranks did not meet to {call}: {first_line(error)}"
            suspects, left = failure.told(
                told,
                lambda suspects, job: _note_of(group, call, told, suspects, job),
                lambda found: found.suspects(dist.get_process_group_ranks(group), group.group_name),
                own=False,
            )
            raise MismatchError(
                f"{told}{suspected(suspects)}. All ranks of the model's process group must call {call}, in the same "
                f"order as their other collectives{left}"
            ) from error


def _note_of(group: dist.ProcessGroup, call: str, error: str, suspects: Sequence[Suspect], job: str) -> failure.Failure:
    return failure.Failure(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        backend=backend_of(group),
        timeout_s=group_timeout(group).total_seconds(),
        job=job,
        where=call,
        step=None,
        error=error,
        suspects=tuple(suspects),
        pending=(),
        events=(),
    )


@contextlib.contextmanager
def together(group: dist.ProcessGroup, device: torch.device, what: str, call: str) -> Iterator[dict[str, Any]]:
    """What is done inside is done on all ranks, with the same of what is put into the fields, or all raise."""
    fields: dict[str, Any] = {}
    with current_device(device):
        try:
            yield fields
        except Exception as error:
            text = first_line(error)
            with contextlib.suppress(MismatchError):  # this rank's own error says more
                meet(group, {"error": text}, what, call)
            raise
        meet(group, {"error": None, **fields}, what, call)
