"""The command line: `commands` has the options and help of each command; a module of the same name does its work.

A command is a dataclass in `commands`, whose fields are the options. Its work is a function in the module of the same
name in this package, which takes that dataclass and may import torch. A new option is a new field of the dataclass.
"""

from syncline.cli.commands import app, main

__all__ = ["app", "main"]
