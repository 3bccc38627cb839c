"""Steps that are taken to measure something leave no trace."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


@contextlib.contextmanager
def as_it_was(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts back what steps change: gradients, buffers and random numbers. Parameters are not theirs to change."""
    gradients = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in module.parameters()]
    held = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    with same_random_numbers(device):
        try:
            yield
        finally:
            with torch.no_grad():
                for part, name, buffer, value in held:
                    buffer.copy_(value)
                    part._buffers[name] = buffer  # forward may have put another in its place
                for parameter, gradient, was in gradients:
                    if gradient is not None and was is not None:
                        gradient.copy_(was)
                    parameter.grad = gradient


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Afterwards, those that would have come next come next."""
    states: list[tuple[Callable[[Any], None], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
    ]
    if device.type == "cuda":
        states.append((lambda state: torch.cuda.set_rng_state(state, device), torch.cuda.get_rng_state(device)))
    try:
        yield
    finally:
        for put, state in states:
            put(state)
