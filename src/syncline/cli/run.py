"""`syncline run`: an unmodified training script, made faster, or only looked at."""

from __future__ import annotations

import functools
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from syncline.cli import options, screen
from syncline.cli.commands.run import FOLDER
from syncline.errors import SynclineError, UsageError, first_line
from syncline.exchange import EXCHANGES, Exchange
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.run_record import FINISHED, RUNNING, RunRecord
from syncline.run.runner import PAGE, Job, Runner
from syncline.run.script import check_script
from syncline.tuning.settings import PROBE_S, TuneSettings

_WAIT_S = 5.0
"""For the records of this host's other ranks, when the script has ended."""


@options.one_line_errors("syncline run")
def prepare(
    script: str,
    arguments: list[str],
    *,
    module: bool,
    nproc_per_node: int | None,
    observe_only: bool,
    allow: str,
    exchange: str | None,
    plan: Path | None,
    network: Path | None,
    probe: float,
    timeout: float | None,
    out: Path,
    quiet: bool,
) -> Callable[[], NoReturn]:
    """Checks the options → what runs the script."""
    if exchange is not None and plan is not None:
        raise UsageError("--exchange and --plan exclude each other: a plan names the exchanges of its buckets")
    if (exchange is not None or plan is not None) and (allow or observe_only):
        raise UsageError("--allow and --observe-only are for tuning: --exchange and --plan leave nothing to find")
    if not 1 <= probe <= 3600:
        raise UsageError(f"--probe {probe:g}: probing takes 1 to 3600 seconds")
    if timeout is not None and not timeout > 0:
        raise UsageError(f"--timeout {timeout:g}: must be greater than 0")
    if nproc_per_node is not None and "RANK" in os.environ:
        raise UsageError("--nproc-per-node starts ranks, and this is one of torchrun's already: leave it out")
    check_script(script, module=module)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; name a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be made: {error.strerror}; name another folder") from error
    screen.check_writable(out / PAGE)
    settings = TuneSettings(
        exchange=_exchange(exchange),
        plan=None if plan is None else Plan.load(plan),
        allow=[word.strip() for word in allow.split(",") if word.strip()],
        network=None if network is None else Network.load(network),
        change=not observe_only,
        probe_s=probe,
        quiet=quiet,
        timeout_s=timeout,
    )
    given = [*(["-m"] if module else []), script, *arguments]
    words = [part for name, value in _chosen(locals()) for part in (name, value) if part is not None]
    ranks = nproc_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", ranks)) // ranks
    several = ["--nnodes", str(nodes)] if nodes > 1 else []
    command = shlex.join(["torchrun", *several, "--nproc-per-node", str(ranks), "-m", "syncline.run", *words, *given])
    if nproc_per_node is not None:
        return functools.partial(_start_ranks, nproc_per_node, [*words, *given])
    return functools.partial(_run, Job(script, tuple(arguments), module, settings, out, command))


def _chosen(given: dict[str, object]) -> list[tuple[str, str | None]]:
    """The options that were not left as they are, as they would be typed."""
    chosen: list[tuple[str, str | None]] = []
    for name in ("allow", "exchange", "plan", "network"):
        if given[name]:
            chosen.append((f"--{name}", str(given[name])))
    if given["probe"] != PROBE_S:
        chosen.append(("--probe", f"{given['probe']:g}"))
    if given["timeout"] is not None:
        chosen.append(("--timeout", f"{given['timeout']:g}"))
    if given["out"] != FOLDER:
        chosen.append(("--out", str(given["out"])))
    return chosen + [(f"--{name.replace('_', '-')}", None) for name in ("observe_only", "quiet") if given[name]]


def _exchange(name: str | None) -> Exchange | None:
    if name is None:
        return None
    if name not in EXCHANGES:
        raise UsageError(f"--exchange {name}: there is no such exchange; known: {', '.join(EXCHANGES)}")
    return EXCHANGES[name]()


def _start_ranks(ranks: int, arguments: list[str]) -> NoReturn:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    os.execv(sys.executable, [*torchrun, "-m", "syncline.run", *arguments])  # noqa: S606 - no shell in it


def _run(job: Job) -> NoReturn:
    runner = Runner(job)
    try:
        runner.run()
    except SynclineError as error:
        if error is not runner.refused:
            raise
        if runner.rank == 0:
            print(f"syncline run: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        if runner.rank == 0:
            _tell(runner)
    sys.exit(0)


def _tell(runner: Runner) -> None:
    """The page, and a line that says where it is. It must not be what a training fails by."""
    if not runner.found:
        if runner.ended == FINISHED:
            print("syncline run: the script built no DistributedDataParallel model: nothing was done", file=sys.stderr)
        return
    folder = runner.job.folder
    if runner.ended != FINISHED:  # torchrun may end this rank before the page is there
        again = shlex.join(["syncline", "report", str(folder)])
        print(f"syncline run: the ranks' records are in {folder}; {again} makes a page of them", file=sys.stderr)
    try:
        from syncline.report.inputs import Inputs
        from syncline.report.page import write_report

        records = _records(runner, _WAIT_S if runner.ended == FINISHED else _WAIT_S / 10)
        page = folder / PAGE
        write_report(page, Inputs(runs=records))
        print(f"syncline run: {page} tells what became of it", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - the training is over, and its end is what counts
        line = first_line(error)
        print(f"syncline run: no report is written: {line}", file=sys.stderr)


def _records(runner: Runner, wait_s: float) -> tuple[RunRecord, ...]:
    """Of all ranks whose records can be seen here, when those of this host are complete, or after a while."""
    local = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), runner.ranks)
    until = time.monotonic() + wait_s
    found: dict[int, RunRecord] = {}
    while True:
        for rank in range(runner.ranks):
            complete = rank in found and found[rank].ended != RUNNING
            if not complete and (path := runner.path(rank)).exists():
                found[rank] = RunRecord.load(path)
        if sum(one.ended != RUNNING for one in found.values()) >= local or time.monotonic() > until:
            return tuple(found[rank] for rank in sorted(found))
        time.sleep(0.05)
