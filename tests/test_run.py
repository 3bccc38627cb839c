"""`syncline run`: unmodified scripts train as without it, and their models are followed."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.cli.app import run_script
from syncline.cluster import ClusterSpec, Rank, launch, why_not_shaped
from syncline.measure.assumed_network import assumed_links
from syncline.records.network import Network
from syncline.records.run_record import RunRecord

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
TWO = ClusterSpec(hosts=2)
pytestmark = pytest.mark.skipif(why_not_shaped() is not None, reason=f"no namespaces: {why_not_shaped()}")


def network(folder: Path) -> Path:
    """Write links with long start-ups, so that nothing is probed and a plan for the script's small buckets pays."""
    path = folder / "network.json"
    links = assumed_links((0, 1), backend="gloo")
    slow = tuple(one.scaled(50.0, 50.0, 50.0) for one in links.collectives)
    msgspec.structs.replace(links, collectives=slow).save(path)
    return path


def as_a_script(rank: Rank, arguments: list[str]) -> dict[str, Any]:
    """Run `syncline run`, and return how the interpreter would see it end."""
    rank.init_process_group()
    torch.set_num_threads(1)
    wrapped = {DDP: "__init__", torch.Tensor: "backward", torch.optim.Optimizer: "__init__", GradScaler: "step"}
    originals = {owner: getattr(owner, name) for owner, name in wrapped.items()}
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - messages are not tested here
    ended: dict[str, Any] = {}
    try:
        run_script(arguments)
    except SystemExit as exit_:
        ended["status"] = exit_.code
    except BaseException as error:  # noqa: BLE001 - raised by the script
        ended["error"] = f"{type(error).__name__}: {error}"
    assert originals == {owner: getattr(owner, name) for owner, name in wrapped.items()}
    return ended


def plainly(rank: Rank, arguments: list[str]) -> None:
    rank.init_process_group()
    torch.set_num_threads(1)
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def losses(folder: Path) -> list[list[float]]:
    return [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "flags",
    [[], ["--accumulate", "2", "--models", "2"]],
    ids=["plain", "gradient accumulation in two models"],
)
def test_a_script_trains_as_without_syncline(flags: list[str], tmp_path: Path) -> None:
    with_us, without = tmp_path / "with", tmp_path / "without"
    with_us.mkdir(), without.mkdir()
    launch(TWO, lambda rank: plainly(rank, [*flags, "--losses", str(without)]))
    command = ["--network", str(network(tmp_path)), "--out", str(tmp_path / "out"), str(SCRIPT), *flags]
    ended = launch(TWO, lambda rank: as_a_script(rank, [*command, "--losses", str(with_us)]))
    assert ended == [{"status": 0}] * 2
    for ours, theirs in zip(losses(with_us), losses(without), strict=True):
        assert len(ours) == len(theirs)
        assert ours == pytest.approx(theirs, rel=1e-5)
    for rank in range(2):
        record = RunRecord.load(tmp_path / "out" / f"rank-{rank:04d}.json")
        assert record.ended == "finished"
        assert len(record.models) == len(losses(with_us)[0]) // 64
        for model in record.models:
            assert model.steps == 64
            assert model.host_of_rank == (0, 1)
            assert sum(pace.steps for pace in model.paces) == 64
            assert {"plain DDP", "the plan"} == {pace.way for pace in model.paces}, model.outcome
            assert "Tried: plain DDP" in model.outcome
            planned = [span for span in model.spans if span.way == "the plan" and span.buckets]
            assert planned
            for span in planned:
                assert all(bucket.ready_s <= bucket.start_s <= bucket.end_s for bucket in span.buckets)
                assert all(span.start_s <= bucket.ready_s <= span.end_s for bucket in span.buckets)
        assert (record.models[0].plan is not None) == (rank == 0)  # only rank 0 writes what is the same on all ranks
    recorded = RunRecord.load(tmp_path / "out" / "rank-0000.json").models[0].losses
    assert len(recorded) == 64
    if not flags:
        assert [loss.value for loss in recorded] == pytest.approx(losses(with_us)[0])
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!")


def test_a_script_sees_the_environment_that_python_would_give_it(tmp_path: Path) -> None:
    script = tmp_path / "folder" / "look.py"
    script.parent.mkdir()
    script.write_text(
        "import json, sys\nfrom pathlib import Path\n"
        "Path(sys.argv[1]).write_text(json.dumps([__file__, sys.path[0], __name__, len(sys.argv), sys.path.count('')]))"
    )
    out, seen = tmp_path / "out", tmp_path / "seen.json"
    out.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "syncline.run", "--out", str(out), "folder/look.py", str(seen), "--quality=same"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(seen.read_text()) == [str(script), str(script.parent), "__main__", 3, 0]
    assert "--quality is passed to the script, because it is after its name" in ran.stderr
    assert "built no DistributedDataParallel model" in ran.stderr
    assert not list(out.iterdir())


def test_a_script_that_crashes_ends_as_without_syncline_and_leaves_a_report(tmp_path: Path) -> None:
    command = ["--network", str(network(tmp_path)), "--out", str(tmp_path / "out"), str(SCRIPT)]
    crash = ["--losses", str(tmp_path), "--crash-at", "30"]
    ended = launch(TWO, lambda rank: as_a_script(rank, [*command, *crash]))
    assert ended == [{"error": "RuntimeError: half-way"}] * 2
    record = RunRecord.load(tmp_path / "out" / "rank-0000.json")
    assert record.ended == "ended by RuntimeError: half-way"
    assert record.models[0].steps == 31
    assert (tmp_path / "out" / "report.html").exists()


def test_a_requested_exchange_is_attached(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for rank in (0, 1, 7):  # files of an earlier run with more ranks
        (tmp_path / "out" / f"rank-{rank:04d}.json").write_text("")
    command = ["--exchange", "bf16", "--out", str(tmp_path / "out"), str(SCRIPT), "--steps", "6"]
    launch(TWO, lambda rank: as_a_script(rank, [*command, "--losses", str(tmp_path)]))
    model = RunRecord.load(tmp_path / "out" / "rank-0000.json").models[0]
    assert not (tmp_path / "out" / "rank-0007.json").exists()
    assert model.way == "bf16"
    assert model.paces[0].sent_bytes == model.gradient_bytes // 2
    detailed = [span for span in model.spans if span.buckets]
    assert [span.step for span in detailed] == [2, 3, 4]
    assert all(bucket.phases for span in detailed for bucket in span.buckets)  # the trace shows them


@pytest.mark.parametrize(
    ("flags", "script"),
    [
        (["--warmup", "4"], []),
        (["--warmup", "0"], ["--optimizers", "early"]),
        (["--warmup", "2", "--every", "3", "--delay", "1"], ["--accumulate", "2", "--models", "2"]),
        (["--warmup", "0"], ["--scaler"]),
    ],
    ids=["a warm-up", "the optimizer before DDP", "local steps of two models with accumulation", "a scaler that skips"],
)
def test_updates_of_the_scripts_optimizer_are_exchanged(flags: list[str], script: list[str], tmp_path: Path) -> None:
    out, steps = tmp_path / "out", 12
    command = ["--exchange", "oktopk", "--updates", *flags, "--out", str(out), str(SCRIPT), "--steps", str(steps)]
    ended = launch(TWO, lambda rank: as_a_script(rank, [*command, *script, "--losses", str(tmp_path)]))
    assert ended == [{"status": 0}] * 2
    for rank in range(2):
        record = RunRecord.load(out / f"rank-{rank:04d}.json")
        for model in record.models:
            assert model.way == "updates by oktopk"
            assert model.outcome.startswith("As requested, updates by OkTopk(density=0.01")
            assert model.outcome.endswith("updates of SGD from step 1 on.")
            skipped = 1 if "--scaler" in script and rank == 1 else 0  # it counts with the next step
            assert model.steps == steps - skipped
            warm = int(flags[1])
            counts = {pace.way: pace.steps for pace in model.paces}
            assert counts[model.way] == steps - 1 - warm - skipped
            assert counts.get("the warm-up", 0) == (warm if warm > 2 else 0)  # the first two steps do not count
            assert next(pace for pace in model.paces if pace.way == model.way).sent_bytes > 0
            assert len(model.losses) == steps - skipped
    weights = [json.loads((tmp_path / f"weights-{rank}.json").read_text()) for rank in range(2)]
    if "--every" not in flags:
        assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("two", "--updates: 2 optimizers have parameters of Sequential (Adam and SGD): use one optimizer with"),
        ("none", "--updates: no optimizer of torch has the parameters of Sequential, which has made a step: use a"),
    ],
)
def test_a_script_without_one_optimizer_is_refused_with_one_line(script: str, message: str, tmp_path: Path) -> None:
    command = ["--exchange", "oktopk", "--updates", "--out", str(tmp_path / "out"), str(SCRIPT)]
    command += ["--optimizers", script, "--losses", str(tmp_path)]
    assert launch(TWO, lambda rank: as_a_script(rank, command)) == [{"status": 2}] * 2
    assert f"UsageError: {message}" in RunRecord.load(tmp_path / "out" / "rank-0000.json").ended


def test_observing_changes_nothing_and_reports_the_plan(tmp_path: Path) -> None:
    command = ["--observe-only", "--network", str(network(tmp_path)), "--out", str(tmp_path / "out"), str(SCRIPT)]
    flags = ["--steps", "16", "--losses", str(tmp_path)]
    launch(TWO, lambda rank: as_a_script(rank, [*command, *flags]))
    model = RunRecord.load(tmp_path / "out" / "rank-0000.json").models[0]
    assert model.way == "plain DDP"
    assert model.outcome.startswith("Only observed. ")
    assert model.plan is not None
    assert model.profile is not None


def test_a_plan_for_another_model_is_one_line_and_status_2(tmp_path: Path) -> None:
    from syncline.plan.make import make_plan
    from syncline.records.profile import load_profile

    links = Network.load(network(tmp_path))
    make_plan(load_profile("cnn-cpu"), links).save(tmp_path / "plan.json")
    command = ["--plan", str(tmp_path / "plan.json"), "--out", str(tmp_path / "out"), str(SCRIPT)]
    ended = launch(TWO, lambda rank: as_a_script(rank, [*command, "--losses", str(tmp_path)]))
    assert ended == [{"status": 2}] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "nowhere.py: no such script"),
        (["--exchange", "quick", str(SCRIPT)], "--exchange quick: unknown exchange; known: dense"),
        (["--exchange", "bf16", "--plan", "p.json", "x.py"], "exclude each other"),
        (["--exchange", "bf16", "--observe-only", "x.py"], "are for tuning, which --exchange and --plan replace"),
        (["--allow", "everything", str(SCRIPT)], "everything"),
        (["--quality", "best", str(SCRIPT)], "quality is 'best': it must be one of exact, same, close"),
        (["--quality", "same", "--allow", "bf16", str(SCRIPT)], "--quality and --allow exclude each other"),
        (["--quality", "same", "--exchange", "bf16", str(SCRIPT)], "are for tuning, which --exchange and --plan"),
        (["--updates", str(SCRIPT)], "--updates needs the exchange to use: add --exchange"),
        (["--exchange", "oktopk", "--every", "5", str(SCRIPT)], "--every, --warmup and --delay are for updates"),
        (["--exchange", "oktopk", "--updates", "--every", "0", str(SCRIPT)], "every is 0: it must be a number of"),
        (["--exchange", "oktopk", "--updates", "--delay", "1", str(SCRIPT)], "delay is 1, but with every=1"),
        (["--plan", "nowhere.json", str(SCRIPT)], "nowhere.json: cannot be read"),
        (["--probe", "0", str(SCRIPT)], "1 to 3600 seconds"),
        (["--timeout", "0", str(SCRIPT)], "--timeout 0: must be greater than 0"),
        (["--out", str(SCRIPT), str(SCRIPT)], "is a file; name a folder"),
        (["--out", "/proc/nowhere", str(SCRIPT)], "/proc/nowhere: cannot be created"),
        (["-m", "not a module"], "is not a module name"),
        ([], "Missing argument"),
        (["--no-such-option", str(SCRIPT)], "No such option"),
    ],
)
def test_wrong_use_is_refused_before_the_script_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run_script(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run_script(["--help"])
    assert exit_.value.code == 0
    assert "--observe-only" in (text := capsys.readouterr().out)
    assert len(text.splitlines()) <= 50


def test_torchrun_starts_it_and_ctrl_c_ends_it_as_without_syncline(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, sys, time\nassert sys.argv[1:] == ['--epochs', '3']\nassert __name__ == '__main__'\n"
        "print('argv and rank', os.environ['RANK'], flush=True)\ntime.sleep(100)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    with subprocess.Popen(
        [*command, "-m", "syncline.run", "--out", str(tmp_path / "out"), str(script), "--epochs", "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "argv and rank 0\n"
            os.killpg(process.pid, signal.SIGINT)  # to the whole process group, as a terminal does
            _, errors = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
