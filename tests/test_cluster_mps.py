"""CUDA MPS for ranks that share a GPU, with a stand-in for NVIDIA's program that records its calls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from syncline.cluster import ClusterSpec, Rank, launch, why_not_shaped
from syncline.cluster.mps import PROGRAM, shared_gpu

needs_namespaces = pytest.mark.skipif(why_not_shaped() is not None, reason=f"no namespaces: {why_not_shaped()}")
both_ways = pytest.mark.parametrize("shaped", [pytest.param(True, marks=needs_namespaces), False])

FAKE = """#!/bin/sh
# Like the real one: -d starts a daemon that keeps inherited files open; without -d, it reads commands from stdin.
log={log}
if [ "$1" = -d ]; then
    echo "start $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> $log
    setsid sh -c 'echo $$ > "$CUDA_MPS_PIPE_DIRECTORY/pid"; exec sleep 1000' &
    while [ ! -s "$CUDA_MPS_PIPE_DIRECTORY/pid" ]; do :; done
else
    read command
    echo "$command $CUDA_MPS_PIPE_DIRECTORY" >> $log
    kill $(cat "$CUDA_MPS_PIPE_DIRECTORY/pid")
fi
"""


def install(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / PROGRAM
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    log = tmp_path / "calls"
    log.touch()
    install(tmp_path, FAKE.format(log=log), monkeypatch)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return log


def test_the_daemon_runs_for_the_block_with_a_folder_of_its_own(calls: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mps"
    folder.mkdir()
    with shared_gpu(folder):
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(folder / "pipe")
        assert (folder / "log").is_dir()
        assert calls.read_text() == f"start {folder}/pipe {folder}/log\n"
    assert calls.read_text().splitlines()[1:] == [f"quit {folder}/pipe"]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


@both_ways
def test_ranks_of_a_cuda_cluster_find_the_daemon_and_nothing_is_left_of_it(calls: Path, shaped: bool) -> None:
    def main(rank: Rank) -> list[str]:
        folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        os.kill(int(Path(folder, "pid").read_text()), 0)  # alive, and in our PID namespace
        return [folder, os.environ["NCCL_HOSTID"]]

    found = launch(ClusterSpec(hosts=2, device="cuda"), main, shaped=shaped)
    ((folder, first), (same_folder, second)) = found
    assert folder == same_folder
    assert first != second
    assert calls.read_text() == f"start {folder} {Path(folder).parent}/log\nquit {folder}\n"
    assert not Path(folder).parent.exists()


def test_a_cluster_without_cuda_starts_no_daemon(calls: Path) -> None:
    launch(ClusterSpec(hosts=1), lambda _: None, shaped=False)
    assert calls.read_text() == ""


def test_a_daemon_that_the_user_runs_is_left_alone(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/the-users-own")
    with shared_gpu(tmp_path):
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/run/the-users-own"
    assert calls.read_text() == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "nvidia-cuda-mps-control is not installed"),
        ("#!/bin/sh\necho already running >&2; exit 1\n", "nvidia-cuda-mps-control -d exited with 1: already running"),
    ],
)
def test_a_missing_daemon_is_reported_in_one_line(
    text: str | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        install(tmp_path, text, monkeypatch)
    with shared_gpu(tmp_path):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"syncline: no CUDA MPS ({reason}): ranks time-slice the GPU")
