"""`syncline run`: run an unmodified training script, and tune or observe its DDP models."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from syncline.cli import commands, options, screen
from syncline.errors import SynclineError, UsageError, first_line
from syncline.exchange import EXCHANGES, Exchange
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.run_record import FINISHED, RUNNING, RunRecord
from syncline.run.runner import PAGE, Job, Runner
from syncline.run.script import check_script
from syncline.tuning.settings import TuneSettings

_WAIT_S = 5.0
"""How long rank 0 waits for the records of its host's other ranks after the script has ended."""


@options.one_line_errors("syncline run")
def prepare(args: commands.Run) -> Callable[[], NoReturn]:
    """Check the options and return the function that runs the script."""
    if args.exchange is not None and args.plan is not None:
        raise UsageError("--exchange and --plan exclude each other: a plan names the exchanges of its buckets")
    if (args.exchange is not None or args.plan is not None) and (args.allow or args.observe_only):
        raise UsageError("--allow and --observe-only are for tuning, which --exchange and --plan replace")
    options.check_seconds("--probe", args.probe)
    options.check_positive("--timeout", args.timeout)
    if args.nproc_per_node is not None and "RANK" in os.environ:
        raise UsageError("--nproc-per-node starts ranks, but torchrun has already started this one: omit it")
    check_script(args.script, module=args.module)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"--out {args.out}: is a file; name a folder") from None
    except OSError as error:
        raise UsageError(f"--out {args.out}: cannot be created: {error.strerror}; name another folder") from error
    screen.check_writable(args.out / PAGE)
    settings = TuneSettings(
        exchange=_exchange(args.exchange),
        plan=None if args.plan is None else Plan.load(args.plan),
        allow=options.split(args.allow),
        network=None if args.network is None else Network.load(args.network),
        change=not args.observe_only,
        probe_s=args.probe,
        quiet=args.quiet,
        timeout_s=args.timeout,
    )
    arguments = args.arguments or []
    words = [*_changed_options(args), *(["-m"] if args.module else []), args.script, *arguments]
    if args.nproc_per_node is not None:
        return functools.partial(_start_ranks, args.nproc_per_node, words)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", ranks)) // ranks
    nnodes = ["--nnodes", str(nodes)] if nodes > 1 else []
    command = shlex.join(["torchrun", *nnodes, "--nproc-per-node", str(ranks), "-m", "syncline.run", *words])
    return functools.partial(_run, Job(args.script, tuple(arguments), args.module, settings, args.out, command))


def _changed_options(args: commands.Run) -> list[str]:
    """Return the options that do not have their default values, as they would be typed."""
    words = []
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if value != field.default and field.name not in ("script", "arguments", "module", "nproc_per_node"):
            words += [f"--{field.name.replace('_', '-')}", *([] if value is True else [f"{value}"])]
    return words


def _exchange(name: str | None) -> Exchange | None:
    if name is not None and name not in EXCHANGES:
        raise UsageError(f"--exchange {name}: unknown exchange; known: {', '.join(EXCHANGES)}")
    return None if name is None else EXCHANGES[name]()


def _start_ranks(ranks: int, arguments: list[str]) -> NoReturn:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    os.execv(sys.executable, [*torchrun, "-m", "syncline.run", *arguments])  # noqa: S606 - without a shell


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
            _write_report(runner)
    sys.exit(0)


def _write_report(runner: Runner) -> None:
    """Write the report and print its path. An error in it must not make the training fail."""
    if not runner.model_count:
        if runner.ended == FINISHED:
            print(
                "syncline run: the script built no DistributedDataParallel model, so nothing was tuned", file=sys.stderr
            )
        return
    folder = runner.job.folder
    if runner.ended != FINISHED:  # torchrun may end this rank before the report is written
        report = shlex.join(["syncline", "report", str(folder)])
        print(f"syncline run: the ranks' records are in {folder}; for a report: {report}", file=sys.stderr)
    try:
        from syncline.report.inputs import Inputs
        from syncline.report.page import write_report

        records = _records(runner, _WAIT_S if runner.ended == FINISHED else _WAIT_S / 10)
        page = folder / PAGE
        write_report(page, Inputs(runs=records))
        print(f"syncline run: report: {page}", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - the training has ended, and its result counts
        print(f"syncline run: the report was not written: {first_line(error)}", file=sys.stderr)


def _records(runner: Runner, wait_s: float) -> tuple[RunRecord, ...]:
    """Read the records that this host can see, when those of its own ranks are complete or after `wait_s`."""
    local = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), runner.ranks)
    until = time.monotonic() + wait_s
    records: dict[int, RunRecord] = {}
    while True:
        for rank in range(runner.ranks):
            complete = rank in records and records[rank].ended != RUNNING
            if not complete and (path := runner.path(rank)).exists():
                records[rank] = RunRecord.load(path)
        if sum(record.ended != RUNNING for record in records.values()) >= local or time.monotonic() > until:
            return tuple(records[rank] for rank in sorted(records))
        time.sleep(0.05)
