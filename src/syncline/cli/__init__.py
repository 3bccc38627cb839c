"""The command line.

`commands` has the options and the help of every command, and `app` turns them into a program. The function
`NAME_command` in one of the other modules does a command's work: it gets the options, and may import torch. A new
option is a new field in `commands`, which that function reads.
"""

from syncline.cli.app import app, main

__all__ = ["app", "main"]
