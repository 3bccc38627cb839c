"""`syncline run`: run an unmodified training script, and tune or observe its DDP models."""

from __future__ import annotations

import functools
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from syncline.cli import commands, options, screen
from syncline.errors import SynclineError, UsageError, first_line
from syncline.exchange import EXCHANGES
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.postmortem import examine_reports
from syncline.records.run_record import FINISHED, RUNNING, RunRecord
from syncline.run.runner import PAGE, Runner, check_script
from syncline.tuning.settings import TuneSettings

_OWN_OPTIONS = ("--nproc-per-node", "--observe-only", "--quality", "--allow", "--exchange", "--updates", "--no-cache")
"""Options that scripts hardly have. Others, like --plan, --out or --warmup, are as likely to be the script's own."""
_WAIT_S = 5.0  # how long rank 0 waits for the records of its host's other ranks after the script has ended


@options.one_line_errors("syncline run")
def prepare(args: commands.Run) -> Callable[[], NoReturn]:
    """Check the options and return the function that runs the script."""
    if args.exchange is not None and args.plan is not None:
        raise UsageError("--exchange and --plan exclude each other: a plan names the exchanges of its buckets")
    tuning = args.allow or args.quality is not None or args.observe_only
    if (args.exchange is not None or args.plan is not None) and tuning:
        raise UsageError("--quality, --allow and --observe-only are for tuning, which --exchange and --plan replace")
    if args.quality is not None and args.allow:
        raise UsageError("--quality and --allow exclude each other: --allow names the methods one by one")
    if args.exchange is not None and args.exchange not in EXCHANGES:
        raise UsageError(f"--exchange {args.exchange}: unknown exchange; known: {', '.join(EXCHANGES)}")
    if args.updates and args.exchange is None:
        raise UsageError("--updates needs the exchange to use: add --exchange, as in --exchange oktopk --updates")
    if not args.updates and (args.every, args.warmup, args.delay) != (1, None, 0):
        raise UsageError("--every, --warmup and --delay are for updates: add --updates, or leave them out")
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
        exchange=None if args.exchange is None else EXCHANGES[args.exchange](),
        plan=None if args.plan is None else Plan.load(args.plan),
        quality=args.quality,
        allow=options.split(args.allow),
        cache=not args.no_cache,
        network=None if args.network is None else Network.load(args.network),
        change=not args.observe_only,
        probe_s=args.probe,
        quiet=args.quiet,
        timeout_s=args.timeout,
        updates=args.updates,
        every=args.every,
        warmup=args.warmup,
        delay=args.delay,
    )
    arguments = args.arguments or []
    _warn_of_own_options(args.script, arguments)
    changed = options.changed(args, "script", "arguments", "module", "nproc_per_node")
    words = [*changed, *(["-m"] if args.module else []), args.script, *arguments]
    if args.nproc_per_node is not None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc_per_node}"]
        program = [sys.executable, *torchrun, "-m", "syncline.run", *words]
        return functools.partial(os.execv, sys.executable, program)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", ranks)) // ranks
    nnodes = ["--nnodes", str(nodes)] if nodes > 1 else []
    command = shlex.join(["torchrun", *nnodes, "--nproc-per-node", str(ranks), "-m", "syncline.run", *words])
    return functools.partial(_run, Runner(args.script, arguments, args.module, settings, args.out, command))


def _warn_of_own_options(script: str, arguments: Sequence[str]) -> None:
    """Log a line if an option after the script's name is most likely meant for `syncline run`."""
    given = [word.partition("=")[0] for word in arguments]
    if os.environ.get("RANK", "0") == "0" and (ours := next((name for name in given if name in _OWN_OPTIONS), None)):
        _log(f"{ours} is passed to the script, because it is after its name; to use it here, put it before {script}")


def _run(runner: Runner) -> NoReturn:
    try:
        runner.run()
    except SynclineError as error:
        if error is not runner.refused:
            raise
        if runner.rank == 0:
            _log(str(error))
        sys.exit(2)
    finally:
        if runner.rank == 0:
            _write_report(runner)
    sys.exit(0)


def _write_report(runner: Runner) -> None:
    """Write the report and print its path. An error in it must not make the training fail."""
    finished, folder = runner.ended == FINISHED, runner.folder
    if not runner.followings:  # models of the script
        if finished and not runner.sharded.lines:
            done = "tuned" if runner.settings.tunes else "attached; other wrappers are left alone"
            _log(f"the script built no DistributedDataParallel model, so nothing was {done}")
        return
    if not finished:  # torchrun may end this rank before the report is written
        _log(f"the ranks' records are in {folder}; for a report: {shlex.join(['syncline', 'report', str(folder)])}")
    try:
        from syncline.report.inputs import Inputs
        from syncline.report.page import write_report
        from syncline.report.read_inputs import failure_folder

        records = _records(runner, _WAIT_S if finished else _WAIT_S / 10)
        failure = None if (reports := failure_folder([folder], records)) is None else examine_reports(reports)
        write_report(folder / PAGE, Inputs(runs=records, failure=failure))
        _log(f"report: {folder / PAGE}")
    except Exception as error:  # noqa: BLE001 - the training has ended, and its result counts
        _log(f"the report was not written: {first_line(error)}")


def _log(text: str) -> None:
    print(f"syncline run: {text}", file=sys.stderr)


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
