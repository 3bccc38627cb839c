"""CUDA MPS: lets the ranks of an emulated cluster compute on one GPU at the same time.

Without it the GPU takes turns between processes, and a small NCCL all-reduce costs milliseconds of waiting for one's
turn instead of a fraction of one. The daemon runs inside the cluster, so it ends with it, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PROGRAM = "nvidia-cuda-mps-control"
START_S = 30.0
QUIT_S = 10.0


@contextlib.contextmanager
def shared_gpu(directory: Path) -> Iterator[None]:
    """Runs an MPS daemon, with its sockets and logs in `directory`, for processes that are started inside the block.

    A daemon that the user has started is used as it is. Where none can be started, one line says so and ranks share
    the GPU by turns.
    """
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield
        return
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(directory / "log")}
    problem = _start(directory, variables)
    if problem is not None:
        sys.stderr.write(f"syncline: no CUDA MPS ({problem}): ranks time-slice the GPU, which slows small messages\n")
        sys.stderr.flush()
        yield
        return
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        _quit(variables)


def _start(directory: Path, variables: dict[str, str]) -> str | None:
    """None once the daemon listens; otherwise what went wrong."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not installed"
    for path in variables.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    said = directory / "start.txt"
    try:
        with said.open("w") as output:  # a file: the daemon keeps what it inherits, and a pipe would never end
            status = subprocess.run(
                [PROGRAM, "-d"],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=START_S,
                check=False,
            ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{PROGRAM} -d: {error}"
    if status != 0:
        lines = said.read_text(errors="replace").strip().splitlines()
        return f"{PROGRAM} -d exited with {status}" + (f": {lines[-1]}" if lines else "")
    return None


def _quit(variables: dict[str, str]) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # it then ends with the cluster
        subprocess.run(
            [PROGRAM],
            input=b"quit\n",
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=QUIT_S,
            check=False,
        )
