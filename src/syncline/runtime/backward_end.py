"""Run something when a backward pass has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def when_backward_ends(call: Callable[[], None]) -> bool:
    """Schedule `call` for after the callbacks that DDP and FSDP queue in this backward pass. Return False outside one.

    A callback that another callback queues runs after those that were queued before.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    try:
        engine.queue_callback(lambda: engine.queue_callback(call))
    except RuntimeError:
        return False
    return True
