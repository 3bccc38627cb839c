"""The settings that `tune`, `follow`, `syncline run` and the framework integrations share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.amp.grad_scaler import GradScaler

from syncline.balance.shares import Shares
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, Dense, Exchange
from syncline.plan.rungs import allowed_names, check_quality, rungs_of
from syncline.plan.search import ALLOWED, check_allowed
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.runtime.checkpoint import ON_WORLD_SIZE
from syncline.runtime.topology import loaded_from
from syncline.runtime.validation import check_positive, check_scaler, checked_exchange
from syncline.updates.policy import Nesterov, checked_policy

BUDGET_S, MIN_BUDGET_S, PROBE_S = 45.0, 5.0, 15.0
PathLike = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """The settings for tuning a model: arguments of `tune`, `follow` and `Handle.load`, checked without the model."""

    exchange: Exchange | None = None
    plan: Plan | PathLike | None = None
    allow: Sequence[str] = ()
    quality: str | None = None
    cache: bool = True
    retune: str | None = None
    """`"auto"` to tune again when links have changed, in `follow`."""
    network: Network | PathLike | None = None
    change: bool = True
    budget_s: float = BUDGET_S
    probe_s: float = PROBE_S
    scaler: GradScaler | None = field(default=None, compare=False, repr=False)
    timeout_s: float | None = None
    on_world_size: str = "refuse"
    quiet: bool = False
    updates: bool = False
    """True to exchange the optimizer's updates instead of gradients. The settings that follow are those of `attach`."""
    every: int = 1
    warmup: int | None = None
    delay: int = 0
    outer: Nesterov | None = None
    shares: Shares | None = None
    """The batches of the ranks, by which gradients or updates are weighted. Then there is no tuning."""

    def __post_init__(self) -> None:
        shares: Any = self.shares
        if shares is not None:
            if not isinstance(shares, Shares):
                raise UsageError(f"shares is {shares!r}: pass what syncline.shares returned")
            if self.plan is not None:
                raise UsageError("shares and plan exclude each other here: pass an exchange, or tune after attach")
            object.__setattr__(self, "exchange", Dense() if self.exchange is None else self.exchange)
        if self.exchange is not None and self.plan is not None:
            raise UsageError("exchange and plan exclude each other: a plan names the exchanges of its buckets")
        for name, value, kind in (("plan", self.plan, Plan), ("network", self.network, Network)):
            if value is not None and not isinstance(value, kind | str | os.PathLike):
                raise UsageError(f"{name} is a {type(value).__name__}: pass a {kind.__name__}, or its file")
        object.__setattr__(self, "allow", check_allowed(self.allow))
        check_quality(self.quality)
        if self.quality is not None and self.allow:
            text = "quality= chooses among methods by what was measured, and allow= names them one by one"
            raise UsageError(f"quality and allow exclude each other: {text}")
        if not self.tunes and (self.allow or self.quality is not None or not self.change):
            raise UsageError("allow, quality and change=False are for tuning, which an exchange or a plan replaces")
        if self.retune not in (None, "auto") or (self.retune and not (self.tunes and self.change)):
            text = "it must be 'auto', and is for tuning that may change the model" if self.retune else "leave it out"
            raise UsageError(f"retune is {self.retune!r}: {text}")
        if not isinstance(self.cache, bool):
            raise UsageError(f"cache is {self.cache!r}: it must be True or False")
        for name, least_s in (("budget_s", MIN_BUDGET_S), ("probe_s", 1.0)):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not least_s <= seconds < 1e6:
                raise UsageError(f"{name} is {seconds!r}: it must be at least {least_s:g}, and less than 1e6")
        check_positive(timeout_s=self.timeout_s)
        check_scaler(self.scaler)
        exchange = checked_exchange(self.exchange)
        if not isinstance(self.updates, bool):
            raise UsageError(f"updates is {self.updates!r}: it must be True or False")
        if self.updates and self.exchange is None:
            raise UsageError("an exchange of updates must be named: pass exchange= too, as in exchange=OkTopk()")
        checked_policy(exchange, 1, self.every, self.warmup, self.delay, self.outer)
        usual = {"every": 1, "warmup": self.warmup if self.may_exchange_updates else None, "delay": 0, "outer": None}
        if not self.updates and self.update_options != usual:
            text = "pass updates=True too (to follow: optimizer=…), or leave them out"
            raise UsageError(f"every, warmup, delay and outer are for updates: {text}")
        if self.on_world_size not in ON_WORLD_SIZE:
            raise UsageError(f"on_world_size is {self.on_world_size!r}: it must be one of {', '.join(ON_WORLD_SIZE)}")

    @property
    def tunes(self) -> bool:
        """Whether tuning chooses the exchange."""
        return self.exchange is None and self.plan is None

    @property
    def may_exchange_updates(self) -> bool:
        """Whether updates are exchanged, or tuning may choose to do so."""
        tuned = self.tunes and self.quality is not None and any(rung.updates for rung in rungs_of(self.quality))
        return self.updates or tuned

    @property
    def update_options(self) -> dict[str, Any]:
        """The arguments of `attach` for updates, without the optimizer."""
        return {"every": self.every, "warmup": self.warmup, "delay": self.delay, "outer": self.outer}

    def load_files(self) -> TuneSettings:
        """Return a copy in which `plan` and `network` are loaded from their files."""
        plan = None if self.plan is None else loaded_from("plan", self.plan, Plan)
        network = None if self.network is None else loaded_from("network", self.network, Network)
        return dataclasses.replace(self, plan=plan, network=network)


def has_residual(plan: Plan) -> bool:
    """Return whether an exchange of the plan has a residual."""
    return any(exchange.keeps for exchange in plan.exchanges)


def allows_residual(settings: TuneSettings) -> bool:
    """Whether a plan that tuning finds may have an exchange that keeps a residual."""
    allow = settings.allow if settings.quality is None else allowed_names(settings.quality)
    return any(EXCHANGES[name]().keeps for kind in allow for name in ALLOWED[kind])
