"""The command line.

A command is a dataclass in `commands`: its fields are the options, and its docstring is the help. Its `start` method
calls the function in the module of the same name in this package, which does the work and may import torch. A new
option is a new field of the dataclass, which that function reads.
"""

from syncline.cli.commands import app, main

__all__ = ["app", "main"]
