"""The state of the user's optimizer on one rank: reset its first moments, and save and load it for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.errors import UsageError
from syncline.records.pieces import Piece
from syncline.runtime.bucket_runner import Residuals
from syncline.runtime.local_tensors import like, local_part

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
"""Names under which optimizers store an average of gradients, or of past updates."""
_NOT_FIRST_MOMENTS = (
    *("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta"),
    *("grad_avg", "sum", "variance", "prev"),
)
"""Names of other tensors with the shape of a parameter. `grad_avg` is only subtracted from a second moment."""
PREFIX = "optimizer."
"""What the names of its tensors begin with in checkpoints."""


class OptimizerState:
    """The state of an optimizer, by the names of the model's parameters."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer, self._parameters = optimizer, parameters

    def _of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of a parameter, with this rank's part of tensors that are sharded."""
        state = self.optimizer.state.get(parameter, {})
        return {key: local_part(value) if isinstance(value, Tensor) else value for key, value in state.items()}

    def check_known(self) -> None:
        """Raise a UsageError if a tensor of the state may be a first moment, but has an unknown name."""
        for name, parameter in self._parameters.items():
            for key, value in self._of(parameter).items():
                of_shape = isinstance(value, Tensor) and value.shape == local_part(parameter).shape and value.dim() > 0
                if of_shape and key not in (*FIRST_MOMENTS, *_NOT_FIRST_MOMENTS):
                    kind = type(self.optimizer).__name__
                    text = f"{kind} has a state {key!r} for {name}, and it is not known whether it is a first moment"
                    remedy = "use an optimizer of torch.optim, every=5 or more, or an exchange that sends everything"
                    raise UsageError(f"{text}, which a sparse exchange in every step must reset: {remedy}")

    def reset_first_moments(self, pieces: Sequence[Piece], applied: Tensor) -> None:
        """Set the first moments of these pieces to zero where `applied`, with one flag per element, is true."""
        for piece, flags in zip(pieces, applied.split([piece.numel for piece in pieces]), strict=True):
            parameter = local_part(self._parameters[piece.name])
            state = self._of(self._parameters[piece.name])
            for moment in (state.get(key) for key in FIRST_MOMENTS):
                if isinstance(moment, Tensor):
                    if moment.stride() == parameter.stride():
                        piece.of(moment).masked_fill_(flags, 0)
                    else:  # elements of a piece are in the parameter's order in memory
                        ordered = torch.empty_like(parameter, dtype=moment.dtype).copy_(moment)
                        piece.of(ordered).masked_fill_(flags, 0)
                        moment.copy_(ordered)

    def remove_non_finite(self) -> None:
        """Set elements of the state that are not finite to zero, and drop gradients that are not finite."""
        for tensor in self.tensors():
            if tensor.is_floating_point():
                tensor.masked_fill_(~torch.isfinite(tensor), 0)
        for parameter in self._parameters.values():
            if parameter.grad is not None and not bool(torch.isfinite(local_part(parameter.grad)).all()):
                parameter.grad = None

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the state that are on the model's device."""
        tensors: list[Tensor] = []
        for parameter in self._parameters.values():
            state = self._of(parameter)
            tensors += [v for v in state.values() if isinstance(v, Tensor) and v.device == parameter.device]
        return tensors

    def saved(self, name: str) -> dict[str, Tensor]:
        """Return the state of one parameter, by kind, for a checkpoint. Numbers become tensors of one element."""
        saved = {}
        for key, value in self._of(self._parameters[name]).items():
            if isinstance(value, Tensor):
                saved[PREFIX + key] = value
            elif isinstance(value, bool | int | float):
                wide = torch.int64 if isinstance(value, int) else torch.float64
                saved[PREFIX + key] = torch.tensor(value, dtype=wide)
        return saved

    def load(self, tensors: Residuals) -> None:
        """Replace the state by what `saved` returned, by parameter name."""
        state = self.optimizer.state_dict()
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        loaded: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(ordered):
            kinds = tensors.get(names.get(id(parameter), ""), {})
            values: dict[str, Any] = {}
            for kind, tensor in kinds.items():
                if kind.startswith(PREFIX):
                    wide = tensor.dim() == 0 and tensor.dtype in (torch.int64, torch.float64)
                    values[kind.removeprefix(PREFIX)] = tensor.item() if wide else like(tensor.clone(), parameter)
            if values:
                loaded[number] = values
        self.optimizer.load_state_dict({**state, "state": loaded})
