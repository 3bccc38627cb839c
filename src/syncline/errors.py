"""The errors that Syncline raises on purpose, and its warnings.

Each message says what was wrong, where, and what to do.
"""

from __future__ import annotations

import contextlib
import re
import warnings


class SynclineError(RuntimeError):
    """Anything that Syncline reports itself, as opposed to a defect in it."""


class UsageError(SynclineError, ValueError):
    """The caller asked for something that cannot be done as asked; commands exit with 2."""


class MismatchError(SynclineError):
    """The ranks of a job do not agree on something they all must agree on."""


class ExchangeError(SynclineError):
    """A gradient exchange failed; the step was not applied and the exchange's state is unusable.

    Of the backward in which it happens, DDP makes a plain RuntimeError that quotes it: catch that, and find this one in
    `handle.error`. Whatever is called after that raises it as it is.
    """


class ClusterError(SynclineError):
    """An emulated cluster could not be set up, or one of its processes failed."""


_WRAPPED = re.compile(r"^Got the following error when running the callback: (RuntimeError: )?")
_SOURCE = re.compile(r"\[/[^\]\s]+\.\w+:\d+\] ")
"""Where in gloo or torch it was raised, on the machine that built them."""


def first_line(error: BaseException) -> str:
    """What it says, as far as one line goes; its type where it says nothing. Without what C++ adds: the callback
    that it went through, a file that nobody has, a word of comfort."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return _SOURCE.sub("", _WRAPPED.sub("", line)).partition(". This is typically caused by")[0]


def tell(text: str) -> None:
    """A warning; where those are errors, it may not stop this rank alone in the middle of a step."""
    with contextlib.suppress(Warning):
        warnings.warn(text, stacklevel=3)
