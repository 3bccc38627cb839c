"""Save and restore the state of a `Layerwise` trainer.

On disk, each rank saves only what differs between ranks: residuals and, with `mirror=True`, velocities. Weights and the
optimizer's state are equal on all ranks, so the script saves them once. A digest of the weights ties the two together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.dist.agreement import current_device, flatten
from syncline.errors import UsageError
from syncline.health.meeting import together
from syncline.layerwise.bucketing import BucketPieces, parse_buckets
from syncline.layerwise.gradient_pipeline import GradientPipeline
from syncline.layerwise.layer_optimizer import LayerOptimizer
from syncline.runtime.bucket_policy import BucketPolicy
from syncline.runtime.bucket_runner import Residuals
from syncline.runtime.checkpoint import Checkpoints, digest_of_bits, misfit_of
from syncline.runtime.topology import RankTopology

_VELOCITY = "mirror"
"""The kind of a velocity in a file, where residuals have other kinds."""


@dataclass(frozen=True)
class LayerwiseCheckpoint:
    """Saves and restores the state of one trainer. See `Layerwise` for the meaning of its methods."""

    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    layer_optimizer: LayerOptimizer
    policy: BucketPolicy
    topology: RankTopology | None
    pipeline: GradientPipeline

    def save(self, folder: str | os.PathLike[str]) -> None:
        tensors = self.pipeline.residuals()
        for name, velocity in self._velocities().items():
            tensors.setdefault(name, {})[_VELOCITY] = velocity
        state = {**self._metadata(), "weights": digest_of_bits(self.parameters), "tensors": tensors}
        self._checkpoints.save(folder, state)

    def load(self, folder: str | os.PathLike[str], on_world_size: str) -> None:
        state = self._checkpoints.load(folder, on_world_size, self._examine)
        tensors = {name: dict(kinds) for name, kinds in state["tensors"].items()}
        if self.layer_optimizer.mirror:
            for name, parameter in self.parameters.items():
                velocity = tensors.get(name, {}).pop(_VELOCITY, None)
                self.optimizer.state[parameter]["momentum_buffer"] = (
                    None if velocity is None else torch.empty_like(parameter).copy_(velocity)
                )
        residuals = {name: kinds for name, kinds in tensors.items() if kinds}
        self._resume(parse_buckets(state["buckets"], self.parameters), residuals, state["steps"])

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._metadata(),
            "tensors": self.pipeline.residuals(),
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with together(self.pipeline.group, self.pipeline.device, "the state", "load_state_dict") as fields:
            buckets = self._check_state(state)
            fields["steps"] = state["steps"]
            fields["buckets"] = state["buckets"]
            fields["weights"] = {name: float(state["model"][name].double().sum()) for name in self.parameters}
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._resume(buckets, state["tensors"], state["steps"])

    def _metadata(self) -> dict[str, Any]:
        buckets = [[str(piece) for piece in bucket.pieces] for bucket in self.pipeline.buckets]
        return {**self._checkpoints.identity, "steps": self.pipeline.runner.steps, "buckets": buckets}

    def _resume(self, buckets: BucketPieces, residuals: Residuals, steps: int) -> None:
        with current_device(self.pipeline.device):
            self.pipeline.resume(buckets, residuals, steps)

    def _velocities(self) -> dict[str, Tensor]:
        """Return the velocities by parameter name, if they differ between ranks."""
        if not self.layer_optimizer.mirror:
            return {}
        state = self.optimizer.state
        velocities = {name: state.get(p, {}).get("momentum_buffer") for name, p in self.parameters.items()}
        return {name: velocity for name, velocity in velocities.items() if velocity is not None}

    def _examine(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Raise if the model has other weights than the checkpoint. Return what must be equal on all ranks."""
        if state.get("weights") != digest_of_bits(self.parameters):
            raise UsageError(
                f"the model's weights are not those of step {state['steps']}, at which the checkpoint was saved: load "
                "the module's and the optimizer's state of that step first, on every rank"
            )
        shared = {
            f"{name}.{kind}": value
            for name, parameter in self.parameters.items()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and not self.layer_optimizer.mirror
        }
        return flatten({"optimizer": {**self.layer_optimizer.describe(), "state": digest_of_bits(shared)}})

    def _check_state(self, state: Mapping[str, Any]) -> BucketPieces:
        """Return the buckets of a state. Raise unless all of it can be loaded."""
        self._checkpoints.check(state)
        for part in ("model", "optimizer"):
            if not isinstance(state.get(part), Mapping):
                raise UsageError(f"the state has no {part!r}: pass what state_dict() returned")
        mine, theirs = self.module.state_dict(), state["model"]
        for name in dict.fromkeys([*mine, *theirs]):
            here, there = (
                f"has shape {tuple(of[name].shape)}" if name in of else "is missing" for of in (mine, theirs)
            )
            if here != there:
                raise UsageError(f"{name} {there} in the state, but {here} in the model: load it into the same model")
        here, there = (
            str([len(group["params"]) for group in of["param_groups"]])
            for of in (self.optimizer.state_dict(), state["optimizer"])
        )
        if here != there:
            raise UsageError(
                f"the optimizer's groups have {there} parameters in the state, but {here} now: create the optimizer "
                "with the same groups"
            )
        return parse_buckets(state["buckets"], self.parameters)

    @property
    def _checkpoints(self) -> Checkpoints:
        keeps = any(exchange.keeps for exchange in self.policy.exchanges)
        levels = repr(self.topology.tree.root) if self.topology is not None and keeps else None
        mirror = self.layer_optimizer.mirror
        settings = {**self.policy.settings(), "mirror": mirror, "optimizer": type(self.optimizer).__name__}
        return Checkpoints(
            self.pipeline.group, self.pipeline.device, settings, levels, self._misfit, redistributable=not mirror
        )

    def _misfit(self, tensors: Mapping[str, Mapping[str, Tensor]], buckets: Sequence[Sequence[str]]) -> str | None:
        try:
            parse_buckets(buckets, self.parameters)
        except UsageError as error:
            return str(error)
        return misfit_of({name: parameter.shape for name, parameter in self.parameters.items()}, tensors)
