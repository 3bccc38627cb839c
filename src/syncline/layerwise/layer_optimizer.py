"""Step the layers of a model one by one, through one ordinary optimizer.

While a layer steps, the optimizer's parameter groups contain only the parameters of that layer. A result that is not
finite is not applied. On the CPU this is checked before the step. On a GPU the host does not wait for the check: fused
optimizers read a flag on the device, as for a GradScaler, and after the step of any other optimizer the layer is
restored where the flag is false.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import UsageError
from syncline.exchange.workspace import Workspace
from syncline.layerwise.bucketing import Piece

Results = Sequence[tuple[nn.Parameter, Tensor]]
"""Parameters with the results of their exchange."""


class LayerOptimizer(Protocol):
    """Turns the result of an exchange into a step of some parameters."""

    @property
    def mirror(self) -> bool:
        """Whether updates are exchanged instead of gradients."""

    @property
    def at_end(self) -> bool:
        """Whether all layers step together, at the end of the backward pass."""

    def before(self, pieces: Sequence[Piece], flat: Tensor, workspace: Workspace) -> None:
        """Turn a bucket of gradients into the values to exchange, in place."""

    def after(self, pieces: Sequence[Piece], flat: Tensor, finite: Tensor, workspace: Workspace) -> None:
        """Commit the state of a bucket after its exchange, where the 0-dim tensor `finite` is true."""

    def step(self, results: Results, finite: Tensor) -> None:
        """Step these parameters if `finite` is true."""

    def end(self) -> None:
        """Finish a step, after all layers have stepped."""

    def describe(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks."""


def layer_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], *, mirror: bool, clip_norm: float | None
) -> LayerOptimizer:
    """Return the `LayerOptimizer` for an optimizer. Raise if the optimizer cannot step layer by layer."""
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise UsageError(f"{type(optimizer).__name__} cannot step layer by layer: use another optimizer")
    if not mirror:
        return GradientOptimizer(optimizer, clip_norm)
    if clip_norm is not None:
        raise UsageError("mirror=True exchanges updates, to which clip_norm does not apply: leave out clip_norm")
    return MirrorOptimizer(optimizer, parameters)


class GradientOptimizer:
    """Exchanges gradients: the optimizer steps with their average."""

    mirror = False

    def __init__(self, optimizer: Optimizer, clip_norm: float | None) -> None:
        self._optimizer, self._clip_norm = optimizer, clip_norm

    @property
    def at_end(self) -> bool:
        return self._clip_norm is not None

    def before(self, pieces: Sequence[Piece], flat: Tensor, workspace: Workspace) -> None:
        """Exchange the gradients unchanged."""

    def after(self, pieces: Sequence[Piece], flat: Tensor, finite: Tensor, workspace: Workspace) -> None:
        """Gradients have no state of their own."""

    def step(self, results: Results, finite: Tensor) -> None:
        on_device = results[0][1].is_cuda and not self.at_end
        if not on_device and not bool(finite):
            return
        with _only(self._optimizer, results) as optimizer:
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([parameter for parameter, _ in results], self._clip_norm)
            if not on_device:
                optimizer.step()
            elif getattr(optimizer, "_step_supports_amp_scaling", False):
                self._step_if(finite)
            else:
                self._step_and_restore([parameter for parameter, _ in results], finite)

    def end(self) -> None:
        """All layers have stepped already."""

    def _step_if(self, finite: Tensor) -> None:
        fused: Any = self._optimizer
        fused.grad_scale, fused.found_inf = None, (~finite).to(torch.float32)
        try:
            fused.step()
        finally:
            del fused.grad_scale, fused.found_inf

    def _step_and_restore(self, parameters: Sequence[nn.Parameter], finite: Tensor) -> None:
        new = any(not self._optimizer.state.get(parameter) for parameter in parameters)
        if new and not bool(finite):  # state that the optimizer creates in this step could not be restored
            return
        with torch.no_grad():
            before = {key: tensor.clone() for key, tensor in self._touched(parameters)}
            self._optimizer.step()
            for key, tensor in self._touched(parameters):
                if key in before:
                    torch.where(finite, tensor, before[key], out=tensor)

    def _touched(self, parameters: Sequence[nn.Parameter]) -> list[tuple[tuple[int, str], Tensor]]:
        """Return the tensors that a step changes on the device, with a key for each."""
        touched: list[tuple[tuple[int, str], Tensor]] = []
        for parameter in parameters:
            touched.append(((id(parameter), ""), parameter.detach()))
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.device == parameter.device:
                    touched.append(((id(parameter), str(kind)), value))
        return touched

    def describe(self) -> dict[str, Any]:
        return {**_described(self._optimizer), "mirror": False, "clip_norm": self._clip_norm}


class MirrorOptimizer:
    """Exchanges updates: each rank computes its own update with its own velocity, and the mean update is applied."""

    mirror = True
    at_end = False

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        if type(optimizer) is not torch.optim.SGD:
            raise UsageError(
                f"mirror=True supports only torch.optim.SGD, not {type(optimizer).__name__}: leave out mirror. Other "
                "optimizers give different results on the gradients of a single rank"
            )
        for group in optimizer.param_groups:
            for option in ("dampening", "maximize"):
                if group.get(option):
                    raise UsageError(f"mirror=True does not support SGD({option}={group[option]!r}): leave it out")
        for name, parameter in parameters.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise UsageError(f"mirror=True needs float32 or float64 weights, but {name} is {parameter.dtype}")
        self._optimizer, self._parameters = optimizer, parameters
        self._group_of = {
            id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }

    def before(self, pieces: Sequence[Piece], flat: Tensor, workspace: Workspace) -> None:
        velocity, offset = workspace.take("mirror", (flat.numel(),), flat.dtype), 0
        for piece in pieces:
            parameter = self._parameters[piece.name]
            group = self._optimizer.param_groups[self._group_of[id(parameter)]]
            rate, momentum, decay = (float(group[key]) for key in ("lr", "momentum", "weight_decay"))
            update = flat[offset : offset + piece.numel]
            new = velocity[offset : offset + piece.numel]
            if decay:
                update.add_(piece.of(parameter.detach()), alpha=decay)
            if momentum:
                torch.add(update, piece.of(self._velocity(parameter)), alpha=momentum, out=new)
                if group["nesterov"]:
                    update.add_(new, alpha=momentum)
                else:
                    update.copy_(new)
            update.mul_(rate)
            offset += piece.numel

    def after(self, pieces: Sequence[Piece], flat: Tensor, finite: Tensor, workspace: Workspace) -> None:
        velocity, offset = workspace.take("mirror", (flat.numel(),), flat.dtype), 0
        for piece in pieces:
            parameter = self._parameters[piece.name]
            if self._optimizer.param_groups[self._group_of[id(parameter)]]["momentum"]:
                held = piece.of(self._velocity(parameter))
                torch.where(finite, velocity[offset : offset + piece.numel], held, out=held)
            offset += piece.numel

    def step(self, results: Results, finite: Tensor) -> None:
        with torch.no_grad():
            for parameter, update in results:  # updates that are not finite were set to zero
                parameter.sub_(update)

    def end(self) -> None:
        with _only(self._optimizer, []) as optimizer:
            optimizer.step()  # changes nothing, but schedulers expect the call

    def _velocity(self, parameter: nn.Parameter) -> Tensor:
        state = self._optimizer.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity: Tensor = state["momentum_buffer"]
        return velocity

    def describe(self) -> dict[str, Any]:
        return {**_described(self._optimizer), "mirror": True}


@contextlib.contextmanager
def _only(optimizer: Optimizer, results: Results) -> Iterator[Optimizer]:
    """Limit an optimizer to these parameters, with the results as their gradients."""
    chosen = {id(parameter) for parameter, _ in results}
    groups: list[dict[str, Any]] = optimizer.param_groups
    whole = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in chosen]
        for parameter, gradient in results:
            parameter.grad = gradient
        yield optimizer
    finally:
        for parameter, _ in results:
            parameter.grad = None
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = parameters


def state_bytes(optimizer: Optimizer) -> float:
    """Measure the bytes of optimizer state per element, with one step of a copy of the optimizer.

    Raises:
        UsageError: The optimizer cannot be constructed again from its defaults.
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
        raise UsageError(
            f"the state size of {kind.__name__} cannot be measured ({error}): leave out memory_budget"
        ) from error
    tensors = [value for value in copy.state[probe].values() if isinstance(value, Tensor) and value.numel() > 1]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / probe.numel()


def _described(optimizer: Optimizer) -> dict[str, Any]:
    groups = {}
    for index, group in enumerate(optimizer.param_groups):
        plain = {key: _plain(value) for key, value in group.items() if key != "params"}
        groups[f"group {index}"] = {"parameters": len(group["params"]), **plain}
    return {"type": type(optimizer).__name__, **groups}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    return value if isinstance(value, bool | int | float | str | None) else repr(value)
