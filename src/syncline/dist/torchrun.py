"""What torchrun has told its workers in their environment; without it, what holds for a job that starts once."""

from __future__ import annotations

import os
from collections.abc import Mapping


def run_id(environment: Mapping[str, str] = os.environ) -> str:
    return environment.get("TORCHELASTIC_RUN_ID", "")


def attempt(environment: Mapping[str, str] = os.environ) -> str:
    """Which of a job's starts this is. A store may outlive the ranks of the one before."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0")


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often it would start the ranks again."""
    asked = environment.get("TORCHELASTIC_MAX_RESTARTS", "")
    return int(asked) if asked.isdecimal() and asked.isascii() else 0


def keeps_store(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks meet in torchrun's own store, which it keeps from one attempt to the next; if not, rank 0 serves
    it, where nobody else does."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
