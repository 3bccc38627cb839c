"""The command line: `commands` has what can be typed, and a module beside it does the work of each command."""

from syncline.cli.commands import app, main

__all__ = ["app", "main"]
