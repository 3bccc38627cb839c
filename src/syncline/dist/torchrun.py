"""Environment variables that torchrun sets for its workers. Without torchrun, a job has one attempt."""

from __future__ import annotations

import os
from collections.abc import Mapping


def run_id(environment: Mapping[str, str] = os.environ) -> str:
    """Return the id of the job, or an empty string without torchrun."""
    return environment.get("TORCHELASTIC_RUN_ID", "")


def attempt(environment: Mapping[str, str] = os.environ) -> str:
    """Return the number of the current attempt, as text. A store may outlive the ranks of an earlier attempt."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0")


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often torchrun may restart the ranks."""
    text = environment.get("TORCHELASTIC_MAX_RESTARTS", "")
    return int(text) if text.isdecimal() and text.isascii() else 0


def keeps_store(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the store belongs to torchrun, which keeps it between attempts. Otherwise rank 0 serves it."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
