"""Write a failure report when an exchange fails, and look for suspects among the other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from syncline.dist import torchrun
from syncline.errors import first_line
from syncline.files import write_json
from syncline.health.heartbeat import shared_heartbeat
from syncline.health.suspects import Awaited
from syncline.records.failure_report import FailureReport, chosen_folder


def explain_failure(
    report: FailureReport, ranks: Sequence[int], awaited: Awaited, *, own: bool = False, announce: bool = True
) -> str:
    """Announce a failure to the other ranks, write the report, and look for suspects. Takes seconds.

    With `own`, the cause is on this rank, and there are no suspects. Returns a text to append to the error: the
    suspects, and where the report is.
    """
    report = msgspec.structs.replace(report, run=torchrun.run_id(), attempt=torchrun.attempt())
    heartbeat = shared_heartbeat()
    if heartbeat is None:
        return _write(report)
    if announce:
        heartbeat.announce_failure(report.error, own=own)
    report = msgspec.structs.replace(report, job=heartbeat.store.job)
    written = _write(report)  # now, because a launcher may end this process before suspects are known
    suspects = [] if own else heartbeat.find_suspects(ranks, awaited)
    if not suspects:
        return written
    written = _write(msgspec.structs.replace(report, suspects=tuple(suspects)))
    more = f" and {len(suspects) - 3} more" if len(suspects) > 3 else ""
    return f"; suspect: {', '.join(map(str, suspects[:3]))}{more}{written}"


def _write(report: FailureReport) -> str:
    """Write a report. Return a text that says where it is, or why it could not be written; never raise."""
    if (folder := chosen_folder()) is None:
        return ""
    try:
        path = folder / f"rank-{report.rank}.json"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, report)
    except Exception as problem:  # noqa: BLE001
        return f"; this rank's failure report could not be written: {first_line(problem)}"
    return f"; this rank's failure report is {path.absolute()}"
