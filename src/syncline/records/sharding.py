"""How a model is sharded: its units, as `fully_shard` makes them. A profile may contain this."""

from __future__ import annotations

from typing import Annotated

import msgspec

from syncline.records.fields import Count, check_unique, one_of

_FORMATS = ("float64", "float32", "float16", "bfloat16")


class ProfiledUnit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A module whose parameters are gathered, and whose gradients are reduced, in one collective."""

    name: str
    """Name of the module; empty for the whole model."""
    gradients: tuple[str, ...]
    """Names of the parameters that require a gradient, in the order of the unit's flat gradient."""
    gathered: Annotated[str, one_of(*_FORMATS)]
    """Type in which parameters are gathered."""
    reduced: Annotated[str, one_of(*_FORMATS)]
    """Type in which gradients are reduced."""
    reshards: bool
    """Whether parameters are freed after forward, and gathered again in backward."""
    frozen_elements: Count = 0
    """Elements of parameters that are gathered but require no gradient."""


class Sharding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The units of a model, and among how many ranks it was sharded while it was measured."""

    units: tuple[ProfiledUnit, ...]
    measured_shards: Count = 0
    """Ranks among which the model was sharded while it was measured: the times contain their collectives. With 1, they
    contain FSDP's own work only; 0 if the model was not sharded."""

    def __post_init__(self) -> None:
        check_unique("units[{}].name", (unit.name for unit in self.units))
        check_unique("units[{}].gradients", (name for unit in self.units for name in unit.gradients))

    def check(self, names: set[str]) -> None:
        """Raise `ValueError` unless the units contain exactly the gradients with these names."""
        known = {name for unit in self.units for name in unit.gradients}
        if different := sorted(known ^ names):
            problem = "is in no unit" if different[0] in names else "is not a gradient of the profile"
            raise ValueError(f"sharding.units: {different[0]} {problem}")
