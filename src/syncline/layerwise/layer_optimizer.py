"""Step the layers of a model one by one, through one ordinary optimizer, unless their gradients are not finite.

On the CPU this is checked before the step. On a GPU the host does not wait for the check: fused optimizers read a flag
on the device, as for a GradScaler, and after the step of any other optimizer the layer is restored if it is false.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import UsageError
from syncline.runtime.validation import optimizer_settings

Gradients = Sequence[tuple[nn.Parameter, Tensor]]
"""Parameters with their averaged gradients."""


class LayerOptimizer:
    """Steps some parameters of an optimizer. With `clip_norm`, all layers must step together (`at_end`)."""

    def __init__(self, optimizer: Optimizer, clip_norm: float | None) -> None:
        if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
            raise UsageError(f"{type(optimizer).__name__} cannot step layer by layer: use another optimizer")
        self.optimizer, self._clip_norm = optimizer, clip_norm
        self.at_end = clip_norm is not None

    def step(self, gradients: Gradients, finite: Tensor) -> None:
        """Step these parameters if the 0-dim tensor `finite` is true."""
        parameters = [parameter for parameter, _ in gradients]
        on_device = parameters[0].is_cuda and not self.at_end
        if not on_device and not bool(finite):
            return
        with self._only(gradients):
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm)
            if not on_device:
                self.optimizer.step()
            elif getattr(self.optimizer, "_step_supports_amp_scaling", False):
                fused: Any = self.optimizer
                fused.grad_scale, fused.found_inf = None, (~finite).to(torch.float32)
                try:
                    fused.step()
                finally:
                    del fused.grad_scale, fused.found_inf
            else:
                self._step_and_restore(parameters, finite)

    @contextlib.contextmanager
    def _only(self, gradients: Gradients) -> Iterator[None]:
        """Limit the optimizer to these parameters, with these gradients."""
        chosen = {id(parameter) for parameter, _ in gradients}
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) in chosen]
            for parameter, gradient in gradients:
                parameter.grad = gradient
            yield
        finally:
            for parameter, _ in gradients:
                parameter.grad = None
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def _step_and_restore(self, parameters: Sequence[nn.Parameter], finite: Tensor) -> None:
        new = any(not self.optimizer.state.get(parameter) for parameter in parameters)
        if new and not bool(finite):  # state that the optimizer creates in this step could not be restored
            return
        with torch.no_grad():
            before = {key: tensor.clone() for key, tensor in self._changed_by_step(parameters).items()}
            self.optimizer.step()
            for key, tensor in self._changed_by_step(parameters).items():
                if key in before:
                    torch.where(finite, tensor, before[key], out=tensor)

    def _changed_by_step(self, parameters: Sequence[nn.Parameter]) -> dict[tuple[int, str], Tensor]:
        """Return the tensors on the device that a step changes, by index of the parameter and kind of state."""
        changed = {}
        for index, parameter in enumerate(parameters):
            for kind, value in {"": parameter.detach(), **self.optimizer.state.get(parameter, {})}.items():
                if isinstance(value, Tensor) and value.device == parameter.device:
                    changed[index, kind] = value
        return changed

    def describe(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks."""
        return {**optimizer_settings(self.optimizer), "clip_norm": self._clip_norm}


def state_bytes(optimizer: Optimizer) -> float:
    """Measure the bytes of optimizer state per element, with one step of a copy of the optimizer.

    Raises a UsageError if the optimizer cannot be constructed again from its defaults.
    """
    probe = nn.Parameter(torch.zeros(64, 64))
    probe.grad = torch.zeros_like(probe)
    kind: Any = type(optimizer)
    try:
        known = inspect.signature(kind).parameters  # AdamW's defaults contain a key that is not an argument
        options = {key: value for key, value in optimizer.defaults.items() if key in known and key != "fused"}
        copy = kind([probe], **options)
        copy.step()
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"the state size of {kind.__name__} cannot be measured ({error})"
        raise UsageError(f"{text}: leave out memory_budget") from error
    tensors = [value for value in copy.state[probe].values() if isinstance(value, Tensor) and value.numel() > 1]
    return sum(tensor.nbytes for tensor in tensors) / probe.numel()
