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
START_S = 30.0
QUIT_S = 10.0


@contextlib.contextmanager
def shared_gpu(directory: Path) -> Iterator[None]:
    """Run an MPS daemon for processes that are started in this context, with its sockets and logs in `directory`.

    If the user has started a daemon, that one is used. If none can be started, a line on standard error says so.
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
    """Start the daemon; return the problem, or None if it listens."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not installed"
    for path in variables.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    log = directory / "start.txt"
    try:
        with log.open("w") as output:  # not a pipe, which the daemon would keep open
            _control("-d", variables=variables, timeout=START_S, check=True, stdin=subprocess.DEVNULL, stdout=output)
    except subprocess.CalledProcessError as error:
        lines = log.read_text(errors="replace").strip().splitlines()
        return f"{PROGRAM} -d exited with {error.returncode}" + (f": {lines[-1]}" if lines else "")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{PROGRAM} -d: {error}"
    return None


def _quit(variables: dict[str, str]) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # the daemon then ends with the cluster
        _control(variables=variables, timeout=QUIT_S, check=False, input=b"quit\n", stdout=subprocess.DEVNULL)


def _control(*arguments: str, variables: dict[str, str], check: bool, **options: Any) -> None:
    environment = {**os.environ, **variables}
    subprocess.run([PROGRAM, *arguments], env=environment, check=check, stderr=subprocess.STDOUT, **options)
