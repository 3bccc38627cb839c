"""Steps that are taken to measure something must leave no trace."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


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


class Weights:
    """A copy of a model's weights in the host's memory, to tell whether steps have changed one, and to put it back.

    A tensor's version would not tell: writes through `.data` do not count there.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._copies = {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}

    def changed(self) -> str | None:
        """Return the name of the first parameter that has other bits than its copy, if any has."""
        for name, parameter in self._parameters.items():
            now, copy = (_bytes(tensor) for tensor in (parameter.detach().cpu(), self._copies[name]))
            if not torch.equal(now, copy):
                return name
        return None

    def restore(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._copies[name])


def _bytes(tensor: Tensor) -> Tensor:
    """NaNs are not equal to themselves, but their bits are."""
    return tensor.contiguous().view(-1).view(torch.uint8)
