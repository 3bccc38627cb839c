"""Files and messages that nobody should send, and the oracle that says whether they were met as they should be.

A format has valid examples, a way to read them, and a statement of what every object that was read must satisfy. What
is made of an example is either read, and then it satisfies that statement and is the same after it was written and read
again; or it is refused, in one line that begins with the file. All else is a finding: another exception, a warning, a
second of computation, an object that should not exist. (Warnings are for whoever runs cases to turn into errors.)

Everything follows from a seed: a case is made again by its format's name and its number.
"""

from __future__ import annotations

from hostile.files import FILES
from hostile.messages import MESSAGES
from hostile.oracle import Format
from hostile.states import STATE_FORMATS

FORMATS: dict[str, Format] = {format.name: format for format in (*FILES, *STATE_FORMATS, *MESSAGES)}
