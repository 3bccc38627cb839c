"""The method that was chosen for a model on a cluster, how to apply it, and what else was considered."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from syncline.exchange import Exchange, Hierarchical, made_of, settings
from syncline.plan.rungs import RUNGS
from syncline.records.plan import Plan


class RungTime(msgspec.Struct, frozen=True, kw_only=True):
    """A rung that was considered, and its predicted time per step."""

    rung: str
    quality: str
    lossless: bool
    iteration_s: float


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of `attach`, for choices that do not change DDP's buckets."""

    exchange: dict[str, Any]
    lanes: int | None = None
    updates: bool = False
    every: int = 1
    overlap: bool = False
    sized: bool = False
    """Whether the profile decides the sizes of buckets, with `overlap`."""

    def code(self) -> str:
        """Return the call as Python code."""
        parts = ["model", _code_of(made_of(self.exchange))]
        parts += ["optimizer=optimizer"] if self.updates or self.overlap else []
        parts += [f"every={self.every}"] if self.every > 1 else []
        parts += ['overlap="forward"'] if self.overlap else []
        parts += ["profile=profile, network=network"] if self.sized else []
        parts += [f"lanes={self.lanes}"] if self.lanes is not None else []
        return f"syncline.attach({', '.join(parts)})"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The method that was chosen for a model on a cluster, and how to apply it."""

    schema: int = 1
    rung: str
    quality: str  # of the rung, which may be better than what was allowed
    lossless: bool
    plan: Plan
    """The buckets, unless `attachment` says how to attach. Without either, plain DDP is best."""
    attachment: Attachment | None = None
    iteration_s: float
    plain_s: float
    reason: str
    warmup: int = 0  # steps before the chosen exchange begins, which nothing that is sparse goes without
    rungs: tuple[RungTime, ...] = ()
    rivals: tuple[Choice, ...] = ()
    """Other rungs that predictions cannot rule out, from the gentlest on. A trial decides."""

    @property
    def contenders(self) -> tuple[Choice, ...]:
        """This choice, unless it is plain DDP, and its rivals, from the gentlest on."""
        order = [rung.name for rung in RUNGS]
        choices = self.rivals if self.nothing else (*self.rivals, self)
        return tuple(sorted(choices, key=lambda choice: order.index(choice.rung) if choice.rung in order else -1))

    @property
    def nothing(self) -> bool:
        """Whether plain DDP is best."""
        return self.attachment is None and self.plan.nothing

    @property
    def needs_optimizer(self) -> bool:
        return self.attachment is not None and (self.attachment.updates or self.attachment.overlap)

    @property
    def period(self) -> int:
        """Number of steps in which everything is exchanged once."""
        return 1 if self.attachment is None else self.attachment.every

    @property
    def keeps(self) -> bool:
        """Whether an exchange has a residual, which changing back and forth would drop."""
        exchanges = self.plan.exchanges if self.attachment is None else (made_of(self.attachment.exchange),)
        return any(exchange.keeps for exchange in exchanges) or bool(self.attachment and self.attachment.updates)

    @property
    def name(self) -> str:
        """The words for this choice in a sentence about its trial."""
        return "the plan" if self.attachment is None else "the choice"


def choice_of(plan: Plan, rung: str = "", quality: str = "", *, own_buckets: bool = False) -> Choice:
    """Return a choice that follows a plan. With `own_buckets`, the plan has those of DDP, and one exchange for all."""
    attachment = None
    if own_buckets and not plan.nothing:
        # A plan stores the path of each bucket, but one exchange for all buckets finds them by itself.
        climbing = [exchange for exchange in plan.exchanges if isinstance(exchange, Hierarchical)]
        paths = [dataclasses.replace(exchange, shape="auto", chunks=None) for exchange in climbing]
        attachment = Attachment(exchange=settings([*paths, *plan.exchanges][0]), lanes=plan.lanes)
    warmups = [getattr(getattr(exchange, "across", exchange), "warmup", 0) for exchange in plan.exchanges]
    return Choice(
        rung=rung or ("lossless" if plan.lossless else "allowed"),
        quality=quality or ("exact" if plan.lossless else ""),
        lossless=plan.lossless,
        plan=plan,
        iteration_s=plan.iteration_s,
        plain_s=plan.plain_s,
        reason=plan.reason,
        warmup=max(warmups, default=0),
        attachment=attachment,
    )


def _code_of(exchange: Exchange) -> str:
    """Return an exchange as Python code, without the settings that have their defaults."""
    usual = type(exchange)()
    changed = [(f.name, getattr(exchange, f.name)) for f in dataclasses.fields(exchange)]  # type: ignore[arg-type]
    texts = [
        f"{name}={_code_of(value) if isinstance(value, Exchange) else repr(value)}"
        for name, value in changed
        if value != getattr(usual, name) or name in ("bits", "density")
    ]
    return f"syncline.{type(exchange).__name__}({', '.join(texts)})"
