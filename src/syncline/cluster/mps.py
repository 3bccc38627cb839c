"""CUDA MPS: lets the ranks of an emulated cluster compute on one GPU at the same time.

Without it, the GPU switches between processes, and a small NCCL all-reduce waits for milliseconds instead of a fraction
of one. The daemon runs inside the cluster and ends with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = "nvidia-cuda-mps-control"
START_S, QUIT_S = 30.0, 10.0


@contextlib.contextmanager
def shared_gpu(directory: Path) -> Iterator[None]:
    """Run an MPS daemon for processes that are started in this context, with its sockets and logs in `directory`.

    If the user has started a daemon, that one is used. If none can be started, a line on standard error says so.
    """
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(directory / "log")}
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        variables = {}
    elif (problem := _start(directory, variables)) is not None:
        slow = f"syncline: no CUDA MPS ({problem}): ranks time-slice the GPU, which slows small messages"
        print(slow, file=sys.stderr, flush=True)
        variables = {}
    os.environ.update(variables)
    try:
        yield
    finally:
        if variables:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the daemon then ends with the cluster
                subprocess.run([PROGRAM], input=b"quit\n", capture_output=True, timeout=QUIT_S, check=False)
        for name in variables:
            os.environ.pop(name, None)


def _start(directory: Path, variables: dict[str, str]) -> str | None:
    """Start the daemon; return the problem, or None if it listens."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not installed"
    for path in variables.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    environment, log = {**os.environ, **variables}, directory / "start.txt"
    try:
        with log.open("w") as output:  # not a pipe, which the daemon would keep open
            files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            status = subprocess.run([PROGRAM, "-d"], env=environment, timeout=START_S, check=False, **files).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{PROGRAM} -d: {error}"
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"{PROGRAM} -d exited with {status}" + (f": {lines[-1]}" if lines else "") if status else None
