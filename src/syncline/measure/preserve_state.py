"""Restore a model's state after steps that only measure."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextlib.contextmanager
def restored_on_exit(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore gradients, buffers and random number generators on exit. Parameters are not saved."""
    gradients = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in module.parameters()]
    buffers = [
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
                for part, name, buffer, value in buffers:
                    buffer.copy_(value)
                    part._buffers[name] = buffer  # forward may have replaced it with another tensor
                for parameter, gradient, saved in gradients:
                    if gradient is not None and saved is not None:
                        gradient.copy_(saved)
                    parameter.grad = gradient


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the state of all random number generators on exit."""
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
        for restore, state in states:
            restore(state)


class Weights:
    """A copy of a model's weights in host memory, to detect and undo changes.

    Tensor versions cannot detect every change: writes through `.data` do not increment them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._copies = {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}

    def changed(self) -> str | None:
        """Return the name of the first parameter whose bits differ from its copy, or None."""
        for name, parameter in self._parameters.items():
            if not torch.equal(_bytes(parameter.detach().cpu()), _bytes(self._copies[name])):
                return name
        return None

    def restore(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._copies[name])


def _bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes, because NaN values do not equal themselves but their bytes do."""
    return tensor.contiguous().view(-1).view(torch.uint8)
