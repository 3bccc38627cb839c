"""The weights of a replica in fragments, their exchange, and the complete state that it sends to a joining replica."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.dist.comm import GroupComm
from syncline.exchange import Dense
from syncline.records.pieces import divide
from syncline.runtime.bucket_runner import Residuals
from syncline.runtime.bucketing import layout_of
from syncline.runtime.checkpoint import digest_of_bits
from syncline.runtime.local_tensors import local_part
from syncline.updates.fragment import RESIDUALS, Fragment
from syncline.updates.optimizer_state import PREFIX as OPTIMIZER
from syncline.updates.optimizer_state import OptimizerState
from syncline.updates.policy import UpdatePolicy

_LARGEST_FRAGMENT_BYTES = 16 << 20
"""A fragment must be exchanged within the timeout, so it is smaller than without a manager."""


@dataclass
class Result:
    """The result of an exchange, until it is committed or dropped."""

    steps: int
    """Number of the replica's steps when it was computed."""
    sent: list[Tensor]
    """The weights at that time, by fragment."""
    means: list[Tensor]
    finite: list[Tensor]
    fragments: list[Fragment]
    """The fragments, with the exchange states that computed the result."""

    @property
    def digest(self) -> str:
        return digest_of_bits({str(index): mean for index, mean in enumerate(self.means)})


class Weights:
    """The weights and floating-point buffers of a replica, in fragments that are exchanged one after the other.

    Exchanges run on the host: they are rare, and their connections are gloo's.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        optimizer: Optimizer,
        policy: UpdatePolicy,
    ) -> None:
        self._parameters, self._policy = parameters, policy
        self.optimizer_state = OptimizerState(optimizer, parameters)
        self._averaged = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self._copied = {name: buffer for name, buffer in buffers.items() if not buffer.is_floating_point()}
        self._tensors: dict[str, Tensor] = {}
        self.find()
        self.fragments: list[Fragment] = []
        for exchange, tensors in ((policy.exchange, parameters), (Dense(), self._averaged)):
            ours = {name: self._tensors[name] for name in tensors}
            on_host = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in ours.items()}
            for pieces in divide(list(ours), ours, _LARGEST_FRAGMENT_BYTES):
                dtype = torch.promote_types(ours[pieces[0].name].dtype, torch.float32)
                layout = layout_of(pieces, on_host, dtype=dtype)
                fragment = Fragment(len(self.fragments), 0, exchange, layout, pieces=pieces, period=policy.every)
                fragment.start(self._tensors, policy.outer if exchange is policy.exchange else None)
                self.fragments.append(fragment)
        self._residuals: list[Residuals] = [{} for _ in self.fragments]
        """Residuals that each exchange had not applied when it last ended, by fragment."""
        self._homeless: dict[int, Tensor] = {}
        """Residuals that no state holds any more, by fragment, because another replica now leads this host."""

    def find(self) -> None:
        """Find the tensors again where a script or a framework has given a parameter other memory."""
        self._tensors = {name: local_part(parameter) for name, parameter in self._parameters.items()} | self._averaged

    # --- an exchange --------------------------------------------------------------------------------------------

    def prepare(self, comm: GroupComm) -> None:
        """Collective: create the states of the exchanges for these replicas, with the residuals of the last one."""
        self._homeless.clear()
        for fragment, residuals in zip(self.fragments, self._residuals, strict=True):
            state = fragment.exchange.prepare(fragment.layout, comm)
            if residuals:
                state.load(fragment.layout, residuals)
                if state.kept() is None:
                    self._homeless[fragment.index] = _flat_residual(fragment, residuals)
            fragment.state, fragment.averages = state, state.average(1 / comm.size)

    def gathered(self) -> list[Tensor]:
        return [fragment.gathered(self._tensors) for fragment in self.fragments]

    def exchange(self, index: int, flat: Tensor, number: int, comm: GroupComm) -> Tensor:
        """Replace a fragment's update, on the host, by its mean. Return whether it is finite."""
        fragment = self.fragments[index]
        fragment.ready.begin(number)
        if not fragment.averages:
            flat.mul_(1 / comm.size)
        if (homeless := self._homeless.get(index)) is not None:
            flat.add_(homeless, alpha=comm.size if fragment.averages else 1)
        work = fragment.exchange.run(flat, fragment.ready, comm)
        if work is not None:
            work.wait()
        return fragment.ready.finite(flat)

    def updates(self, now: Sequence[Tensor]) -> list[Tensor]:
        """Return the replica's updates on the host, as new tensors, if its weights are `now`."""
        return [f.update_from(flat).to("cpu") for f, flat in zip(self.fragments, now, strict=True)]

    def commit(self, result: Result, steps: int) -> bool:
        """Apply a result, and keep what this replica has done since. Return whether all of it was finite."""
        for index, fragment in enumerate(self.fragments):
            finite, mean, ran = result.finite[index], result.means[index], result.fragments[index]
            ran.ready.settle(finite)
            self._residuals[index] = _residuals_of(ran)
            self._homeless.pop(index, None)
            device = fragment.anchor.device
            outer = self._policy.outer if fragment.velocity is not None else None
            fragment.apply(mean.to(device, copy=True), finite.to(device), outer)
            new = fragment.anchor.to(result.sent[index].dtype)
            if steps > result.steps and bool(finite):
                new = new + (fragment.gathered(self._tensors) - result.sent[index])
            fragment.scatter(new, self._tensors)
        is_finite = all(map(bool, result.finite))
        if not is_finite:
            self.optimizer_state.remove_non_finite()
        return is_finite

    def forget_states(self) -> None:
        """Drop the states of exchanges that have failed. `prepare` creates new ones from the last residuals."""
        self.fragments = [
            Fragment(**{**vars(fragment), "state": None, "averages": False}) for fragment in self.fragments
        ]

    def residual_norm(self) -> float:
        """Return the norm of what this replica's exchanges have not applied yet."""
        kept = [t for of in self._residuals for kinds in of.values() for t in kinds.values()]
        return _norm(kept)

    def update_norm(self) -> float:
        """Return the norm of what this replica has changed since the weights that were agreed on last."""
        return _norm(self.updates(self.gathered()))

    def anchor_digest(self) -> str:
        """Return a digest of the weights that replicas agreed on last."""
        return digest_of_bits({str(fragment.index): fragment.anchor for fragment in self.fragments})

    # --- the agreed weights -------------------------------------------------------------------------------------

    def use_agreed(self) -> list[Tensor]:
        """Give the model the weights that replicas agreed on last, and return its own."""
        self.find()
        own = self.gathered()
        for fragment, flat in zip(self.fragments, own, strict=True):
            fragment.scatter(fragment.anchor.to(flat.dtype), self._tensors)
        return own

    def use(self, own: Sequence[Tensor]) -> None:
        """Give the model these weights."""
        self.find()
        for fragment, flat in zip(self.fragments, own, strict=True):
            fragment.scatter(flat, self._tensors)

    # --- the state of a joining replica -------------------------------------------------------------------------

    def complete(self) -> dict[str, Tensor]:
        """Return what a joining replica needs, on the host, by name: the agreed weights and the optimizer's state."""
        tensors: dict[str, Tensor] = {}
        for fragment in self.fragments:
            tensors[f"anchor/{fragment.index}"] = fragment.anchor
            if fragment.velocity is not None:
                tensors[f"velocity/{fragment.index}"] = fragment.velocity
        tensors |= {f"buffer/{name}": buffer for name, buffer in self._copied.items()}
        for name in self._parameters:
            tensors |= {f"{kind}/{name}": tensor for kind, tensor in self.optimizer_state.saved(name).items()}
        return {key: tensor.detach().to("cpu").contiguous() for key, tensor in tensors.items()}

    def misfit(self, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """Return why what another replica's `complete` returned does not fit this one, or None if it does."""
        expected = {key: tuple(t.shape) for key, t in self.complete().items() if not key.startswith(OPTIMIZER)}
        ours = {name: tuple(local_part(parameter).shape) for name, parameter in self._parameters.items()}
        for key, shape in shapes.items():
            name = key.partition("/")[2]
            of_optimizer = key.startswith(OPTIMIZER) and name in ours and shape in ((), ours[name])
            if not of_optimizer and expected.pop(key, None) != shape:
                return f"{key} has the shape {shape}"
        return f"{next(iter(expected))} is missing" if expected else None

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what another replica's `complete` returned. The residuals of this replica are dropped."""
        self.find()
        state: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if kind == "anchor":
                self.fragments[int(name)].anchor.copy_(tensor)
            elif kind == "velocity":
                velocity = self.fragments[int(name)].velocity
                assert velocity is not None  # noqa: S101 - `misfit` has compared them
                velocity.copy_(tensor)
            elif kind == "buffer":
                self._copied[name].copy_(tensor)
            else:
                state.setdefault(name, {})[kind] = tensor
        for fragment in self.fragments:
            now = fragment.anchor.to(self._tensors[fragment.pieces[0].name].dtype)
            fragment.scatter(now, self._tensors)
        self.optimizer_state.load(state)
        self._residuals = [{} for _ in self.fragments]


def _norm(tensors: Sequence[Tensor]) -> float:
    norms = [float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors]
    return math.hypot(*norms)


def _residuals_of(fragment: Fragment) -> Residuals:
    """Return a copy of what an exchange has not applied."""
    tensors = fragment.ready.tensors(fragment.layout)
    return {n: {kind: t.clone() for kind, t in kinds.items() if kind in RESIDUALS} for n, kinds in tensors.items()}


def _flat_residual(fragment: Fragment, residuals: Residuals) -> Tensor:
    flat = torch.zeros(fragment.layout.numel, dtype=fragment.layout.dtype)
    for slot in fragment.layout.slots:
        if "residual" in residuals.get(slot.name, {}):
            slot.view(flat).copy_(residuals[slot.name]["residual"])
    return flat
