"""The settings of an exchange for a sharded model. A checkpoint is valid for the same number of shards and replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from syncline.runtime.bucket_policy import Uniform
from syncline.updates.policy import UpdatePolicy


@dataclass(frozen=True)
class ShardPolicy(Uniform):
    """One exchange for the gradients of all units."""

    shards: int = 1
    replicas: int = 1
    gather: str | None = None  # the wire of gathered parameters; None for their own type

    def __str__(self) -> str:
        if self.replicas > 1:
            return f"{self.exchange!r} between {self.replicas} replicas of {self.shards} shards"
        gathered = f", and parameters gathered in {self.gather}" if self.gather else ""
        return f"{self.exchange!r} to {self.shards} shards{gathered}"

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "shards": self.shards, "replicas": self.replicas}

    def fingerprint(self) -> dict[str, Any]:
        sizes = {"shards": self.shards, "replicas": self.replicas, "gather": self.gather}
        return {**super().fingerprint(), **sizes}


@dataclass(frozen=True)
class ShardUpdatePolicy(UpdatePolicy):
    """The exchange of updates between replicas."""

    shards: int = 1
    replicas: int = 1

    def __str__(self) -> str:
        return f"{super().__str__()}, between {self.replicas} replicas of {self.shards} shards"

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "shards": self.shards, "replicas": self.replicas}
