"""Runs a script as Python itself would: same arguments, same first place to import from, same end.

Whatever the script raises goes on to whoever called, `SystemExit` and `KeyboardInterrupt` included: to the interpreter
in the end, which then does what it always does.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from syncline.errors import UsageError


def check_script(script: str, *, module: bool) -> None:
    if module:
        if not all(part.isidentifier() for part in script.split(".")):
            raise UsageError(f"{script} is no module's name: with -m, write it as Python imports it")
        return
    path = Path(script)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise UsageError(f"{script} is a folder without a __main__.py: name the training script")
    elif not path.exists():
        raise UsageError(f"{script}: there is no such script")


def run_script(script: str, arguments: Sequence[str], *, module: bool) -> dict[str, Any]:
    """In this process, as `__main__` → the names that it leaves, which an interpreter keeps to its end."""
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # the place that `syncline run` itself was started from
        sys.path[0] = str(Path.cwd() if module else Path(script).resolve().parent)
    if module:
        return runpy.run_module(script, run_name="__main__", alter_sys=True)
    return runpy.run_path(str(Path(script).absolute()), run_name="__main__")
