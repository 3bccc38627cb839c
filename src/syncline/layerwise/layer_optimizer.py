"""How layers take their steps, one by one, through one ordinary optimizer.

An optimizer steps those of its parameters that it has at the moment: for a layer's step it has only that layer's. What
is not finite is not applied. On the CPU that is known at once; on a GPU nobody waits to know it: fused optimizers ask a
flag on the device, as for a GradScaler, and for others the layer is put back where the flag says so.
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
"""Parameters, and what the exchange made of their gradients."""


class Stepping(Protocol):
    @property
    def mirror(self) -> bool:
        """Whether updates are exchanged, and not gradients."""

    @property
    def at_end(self) -> bool:
        """Whether all layers step together, at the end of backward."""

    def before(self, pieces: Sequence[Piece], flat: Tensor, workspace: Workspace) -> None:
        """Turns a bucket of gradients into what is exchanged."""

    def after(self, pieces: Sequence[Piece], flat: Tensor, finite: Tensor, workspace: Workspace) -> None:
        """The bucket's exchange has ended, and counts if this 0-dim tensor is true."""

    def step(self, results: Results, finite: Tensor) -> None:
        """Steps these parameters, unless this is false."""

    def end(self) -> None:
        """All layers have taken their steps."""

    def describe(self) -> dict[str, Any]:
        """What all ranks must agree on."""


def of_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], *, mirror: bool, clip_norm: float | None
) -> Stepping:
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise UsageError(f"{type(optimizer).__name__} cannot step layer by layer: use another optimizer")
    if not mirror:
        return Gradients(optimizer, clip_norm)
    if clip_norm is not None:
        raise UsageError("mirror=True exchanges updates, which cannot be clipped as gradients: leave out clip_norm")
    return Mirror(optimizer, parameters)


class Gradients:
    """G: the optimizer gets averaged gradients."""

    mirror = False

    def __init__(self, optimizer: Optimizer, clip_norm: float | None) -> None:
        self._optimizer, self._clip_norm = optimizer, clip_norm

    @property
    def at_end(self) -> bool:
        return self._clip_norm is not None

    def before(self, pieces: Sequence[Piece], flat: Tensor, workspace: Workspace) -> None:
        """As it is."""

    def after(self, pieces: Sequence[Piece], flat: Tensor, finite: Tensor, workspace: Workspace) -> None:
        """Nothing was changed."""

    def step(self, results: Results, finite: Tensor) -> None:
        on_device = results[0][1].is_cuda and not self.at_end
        if not on_device and not bool(finite):
            return
        with _having_only(self._optimizer, results) as optimizer:
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([parameter for parameter, _ in results], self._clip_norm)
            if not on_device:
                optimizer.step()
            elif getattr(optimizer, "_step_supports_amp_scaling", False):
                self._step_if(finite)
            else:
                self._step_and_put_back([parameter for parameter, _ in results], finite)

    def end(self) -> None:
        """The optimizer has stepped them all."""

    def _step_if(self, finite: Tensor) -> None:
        fused: Any = self._optimizer
        fused.grad_scale, fused.found_inf = None, (~finite).to(torch.float32)
        try:
            fused.step()
        finally:
            del fused.grad_scale, fused.found_inf

    def _step_and_put_back(self, parameters: Sequence[nn.Parameter], finite: Tensor) -> None:
        new = any(not self._optimizer.state.get(parameter) for parameter in parameters)
        if new and not bool(finite):  # once: state that is made in a step that does not count could not be put back
            return
        with torch.no_grad():
            before = {key: tensor.clone() for key, tensor in self._touched(parameters)}
            self._optimizer.step()
            for key, tensor in self._touched(parameters):
                if key in before:
                    torch.where(finite, tensor, before[key], out=tensor)

    def _touched(self, parameters: Sequence[nn.Parameter]) -> list[tuple[tuple[int, str], Tensor]]:
        """What a step changes on the device."""
        found: list[tuple[tuple[int, str], Tensor]] = []
        for parameter in parameters:
            found.append(((id(parameter), ""), parameter.detach()))
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.device == parameter.device:
                    found.append(((id(parameter), str(kind)), value))
        return found

    def describe(self) -> dict[str, Any]:
        return {**_described(self._optimizer), "mirror": False, "clip_norm": self._clip_norm}


class Mirror:
    """U: each rank's optimizer makes its own update, and updates are exchanged. Velocities are each rank's own."""

    mirror = True
    at_end = False

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        if type(optimizer) is not torch.optim.SGD:
            raise UsageError(
                f"mirror=True is for torch.optim.SGD, not {type(optimizer).__name__}: on each rank's own gradients "
                "others are another algorithm. Leave out mirror"
            )
        for group in optimizer.param_groups:
            for option in ("dampening", "maximize"):
                if group.get(option):
                    raise UsageError(f"mirror=True does not know SGD({option}={group[option]!r}): leave it out")
        for name, parameter in parameters.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise UsageError(f"mirror=True needs weights of 32 bits, and {name} is {parameter.dtype}")
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
            for parameter, update in results:  # zero where it does not count
                parameter.sub_(update)

    def end(self) -> None:
        with _having_only(self._optimizer, []) as optimizer:
            optimizer.step()  # which schedulers wait for

    def _velocity(self, parameter: nn.Parameter) -> Tensor:
        state = self._optimizer.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity: Tensor = state["momentum_buffer"]
        return velocity

    def describe(self) -> dict[str, Any]:
        return {**_described(self._optimizer), "mirror": True}


@contextlib.contextmanager
def _having_only(optimizer: Optimizer, results: Results) -> Iterator[Optimizer]:
    """The optimizer, with these parameters and their gradients."""
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
    """Of its state, per element: what one step of another like it leaves."""
    probe = nn.Parameter(torch.zeros(64, 64))
    probe.grad = torch.zeros_like(probe)
    kind: Any = type(optimizer)
    try:
        known = inspect.signature(kind).parameters  # AdamW's defaults have one that is not a setting
        given = {key: value for key, value in optimizer.defaults.items() if key in known and key != "fused"}
        other = kind([probe], **given)
        other.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"what {kind.__name__} keeps per weight cannot be found out ({error}): leave out memory_budget"
        ) from error
    held = [value for value in other.state[probe].values() if isinstance(value, Tensor) and value.numel() > 1]
    return sum(value.numel() * value.element_size() for value in held) / probe.numel()


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
