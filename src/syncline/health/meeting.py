"""Calls that all ranks make, such as attach, save and load: an error names the ranks that did not make the call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from syncline.dist.agreement import agree, current_device
from syncline.dist.comm import backend_of, group_timeout
from syncline.errors import MismatchError, SynclineError, first_line
from syncline.health.failure import explain_failure
from syncline.health.heartbeat import shared_heartbeat
from syncline.health.suspects import Awaited, is_collective
from syncline.records.failure_report import FailureReport


def meet(
    group: dist.ProcessGroup, fingerprint: dict[str, Any], what: str = "what is attached", call: str = "attach"
) -> None:
    """Compare a fingerprint on all ranks, as part of a call that all ranks make."""
    with meeting(group, call):
        agree(group, fingerprint, what)


@contextlib.contextmanager
def meeting(group: dist.ProcessGroup, call: str, *, users: bool = False) -> Iterator[None]:
    """Run a block that all ranks of a group run, and raise a MismatchError that names suspects if one does not.

    With `users`, the block runs users' code too, whose errors are raised as they are.
    """
    heartbeat = shared_heartbeat()
    calls = 0 if heartbeat is None else heartbeat.count_call(group.group_name)
    try:
        yield
    except SynclineError:
        raise
    except RuntimeError as error:
        if users and "ExchangeError:" in str(error):
            raise
        if not is_collective(error):
            if heartbeat is not None:
                heartbeat.announce_failure(f"{type(error).__name__}: {first_line(error)}", own=True)
            raise
        report = FailureReport(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            backend=backend_of(group),
            timeout_s=group_timeout(group).total_seconds(),
            where=call,
            error=f"not all ranks called {call}: {first_line(error)}",
        )
        awaited = Awaited("call", group.group_name, calls)
        explanation = explain_failure(report, dist.get_process_group_ranks(group), awaited)
        raise MismatchError(
            f"{report.error}. All ranks of the model's process group must call {call}, in the same order as their "
            f"other collectives{explanation}"
        ) from error


@contextlib.contextmanager
def same_on_all_ranks(group: dist.ProcessGroup, device: torch.device, what: str, call: str) -> Iterator[dict[str, Any]]:
    """Run a block on all ranks. All of them raise if it fails on one, or if the fields that it fills differ."""
    fields: dict[str, Any] = {}
    with current_device(device):
        try:
            yield fields
        except Exception as error:
            with contextlib.suppress(MismatchError):  # this rank's own error says more than that ranks differ
                meet(group, {"error": first_line(error)}, what, call)
            raise
        meet(group, {"error": None, **fields}, what, call)
