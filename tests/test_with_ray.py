"""Ray Train trains with Syncline, and continues from its checkpoint when a worker is killed.

This file is also a script: the driver of the trainings, which the tests start, because Ray's threads must not be in the
process from which other tests fork ranks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[1]
STEPS, EVERY, DIES_AT = 20, 8, 19
TUNED_STEPS = 24
TRAININGS = {"whole": [], "killed": ["--die-at", str(DIES_AT)]}
_LIMIT_S, _ENDED_S = 100.0, 10.0
_MARK = "SYNCLINE_TEST_OF_RAY"
"""A variable that all processes of a Ray session inherit."""


def drive(folder: Path) -> None:
    """Run the trainings in one Ray session. Each worker writes what the example prints to files."""
    import ray
    import ray_text

    def train(options: dict[str, Any]) -> None:
        name, rank = options["storage"].name, ray.train.get_context().get_world_rank()
        rounds = {name: options}
        if name == "whole":  # starting other workers for it would take many seconds
            rounds["tuned"] = {**options, "tune": True, "steps": TUNED_STEPS}
        for name, options in rounds.items():
            with contextlib.redirect_stdout(io.StringIO()) as text:
                ray_text.train(options)
            (folder / f"{name}-{rank}.txt").write_text(text.getvalue())

    ray_text.train = train  # workers import the module anew, and find the example's own function in it
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, _node_ip_address="127.0.0.1")
    for name, more in TRAININGS.items():
        small = {"storage": folder / name, "steps": STEPS, "every": EVERY, "warmup": 4, "width": 64, "batch": 4}
        ray_text.fit(ray_text.options_of([*(f"--{name}={value}" for name, value in small.items()), *more]))
    ray.shutdown()


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
    sys.exit()

if any(importlib.util.find_spec(name) is None for name in ("ray", "pyarrow", "pandas", "pydantic", "fsspec")):
    pytest.skip("Ray Train is not installed: pip install 'syncline[ray]'", allow_module_level=True)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """The trainings' folders. Paths of sockets must be short, so it is not below pytest's own folder."""
    made = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, list[str]]:
    """What each rank printed, by training, after all processes of Ray have ended."""
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "examples"), os.environ.get("PYTHONPATH")])),
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",  # reports to nobody
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # which would print everything twice
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process less
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        _MARK: mark,
    }
    output = folder / "driver.txt"
    with output.open("w") as file:
        driver = subprocess.Popen([sys.executable, __file__, str(folder)], stdout=file, stderr=file, env=environment)
        try:
            status = driver.wait(_LIMIT_S)
            _, left = psutil.wait_procs(processes_of(mark), _ENDED_S)
        finally:
            for process in processes_of(mark):
                process.kill()
            driver.wait()
    assert status == 0, output.read_text()[-8000:]
    assert not left, "Ray left processes behind"
    names = (*TRAININGS, "tuned")
    return {name: [(folder / f"{name}-{rank}.txt").read_text() for rank in range(2)] for name in names}


def processes_of(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                found.append(process)
    return found


def weights(texts: list[str], steps: int) -> str:
    """Return the digest of the weights, which all ranks must agree on."""
    ends = [re.search(rf"rank {rank}: {steps} steps, .* weights ([0-9a-f]+)$", text) for rank, text in enumerate(texts)]
    assert all(ends), texts
    (digest,) = {end.group(1) for end in ends if end is not None}
    return digest


def test_all_ranks_end_with_the_same_weights(said: dict[str, list[str]]) -> None:
    assert weights(said["whole"], STEPS)


def test_a_killed_worker_is_replaced_and_the_weights_are_those_of_an_uninterrupted_training(
    said: dict[str, list[str]], folder: Path
) -> None:
    """Which needs the residual, the anchor and the optimizer state of each rank."""
    assert said["killed"][0].startswith("continuing after step 16\n") and "continuing" not in said["whole"][0]
    assert weights(said["killed"], STEPS) == weights(said["whole"], STEPS)
    survivor = (folder / "killed" / "syncline-failure" / "rank-0.json").read_text()
    assert "failed" in survivor or "not all ranks" in survivor


def test_rays_checkpoint_has_the_state_of_each_rank(said: dict[str, list[str]], folder: Path) -> None:
    checkpoints = sorted((folder / "killed").glob("checkpoint_*/"))
    assert len(checkpoints) == 2, "Ray keeps as many as it was told to"
    for checkpoint in checkpoints:
        assert len(list((checkpoint / "exchange").glob("*.safetensors"))) == 2
        assert not list((checkpoint / "exchange").glob("*.pt"))


def test_a_model_is_tuned_on_rays_workers(said: dict[str, list[str]], folder: Path) -> None:
    assert said["tuned"][0].startswith(f"continuing after step {STEPS}\n")
    assert weights(said["tuned"], TUNED_STEPS)
    assert "syncline: " in "".join(path.read_text() for path in folder.glob("ray/session_2*/logs/worker-*.err"))
