"""Save and restore the state of a `Layerwise` trainer.

On disk, each rank saves only its residuals. Weights and the optimizer's state are equal on all ranks, so the script
saves them once. A digest of the weights ties the two together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from syncline.dist.agreement import current_device, first_difference, flatten
from syncline.errors import UsageError
from syncline.exchange import settings
from syncline.health.meeting import same_on_all_ranks
from syncline.layerwise.bucketing import BucketPieces, parse_buckets
from syncline.layerwise.gradient_pipeline import GradientPipeline
from syncline.runtime.checkpoint import Checkpoints, digest_of_bits, misfit_of


@dataclass(frozen=True)
class LayerwiseCheckpoint:
    """Saves and restores the state of one trainer. See `Layerwise` for the meaning of its methods."""

    module: nn.Module
    pipeline: GradientPipeline

    def save(self, folder: str | os.PathLike[str]) -> None:
        weights = digest_of_bits(self.pipeline.parameters)
        self._checkpoints.save(folder, {**self._residual_state(), "weights": weights})

    def load(self, folder: str | os.PathLike[str], on_world_size: str) -> None:
        self._resume(self._checkpoints.load(folder, on_world_size, self._examine))

    def state_dict(self) -> dict[str, Any]:
        optimizer = self.pipeline.optimizer.optimizer
        return {**self._residual_state(), "model": self.module.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with same_on_all_ranks(self.pipeline.group, self.pipeline.device, "the state", "load_state_dict") as fields:
            self._check_state(state)
            fields |= {"steps": state["steps"], "buckets": state["buckets"]}
            fields["weights"] = {name: float(state["model"][name].double().sum()) for name in self.pipeline.parameters}
        self.module.load_state_dict(state["model"])
        self.pipeline.optimizer.optimizer.load_state_dict(state["optimizer"])
        self._resume(state)

    def _residual_state(self) -> dict[str, Any]:
        pipeline = self.pipeline
        buckets = [[str(piece) for piece in bucket.pieces] for bucket in pipeline.buckets]
        steps, tensors = pipeline.runner.steps, pipeline.residuals()
        return {**self._checkpoints.identity, "steps": steps, "buckets": buckets, "tensors": tensors}

    def _resume(self, state: Mapping[str, Any]) -> None:
        with current_device(self.pipeline.device):
            self.pipeline.resume(self._buckets(state["buckets"]), state["tensors"], state["steps"])

    def _buckets(self, named: Sequence[Sequence[str]]) -> BucketPieces:
        return parse_buckets(named, self.pipeline.parameters)

    def _examine(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Raise if the model has other weights than the checkpoint. Return what must be equal on all ranks."""
        parameters, optimizer = self.pipeline.parameters, self.pipeline.optimizer
        if state.get("weights") != digest_of_bits(parameters):
            raise UsageError(
                f"the model's weights are not those of step {state['steps']}, at which the checkpoint was saved: load "
                "the module's and the optimizer's state of that step first, on every rank"
            )
        tensors = {
            f"{name}.{kind}": value
            for name, parameter in parameters.items()
            for kind, value in optimizer.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        return flatten({"optimizer": {**optimizer.describe(), "state": digest_of_bits(tensors)}})

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise unless all of a state can be loaded."""
        self._checkpoints.check(state)
        for part in ("model", "optimizer"):
            if not isinstance(state.get(part), Mapping):
                raise UsageError(f"the state has no {part!r}: pass what state_dict() returned")
        optimizer = self.pipeline.optimizer.optimizer.state_dict()
        difference = first_difference(
            _shapes(state["model"], state["optimizer"]), _shapes(self.module.state_dict(), optimizer)
        )
        if difference is not None:
            name, there, here = difference
            raise UsageError(f"{name} is {there} in the state, but {here} now: load it into the same model")

    @property
    def _checkpoints(self) -> Checkpoints:
        pipeline = self.pipeline
        keeps = pipeline.exchange.keeps
        levels = repr(pipeline.topology.tree.root) if pipeline.topology is not None and keeps else None
        expected = {
            **settings(pipeline.exchange),
            "mirror": False,  # written by earlier releases, which could exchange updates instead of gradients
            "optimizer": type(pipeline.optimizer.optimizer).__name__,
        }
        return Checkpoints(pipeline.group, pipeline.device, expected, levels, self._misfit)

    def _misfit(self, tensors: Mapping[str, Mapping[str, Tensor]], buckets: Sequence[Sequence[str]]) -> str | None:
        try:
            self._buckets(buckets)
        except UsageError as error:
            return str(error)
        return misfit_of({name: parameter.shape for name, parameter in self.pipeline.parameters.items()}, tensors)


def _shapes(model: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    groups = [len(group["params"]) for group in optimizer["param_groups"]]
    return {name: tuple(tensor.shape) for name, tensor in model.items()} | {"parameters of optimizer groups": groups}
