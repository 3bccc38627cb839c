"""The errors that Syncline raises, and its warnings. Each message says what was wrong, where, and what to do."""

from __future__ import annotations

import contextlib
import re
import warnings


class SynclineError(RuntimeError):
    """The base class of all errors that Syncline raises."""


class UsageError(SynclineError, ValueError):
    """A call or command has arguments that are not valid. Commands exit with status 2."""


class MismatchError(SynclineError):
    """The ranks of a job differ in something that must be the same on all of them."""


class ExchangeError(SynclineError):
    """A gradient exchange failed. The step was not applied, and the state of the exchange is unusable.

    If the failure happens in backward, DDP converts this error to a plain RuntimeError that quotes it, and
    `handle.error` has the original. Later calls raise this error directly.
    """


class ClusterError(SynclineError):
    """An emulated cluster could not be set up, or one of its processes failed."""


_WRAPPED = re.compile(r"^(Got the following error when running the callback: (RuntimeError: )?|\[Errno -?\d+\] )")
_SOURCE = re.compile(r"\[(enforce fail at )?/[^\]\s]+\.\w+:\d+\] ")
"""Source files of gloo or torch, with the paths of the machine that built them."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty.

    It has no error numbers, and no parts that C++ code adds, such as paths of source files and general advice.
    """
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return _SOURCE.sub("", _WRAPPED.sub("", line)).partition(". This is typically caused by")[0]


def warn(text: str) -> None:
    """Issue a warning. It does not raise if warnings are errors, because that would stop a step on one rank only."""
    with contextlib.suppress(Warning):
        warnings.warn(text, stacklevel=3)
