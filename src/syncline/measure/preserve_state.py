"""Restore a model's state after steps that only measure."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn


@contextlib.contextmanager
def restored_on_exit(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore gradients, buffers and random number generators on exit. Parameters are not saved."""
    gradients = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in module.parameters()]
    named = [(part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]
    buffers = [(part, name, buffer, buffer.detach().clone()) for part, name, buffer in named if buffer is not None]
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
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


class Weights:
    """A copy of a model's weights in host memory, to detect and undo changes. Tensor versions cannot detect every
    change: writes through `.data` do not increment them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._copies = {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}

    def changed(self) -> str | None:
        """Return the name of the first parameter whose bits differ from its copy, or None."""
        for name, parameter in self._parameters.items():
            pair = (parameter.detach().cpu(), self._copies[name])
            # NaN values do not equal themselves, but their bytes do.
            if not torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in pair)):
                return name
        return None

    def restore(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._copies[name])
