"""`syncline run`: an unmodified training script, made faster, or only looked at.

A script runs outside of the command line's own machinery, so that its exceptions, exit status and Ctrl-C are what they
would be without it.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from syncline.cli import options, screen
from syncline.engine.follow import PROBE_S, Wishes
from syncline.errors import SynclineError, UsageError, first_line
from syncline.exchange import EXCHANGES, Exchange
from syncline.measure.network import Network
from syncline.plan.plan import Plan
from syncline.report.record import FINISHED, RUNNING, RunRecord
from syncline.run.runner import PAGE, Job, Runner
from syncline.run.script import check_script

FOLDER = Path("syncline-run")
_WAIT_S = 5.0
"""For the records of this host's other ranks, when the script has ended."""


@dataclass(frozen=True)
class _Started:
    """What the command line asked for."""

    job: Job
    ranks: int | None
    """To start here; None where somebody has started them."""
    options: list[str] = field(default_factory=list)


def run_command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script; with -m, a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The script's own.")] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")] = False,
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="Start N ranks here, through torchrun.")
    ] = None,
    observe_only: Annotated[bool, typer.Option("--observe-only", help="Measure and diagnose; change nothing.")] = False,
    allow: Annotated[str, typer.Option(metavar="A,B", help="What a plan may lose: bf16, fp16, sparse.")] = "",
    exchange: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Instead of tuning: one of {', '.join(EXCHANGES)}.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Instead of tuning: a plan's file.")] = None,
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What syncline probe wrote, instead of probing.")
    ] = None,
    probe: Annotated[float, typer.Option(metavar="SECONDS", help="How long to probe the links.")] = PROBE_S,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long a collective may take, DDP's own too.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For the records and the report.")] = FOLDER,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing while the script runs.")] = False,
) -> _Started:
    """Run a training script as it is, under torchrun, and have its DDP models exchange their gradients faster.

    torchrun --nproc-per-node 4 -m syncline.run train.py --epochs 3

    syncline run --nproc-per-node 4 train.py --epochs 3

    The script's own steps are watched, a plan is made and tried on them, and the faster way stays: same losses, to
    summation order, unless --allow says more. A report is written when the script ends.
    """
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
    wishes = Wishes.of(
        exchange=_exchange(exchange),
        plan=None if plan is None else Plan.load(plan),
        allow=[word.strip() for word in allow.split(",") if word.strip()],
        network=None if network is None else Network.load(network),
        change=not observe_only,
        probe_s=probe,
        quiet=quiet,
        timeout_s=timeout,
    )
    given = [*(["-m"] if module else []), script, *(arguments or [])]
    words = [part for name, value in _chosen(locals()) for part in (name, value) if part is not None]
    ranks = nproc_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = int(os.environ.get("WORLD_SIZE", ranks)) // ranks
    several = ["--nnodes", str(nodes)] if nodes > 1 else []
    command = shlex.join(["torchrun", *several, "--nproc-per-node", str(ranks), "-m", "syncline.run", *words, *given])
    return _Started(Job(script, tuple(arguments or ()), module, wishes, out, command), nproc_per_node, [*words, *given])


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


def main(arguments: Sequence[str]) -> NoReturn:
    """`syncline run`, and `python -m syncline.run`."""
    started = _parse(arguments)
    if started.ranks is not None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={started.ranks}"]
        os.execv(sys.executable, [*torchrun, "-m", "syncline.run", *started.options])  # noqa: S606 - no shell in it
    runner = Runner(started.job)
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


def _parse(arguments: Sequence[str]) -> _Started:
    asked: list[_Started] = []
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command(context_settings=SETTINGS)
    @functools.wraps(run_command)
    def keep(**given: Any) -> None:
        asked.append(run_command(**given))

    try:
        with options.one_line_errors("syncline run"):
            app(list(arguments), prog_name="syncline run")
    except typer.Exit as exit_:
        sys.exit(exit_.exit_code)
    except SystemExit as exit_:
        if exit_.code or not asked:
            raise
    return asked[0]


SETTINGS = {"allow_interspersed_args": False}
"""What follows the script is the script's."""


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
        from syncline.report.page import write_report
        from syncline.report.story import Story

        records = _records(runner, _WAIT_S if runner.ended == FINISHED else _WAIT_S / 10)
        page = folder / PAGE
        write_report(page, Story(runs=records))
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
