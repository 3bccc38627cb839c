"""The settings that `tune`, `follow`, `syncline run` and the framework integrations share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.amp.grad_scaler import GradScaler

from syncline.ddp.attach import check_scaler
from syncline.errors import UsageError
from syncline.exchange import Exchange
from syncline.plan.search import check_allowed
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.runtime.checkpoint import ON_WORLD_SIZE
from syncline.runtime.topology import loaded_from
from syncline.runtime.validation import check_timeout, checked_exchange

BUDGET_S = 45.0
MIN_BUDGET_S = 5.0
PROBE_S = 15.0

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What to do with a model: arguments of `tune`, `follow` and `Handle.load`, checked without the model.

    Raises:
        UsageError: A setting is invalid, or two settings contradict each other.
    """

    exchange: Exchange | None = None
    plan: Plan | PathLike | None = None
    allow: Sequence[str] = ()
    network: Network | PathLike | None = None
    change: bool = True
    budget_s: float = BUDGET_S
    probe_s: float = PROBE_S
    scaler: GradScaler | None = field(default=None, compare=False, repr=False)
    timeout_s: float | None = None
    on_world_size: str = "refuse"
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.exchange is not None and self.plan is not None:
            raise UsageError("exchange and plan exclude each other: a plan names the exchanges of its buckets")
        for name, value, kind in (("plan", self.plan, Plan), ("network", self.network, Network)):
            if value is not None and not isinstance(value, kind | str | os.PathLike):
                raise UsageError(f"{name} is a {type(value).__name__}: pass a {kind.__name__}, or its file")
        object.__setattr__(self, "allow", check_allowed(self.allow))
        if not self.tunes and (self.allow or not self.change):
            raise UsageError("allow and change=False are for tuning, which an exchange or a plan replaces")
        if not _is_number(self.budget_s, MIN_BUDGET_S):
            raise UsageError(f"budget_s is {self.budget_s!r}: tuning takes at least {MIN_BUDGET_S:g} s")
        if not _is_number(self.probe_s, 1.0):
            raise UsageError(f"probe_s is {self.probe_s!r}: probing takes at least 1 s")
        check_timeout(self.timeout_s)
        check_scaler(self.scaler)
        if self.exchange is not None:
            checked_exchange(self.exchange)
        if self.on_world_size not in ON_WORLD_SIZE:
            raise UsageError(f"on_world_size is {self.on_world_size!r}: it must be one of {', '.join(ON_WORLD_SIZE)}")

    @property
    def tunes(self) -> bool:
        """Whether tuning chooses the exchange."""
        return self.exchange is None and self.plan is None

    def load_files(self) -> TuneSettings:
        """Return a copy in which `plan` and `network` are loaded from their files."""
        plan = None if self.plan is None else loaded_from("plan", self.plan, Plan)
        network = None if self.network is None else loaded_from("network", self.network, Network)
        return dataclasses.replace(self, plan=plan, network=network)


def has_residual(plan: Plan) -> bool:
    """Whether an exchange of the plan keeps a residual."""
    return any(exchange.keeps for exchange in plan.exchanges)


def _is_number(value: object, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < 1e6
