"""Run a script as Python itself would: with the same arguments, the same first entry of `sys.path` and the same end.

All exceptions of the script reach the caller, `SystemExit` and `KeyboardInterrupt` included, and in the end the
interpreter, which handles them as usual.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from syncline.errors import UsageError


def check_script(script: str, *, module: bool) -> None:
    """Raise a UsageError if there is no such script or module name."""
    if module:
        if not all(part.isidentifier() for part in script.split(".")):
            raise UsageError(f"{script} is not a module name: with -m, write it as in an import statement")
        return
    path = Path(script)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise UsageError(f"{script} is a folder without a __main__.py: name the training script")
    elif not path.exists():
        raise UsageError(f"{script}: no such script")


def run_script(script: str, arguments: Sequence[str], *, module: bool) -> dict[str, Any]:
    """Run the script in this process, as `__main__`.

    Returns:
        Its global variables, which an interpreter keeps alive until it exits.
    """
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # the entry for `syncline run` itself
        sys.path[0] = str(Path.cwd() if module else Path(script).resolve().parent)
    if module:
        return runpy.run_module(script, run_name="__main__", alter_sys=True)
    return runpy.run_path(str(Path(script).absolute()), run_name="__main__")
