"""The weights of a bucket in one block of memory, and the user's optimizer on this rank's part of it.

All parameters of a bucket become views of one flat tensor, so that a rank's shard of them is contiguous and the shards
of all ranks are gathered into place without a copy. The optimizer keeps its parameter groups. Only while it steps, each
group has the pieces of its parameters that are in this rank's shards, so its state exists for these pieces only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.dist.comm import gather_bytes, gather_into
from syncline.errors import UsageError
from syncline.exchange import Layout
from syncline.records.pieces import Piece

ELEMENTWISE = frozenset(
    ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
"""Optimizers of torch.optim that treat every element by itself."""
Names = Mapping[str, nn.Parameter]


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise unless a part of a tensor can be stepped without the rest of it."""
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE
    if not known and not getattr(kind, "elementwise", False):
        text = f"{kind.__name__} is not known to treat every element by itself, so it cannot step shards"
        known_names = ", ".join(sorted(ELEMENTWISE))
        raise UsageError(f"{text}: use one of {known_names}, or set elementwise = True in its class if it does")


@dataclass
class ShardedBucket:
    """The weights of one bucket. If it is `whole`, every rank steps all of them, because gradients are all-reduced.

    With a `master`, the optimizer steps this rank's shard of the weights there, and the flat weights are rounded.
    """

    layout: Layout
    ranks: int
    rank: int
    shard_numel: int
    whole: bool = False
    master: Tensor | None = None
    owned: Sequence[int] = ()  # by rank, which shard it owns; by default, the one with its number
    weights: Tensor = field(init=False)
    pieces: list[Piece] = field(init=False)
    shards: list[Tensor] = field(init=False)  # this rank's pieces, as flat views of the weights

    def __post_init__(self) -> None:
        part = self.part
        numel = self.layout.numel if self.whole else self.ranks * part
        self.weights = torch.zeros(numel, dtype=self.layout.dtype, device=self.layout.device)
        self._views = [(slot.name, slot.view(self.weights)) for slot in self.layout.slots]
        self.pieces, self.shards = [], []
        shard = self.weights[self.start : self.start + part] if self.master is None else self.master
        for slot in self.layout.slots:
            first, end = max(self.start, slot.offset), min(self.start + part, slot.offset + slot.numel)
            if first < end:
                self.pieces.append(Piece(slot.name, first - slot.offset, end - slot.offset))
                self.shards.append(shard[first - self.start : end - self.start])

    @property
    def part(self) -> int:
        """Number of elements in each rank's shard."""
        return self.layout.numel if self.whole else self.shard_numel

    @property
    def start(self) -> int:
        """Where this rank's shard begins."""
        return 0 if self.whole else (self.owned[self.rank] if self.owned else self.rank) * self.part

    def move_in(self, parameters: Names) -> None:
        """Make the parameters views of the flat weights, with the same values. Do nothing for those that are."""
        for name, view in self._views:
            parameter = parameters[name]
            if parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride():
                view.copy_(parameter.detach())
                parameter.data = view

    @property
    def own(self) -> Tensor:
        """This rank's shard of the flat weights."""
        return self.weights[self.start : self.start + self.part]

    def move_out(self, parameters: Names, group: dist.ProcessGroup) -> None:
        """Give the parameters memory of their own. Collective if there is a master: they get its values."""
        if self.master is not None:
            gather_into(self.weights, self.master, group=group)
        for slot in self.layout.slots:
            parameters[slot.name].data = parameters[slot.name].data.clone(memory_format=torch.preserve_format)

    def gradients(self, shard: Tensor) -> list[Tensor]:
        """Return the gradient of each piece, as views of this rank's shard of the gradients."""
        found, offsets = [], {slot.name: slot.offset for slot in self.layout.slots}
        for piece in self.pieces:
            first = offsets[piece.name] + piece.start - self.start
            found.append(shard[first : first + piece.numel])
        return found


class ShardedOptimizer:
    """The user's optimizer, with state for this rank's pieces only."""

    def __init__(
        self, optimizer: Optimizer, parameters: Names, buckets: Sequence[ShardedBucket], group: dist.ProcessGroup
    ) -> None:
        self.optimizer, self._parameters, self._buckets, self._group = optimizer, parameters, buckets, group
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._owned = {
            piece.name: (piece, shard)
            for bucket in buckets
            for piece, shard in zip(bucket.pieces, bucket.shards, strict=True)
        }
        self._bucketed = {slot.name for bucket in buckets for slot in bucket.layout.slots}
        self._groups: list[list[Tensor]] | None = None  # the groups' own parameters, while they have pieces
        self.shard_state()

    def enter(self) -> None:
        """Give each group the pieces of its parameters, until `leave`."""
        self.leave()  # the last step may have raised an error
        groups = self.optimizer.param_groups
        for parameter in (parameter for group in groups for parameter in group["params"]):
            if self._names.get(id(parameter)) not in self._bucketed and parameter.grad is not None:
                text = "the optimizer has a parameter with a gradient that DDP does not exchange"
                raise UsageError(f"{text}: add and unfreeze parameters before DDP is built, then attach again")
        self._groups = [group["params"] for group in groups]
        for group in groups:
            names = (self._names.get(id(parameter), "") for parameter in group["params"])
            group["params"] = [self._owned[name][1] for name in names if name in self._owned]

    def leave(self) -> None:
        """Return the groups' own parameters to them, if they have pieces."""
        if self._groups is None:
            return
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        self._groups = None
        for _, shard in self._owned.values():
            shard.grad = None

    # --- the state ------------------------------------------------------------------------------------------------

    def shard_state(self) -> None:
        """Replace the state of whole parameters by that of this rank's pieces."""
        for name in self._bucketed:
            parameter = self._parameters[name]
            state = self.optimizer.state.pop(parameter, None)
            if state and name in self._owned:
                piece, shard = self._owned[name]
                parts = {key: _part_of(key, value, parameter, piece) for key, value in state.items()}
                self.optimizer.state[shard] = parts

    def whole_state(self) -> dict[Tensor, dict[str, Any]]:
        """Collective: return the state of all parameters, whole, on every rank."""
        described = self._gathered_descriptions()
        whole: dict[Tensor, dict[str, Any]] = {self._parameters[name]: {} for name in described}
        for bucket in self._buckets:
            slots = [slot for slot in bucket.layout.slots if slot.name in described]
            kinds = {
                (key, kind["elements"])
                for slot in slots
                for key, kind in described[slot.name].items()
                if _has_elements(kind)
            }
            flats = {key: self._gathered(bucket, key, getattr(torch, dtype)) for key, dtype in sorted(kinds)}
            for slot in slots:
                parameter = self._parameters[slot.name]
                for key, kind in described[slot.name].items():
                    if _has_elements(kind):
                        value = torch.empty_like(parameter.data, dtype=flats[key].dtype).copy_(slot.view(flats[key]))
                    else:
                        value = _restored(kind, parameter.device)
                    whole[parameter][key] = value
        return whole

    def _gathered_descriptions(self) -> dict[str, dict[str, Any]]:
        """Collective: return, by parameter and key, the numbers in the optimizer's state and the types of tensors."""
        mine = {
            name: {key: _described(key, value, piece) for key, value in self.optimizer.state[shard].items()}
            for name, (piece, shard) in self._owned.items()
            if shard in self.optimizer.state
        }
        found: dict[str, dict[str, Any]] = {}
        for data in gather_bytes(self._group, json.dumps(mine).encode()):
            for name, kinds in json.loads(data).items():
                found.setdefault(name, kinds)
        return found

    def _gathered(self, bucket: ShardedBucket, key: str, dtype: torch.dtype) -> Tensor:
        """Collective: return one kind of state of a bucket, from all ranks."""
        mine = torch.zeros(bucket.part, dtype=dtype, device=bucket.weights.device)
        for shard, part in zip(bucket.shards, bucket.gradients(mine), strict=True):
            value = self.optimizer.state.get(shard, {}).get(key)
            if value is not None:
                part.copy_(value)
        if bucket.whole or bucket.ranks == 1:
            return mine
        by_rank = torch.empty_like(bucket.weights, dtype=dtype)
        gather_into(by_rank, mine, group=self._group)
        shards = by_rank.view(bucket.ranks, -1)
        return torch.cat([shards[list(bucket.owned).index(shard)] for shard in range(bucket.ranks)])

    def make_whole(self) -> None:
        """Collective: give the optimizer the state of whole parameters again."""
        whole = self.whole_state()
        self.drop_shards()
        for parameter, values in whole.items():
            self.optimizer.state[parameter] = values

    def drop_shards(self) -> dict[Tensor, Any]:
        """Remove the state of this rank's pieces from the optimizer, and return it."""
        shards = [shard for _, shard in self._owned.values()]
        return {shard: self.optimizer.state.pop(shard) for shard in shards if shard in self.optimizer.state}

    def whole_state_dict(self) -> dict[str, Any]:
        """Collective: return `optimizer.state_dict()` as it would be without shards."""
        whole = self.whole_state()
        shards = self.drop_shards()
        try:
            self.optimizer.state.update(whole)
            state: dict[str, Any] = self.optimizer.state_dict()
        finally:
            for parameter in whole:
                self.optimizer.state.pop(parameter, None)
            self.optimizer.state.update(shards)
        return state


def _part_of(key: str, value: Any, parameter: nn.Parameter, piece: Piece) -> Any:
    """Return a copy of the part of a state that belongs to a piece, or of all of it if it is not elementwise."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" or value.shape != parameter.shape:
        return value.clone()
    ordered = value
    if value.stride() != parameter.stride():  # elements of a piece are in the parameter's order in memory
        ordered = torch.empty_like(parameter.data, dtype=value.dtype).copy_(value)
    return piece.of(ordered).clone()


def _described(key: str, value: Any, piece: Piece) -> Any:
    """Describe a value of an optimizer's state for JSON: tensors with one value per element only by their type."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if key != "step" and value.shape == (piece.numel,):
            return {"elements": dtype}
        if value.numel() == 1:
            return {"number": value.item(), "dtype": dtype, "on_host": value.device.type == "cpu"}
    elif value is None or isinstance(value, bool | int | float | str):
        return value
    text = f"the optimizer's state {key!r} is neither a number nor one value per element"
    raise UsageError(f"{text}, so the shards of it cannot be gathered")


def _has_elements(kind: Any) -> bool:
    return isinstance(kind, dict) and "elements" in kind


def _restored(kind: Any, device: torch.device) -> Any:
    if not isinstance(kind, dict):
        return kind
    device = torch.device("cpu") if kind["on_host"] else device
    return torch.tensor(kind["number"], dtype=getattr(torch, kind["dtype"]), device=device)
