"""The command line.

`commands` has the options and the help of every command, `app` turns them into a program, and the module of a
command's name does its work: its `main` gets the options, and may import torch. A new option is a new field in
`commands`, which that function reads.
"""

from syncline.cli.app import app, main

__all__ = ["app", "main"]
