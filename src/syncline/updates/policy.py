"""The settings of an exchange of updates."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

from syncline.errors import UsageError
from syncline.exchange import UPDATES_WARMUP_STEPS, Exchange, Hierarchical, Quantized, for_updates, settings


@dataclass(frozen=True)
class Nesterov:
    """An outer optimizer, as in DiLoCo: a Nesterov step along the mean of the ranks' updates.

    Args:
        lr: The learning rate, where 1 applies the mean update as it is.
        momentum: The momentum.

    Raises:
        UsageError: A setting is out of range.

    Example:
        >>> syncline.attach(model, syncline.Dense(), optimizer=optimizer, every=20, outer=syncline.Nesterov())
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        for name, most in (("lr", 10.0), ("momentum", 1.0)):
            value: Any = getattr(self, name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not (number and 0 <= value < most) or (name == "lr" and value == 0):
                raise UsageError(f"Nesterov({name}={value!r}): {name} must be a number from 0 to {most:g}")
            object.__setattr__(self, name, float(value))

    def step(self, update: Tensor, velocity: Tensor) -> None:
        """Replace the mean update by the Nesterov step to take, and change the velocity."""
        velocity.mul_(self.momentum).add_(update)
        update.add_(velocity, alpha=self.momentum).mul_(self.lr)


@dataclass(frozen=True)
class UpdatePolicy:
    """How updates are exchanged. See `attach` for the settings."""

    exchange: Exchange
    lanes: int
    every: int = 1
    warmup: int = 0
    delay: int = 0
    outer: Nesterov | None = None
    plan: None = None  # like the next two, for code that reads any policy: updates follow no plan
    mismatch: None = None
    expected_s: None = None

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (self.exchange,)

    @property
    def warm_exchange(self) -> Exchange:
        """The exchange of gradients during the warm-up: 4 bits, only between hosts if the exchange is hierarchical."""
        if isinstance(self.exchange, Hierarchical):
            return dataclasses.replace(self.exchange, across=Quantized(bits=4))
        return Quantized(bits=4)

    def settings(self) -> dict[str, Any]:
        """Return the settings that a checkpoint must have been saved with."""
        outer = None if self.outer is None else dataclasses.asdict(self.outer)
        numbers = {"every": self.every, "warmup": self.warmup, "delay": self.delay, "outer": outer}
        return {"type": "Updates", "exchange": settings(self.exchange), **numbers}

    def fingerprint(self) -> dict[str, Any]:
        """Return the fields that must be equal on all ranks."""
        return {"updates": self.settings(), "lanes": self.lanes}

    def __str__(self) -> str:
        parts = [f"updates by {self.exchange!r}", "in every step" if self.every == 1 else f"every {self.every} steps"]
        parts += [f"applied {self.delay} steps later"] if self.delay else []
        parts += [f"after {self.warmup} steps of gradients in 4 bits"] if self.warmup else []
        parts += [f"through {self.outer!r}"] if self.outer else []
        return ", ".join(parts)


def checked_policy(exchange: Exchange, lanes: int, every: Any, warmup: Any, delay: Any, outer: Any) -> UpdatePolicy:
    """Return the policy of these arguments of `attach`. Raise a UsageError if one is invalid."""
    least = {"every": (every, 1), "warmup": (0 if warmup is None else warmup, 0), "delay": (delay, 0)}
    for name, (value, smallest) in least.items():
        if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value < 1 << 31:
            raise UsageError(f"{name} is {value!r}: it must be a number of steps, at least {smallest}")
    if delay and every == 1:
        text = "with every=1, an update that is applied late spoils the training"
        raise UsageError(f"delay is {delay}, but {text}: use delay=0, or every=5 or more")
    if delay >= every > 1:
        raise UsageError(f"delay is {delay}: it must be less than every, which is {every}")
    if outer is not None and not isinstance(outer, Nesterov):
        raise UsageError(f"outer is {outer!r}: pass syncline.Nesterov(lr=…, momentum=…), or leave it out")
    exchange = for_updates(exchange, every)
    if warmup is None:
        warmup = UPDATES_WARMUP_STEPS if every > 1 or _is_sparse(exchange) else 0
    return UpdatePolicy(exchange, lanes, every, warmup, delay, outer)


def _is_sparse(exchange: Exchange) -> bool:
    """Return whether an exchange is sparse."""
    inner = exchange.across if isinstance(exchange, Hierarchical) else exchange
    return hasattr(inner, "density")
