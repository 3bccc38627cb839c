"""A program that runs beside the tests of a module, on a core that they leave idle, until one of them needs its end."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


class Beside:
    """A program that was started: its standard output and errors go to files, so that it never waits for a reader."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._folder = process, folder

    def wait(self, timeout_s: float = 110.0) -> tuple[int, str, str]:
        """Its status, output and errors, when it has ended."""
        status = self._process.wait(timeout_s)
        return status, (self._folder / "output").read_text(), (self._folder / "errors").read_text()


@contextlib.contextmanager
def beside(
    command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[Beside]:
    """Runs `command` for the block; what still runs at its end is killed."""
    with (
        (folder / "output").open("wb") as output,
        (folder / "errors").open("wb") as errors,
        subprocess.Popen(command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=errors) as process,
    ):
        try:
            yield Beside(process, folder)
        finally:
            process.kill()
