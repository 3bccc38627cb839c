"""Choose the gentlest rung of the ladder that is fast enough, within what `quality` permits, and explain the choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from syncline.errors import UsageError
from syncline.exchange import (
    UPDATES_WARMUP_STEPS,
    Dense,
    Exchange,
    Hierarchical,
    OkTopk,
    default_lanes,
    made_of,
    name_of,
    settings,
)
from syncline.plan.choice import Attachment, Choice, RungTime, choice_of
from syncline.plan.make import make_plan, plan_for
from syncline.plan.rungs import QUALITIES, Rung, allowed_names, check_quality, rungs_of
from syncline.plan.search import LEAST_GAIN, options
from syncline.predict import Prediction, Schedule, predict
from syncline.predict.bucket_size import best_overlap
from syncline.predict.schedule import DDP_CAPS, OVERLAP, UPDATES, Updates
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.profile import Profile
from syncline.units import milliseconds_text

TOLERANCE = 0.05
"""A gentler rung is chosen if it takes at most this share longer than the fastest one that is allowed."""
DOUBT = 1.15
"""Two rungs whose predicted times differ by less than this factor may be in the other order when they are measured."""
_MOST_RIVALS = 3
_MOST_BY_BUCKETS = 1.25  # other buckets than DDP's are searched where a gain of this factor could decide


def exchanges_of(quality: str, network: Network, *, updates: bool) -> dict[str, Exchange]:
    """Return the exchanges that a quality may use, by the names under which a profile has their own work."""
    exchanges = options(network, allowed_names(quality))
    for rung in rungs_of(quality, updates=updates):
        if rung.updates is not None:
            exchanges |= {entry.exchange_name: entry.exchange for entry in _variants(rung.updates, network)}
    return exchanges


def make_choice(
    profile: Profile,
    network: Network,
    quality: str = "exact",
    *,
    updates: bool = True,
    overlap: bool = True,
    own_buckets: bool = False,
    paced: bool = False,
    caps: Sequence[int] = DDP_CAPS,
    hint: bool = True,
    warmup: int | None = None,
) -> Choice:
    """Choose the gentlest method within 5 % of the fastest that a quality allows.

    Args:
        profile: The model.
        network: The cluster.
        quality: `exact`, `same` or `close`.
        updates: Whether the updates of an optimizer may be exchanged.
        overlap: Whether the exchange may extend into the next forward pass.
        own_buckets: Whether DDP's buckets must stay as they are.
        paced: Whether gradients are ready at fixed times, as in a replayed profile.
        caps: Bytes at which plain DDP closes its buckets; the last one repeats.
        hint: Whether to predict what the next quality would give, for the explanation.
        warmup: Steps of the warm-up, if updates are chosen. Default: 300.

    Returns:
        The choice, with its explanation.

    Raises:
        UsageError: `quality` is unknown.

    Example:
        >>> choice = make_choice(profile, network, "same")
        >>> print(choice.reason)
    """
    check_quality(quality)
    steps = UPDATES_WARMUP_STEPS if warmup is None else warmup
    return _Ladder(profile, network, own_buckets, paced, caps, steps).choose(quality, updates, overlap, hint)


def rung_choices(
    profile: Profile, network: Network, quality: str = QUALITIES[-1], *, caps: Sequence[int] = DDP_CAPS
) -> tuple[Choice, ...]:
    """Return the best choice of each rung that a quality allows, also of those that `make_choice` need not consider."""
    ladder = _Ladder(profile, network, own_buckets=False, paced=False, caps=caps, warmup=UPDATES_WARMUP_STEPS)
    return tuple(step.choice for step in ladder.all_steps(rungs_of(quality)))


@dataclass(frozen=True)
class _Step:
    """A rung with its best schedule."""

    rung: Rung
    choice: Choice
    allow: tuple[str, ...]
    candidate: Choice | None = None
    """The choice that a trial may try, if `choice` is plain DDP because this one was predicted to be no faster."""


class _Ladder:
    def __init__(
        self, profile: Profile, network: Network, own_buckets: bool, paced: bool, caps: Sequence[int], warmup: int
    ) -> None:
        self._profile, self._network, self._paced, self._caps = profile, network, paced, caps
        self._own_buckets, self._warmup = own_buckets, warmup
        self._plain = predict(profile, network, Schedule("ddp", filled(profile.gradients, caps)), paced=paced)

    def choose(self, quality: str, updates: bool, overlap: bool, hint: bool) -> Choice:
        if self._network.ranks == 1:
            return choice_of(make_plan(self._profile, self._network, caps=self._caps))
        steps = list(self._climb(rungs_of(quality, updates=updates, overlap=overlap)))
        if not self._own_buckets:
            steps = self._with_other_buckets(steps)
        fastest_s = min(step.choice.iteration_s for step in steps)
        chosen = next(step for step in steps if step.choice.iteration_s <= (1 + TOLERANCE) * fastest_s)
        better = self._next(quality, chosen, hint)
        times = tuple(_time_of(step) for step in [*steps, *([better] if better is not None else [])])
        rivals = tuple(self._explained(step, better, updates) for step in _rivals(steps, chosen))
        choice = self._explained(chosen, better, updates)
        return msgspec.structs.replace(choice, rungs=times, rivals=rivals)

    def _explained(self, step: _Step, better: _Step | None, updates: bool) -> Choice:
        """Return the choice of a rung, with what it gives up, the evidence, and what the next quality would give."""
        choice, rung = step.choice, step.rung
        words = [choice.reason]
        if not choice.nothing and rung.quality != "exact":
            words.append(f"Trade-off: {rung.trade_off}.")
            words.append(f"Evidence (docs/results.md): {rung.evidence}.")
            if rung.updates is not None and isinstance(_exchange_of(choice), Hierarchical):
                words.append(
                    "That row is about the exchange without levels: none was measured for the one with levels."
                )
        elif not choice.nothing and rung.overlaps:
            words.append(f"Trade-off: {rung.trade_off} (docs/guide/overlap.md).")
        if better is not None:
            words.append(self._hint(step, better, updates))
        reason = " ".join(words)
        return msgspec.structs.replace(choice, plan=msgspec.structs.replace(choice.plan, reason=reason), reason=reason)

    def all_steps(self, rungs: Sequence[Rung]) -> list[_Step]:
        """Return the best of each rung."""
        return self._with_other_buckets(list(self._climb(rungs, all_of_them=True)))

    def _climb(self, rungs: Sequence[Rung], *, all_of_them: bool = False) -> Iterator[_Step]:
        """Yield the best of each rung with DDP's own buckets, until no other rung can be faster by more than the
        tolerance."""
        allow: list[str] = []
        best_s = float("inf")
        for rung in rungs:
            allow += rung.allow
            if best_s <= (1 + TOLERANCE / 2) * self._profile.step_s and not all_of_them:
                return  # even if the exposed time is predicted at half of what it is
            try:
                choice = self._best_of(rung, allow, own_buckets=True)
            except UsageError:
                if rung.quality == "exact" and not rung.overlaps:
                    raise
                continue  # the network has no figures for its collectives
            step = self._worthwhile(_Step(rung, choice, tuple(allow)))
            best_s = min(best_s, step.choice.iteration_s)
            yield step

    def _with_other_buckets(self, steps: Sequence[_Step]) -> list[_Step]:
        """Search for better buckets in the rungs that might then be the fastest. A search takes seconds."""
        fastest_s = min(step.choice.iteration_s for step in steps)
        improved = []
        for step in steps:
            choice = step.choice
            if not step.rung.needs_optimizer:
                choice = msgspec.structs.replace(choice, attachment=None)  # its plan has DDP's buckets
                if choice.iteration_s <= _MOST_BY_BUCKETS * fastest_s:
                    searched = self._best_of(step.rung, step.allow, own_buckets=False)
                    choice = min(searched, choice, key=lambda each: each.iteration_s)
            improved.append(dataclasses.replace(step, choice=choice))
        return improved

    def _best_of(self, rung: Rung, allow: Sequence[str], *, own_buckets: bool) -> Choice:
        if rung.overlaps:
            return self._overlapping(rung)
        if rung.updates is not None:
            return self._updating(rung, rung.updates)
        plan = make_plan(
            self._profile,
            self._network,
            tuple(allow),
            paced=self._paced,
            caps=self._caps,
            own_buckets=own_buckets,
        )
        return choice_of(plan, rung.name, rung.quality, own_buckets=own_buckets)

    def _overlapping(self, rung: Rung) -> Choice:
        if self._own_buckets:
            schedule = Schedule(OVERLAP, filled(self._profile.gradients, self._caps), Dense(), "dense", overlaps=True)
            prediction = predict(self._profile, self._network, schedule, paced=self._paced)
        else:
            prediction, _ = best_overlap(self._profile, self._network, caps=self._caps, paced=self._paced)
        attachment = Attachment(exchange=settings(Dense()), overlap=True, sized=not self._own_buckets)
        return self._attached(rung, prediction, attachment, "Overlap with the next forward pass, lossless")

    def _updating(self, rung: Rung, name: str) -> Choice:
        variants = []
        for entry in _variants(name, self._network):
            lanes = default_lanes(entry.exchange, self._network.backend)
            schedule = Schedule.of_updates(self._profile, name, entry, lanes)
            variants.append((predict(self._profile, self._network, schedule, paced=self._paced), entry))
        prediction, entry = min(variants, key=lambda variant: variant[0].iteration_s)
        attachment = Attachment(exchange=settings(entry.exchange), updates=True, every=entry.every)
        often = "in every step" if entry.every == 1 else f"every {entry.every} steps"
        text = f"Lossy: updates by {name_of(entry.exchange)} {often}"
        text += f", after {self._warmup} steps of gradients in 4 bits" if self._warmup else ""
        choice = self._attached(rung, prediction, attachment, text)
        return msgspec.structs.replace(choice, warmup=self._warmup)

    def _attached(self, rung: Rung, prediction: Prediction, attachment: Attachment, text: str) -> Choice:
        """Return a choice that attaches an exchange to DDP's own buckets."""
        plain_s, took_s = self._plain.iteration_s, prediction.iteration_s
        reason = f"{text}: predicted {milliseconds_text(plain_s)} → {milliseconds_text(took_s)} per step."
        plain = msgspec.structs.replace(plan_for(self._plain, plain_s, reason), buckets=(), lanes=1)
        choice = choice_of(plain, rung.name, rung.quality)
        lossless = rung.quality == "exact"
        return msgspec.structs.replace(choice, attachment=attachment, iteration_s=took_s, lossless=lossless)

    def _worthwhile(self, step: _Step) -> _Step:
        """Return the step, or plain DDP in its place if it is not predicted to be faster."""
        choice, plain_s = step.choice, self._plain.iteration_s
        if choice.attachment is None or choice.iteration_s < (1 - LEAST_GAIN) * plain_s:
            return step
        plain = choice_of(choice.plan, step.rung.name, step.rung.quality)
        return dataclasses.replace(step, choice=plain, candidate=choice)

    def _next(self, quality: str, chosen: _Step, hint: bool) -> _Step | None:
        """Return the fastest rung of the next quality, if it is faster than the chosen one by more than 5 %."""
        if not hint or quality == QUALITIES[-1]:
            return None
        following = QUALITIES[QUALITIES.index(quality) + 1]
        rungs = [rung for rung in rungs_of(following) if rung.quality == following]
        before = [name for rung in rungs_of(quality) for name in rung.allow]
        steps = list(self._climb([dataclasses.replace(rung, allow=(*before, *rung.allow)) for rung in rungs]))
        best = min(steps, key=lambda step: step.choice.iteration_s, default=None)
        is_faster = best is not None and best.choice.iteration_s * (1 + TOLERANCE) < chosen.choice.iteration_s
        return best if is_faster else None

    def _hint(self, chosen: _Step, better: _Step, updates: bool) -> str:
        plain_s = self._plain.iteration_s
        now, then = (plain_s / step.choice.iteration_s for step in (chosen, better))
        needs = ", needs the optimizer" if better.rung.needs_optimizer and not updates else ""
        what = f'quality="{better.rung.quality}" ({better.rung.name}, lossy{needs})'
        return f"{what}: {then:.1f}× plain DDP's speed instead of {now:.1f}× (predicted)."


def _rivals(steps: Sequence[_Step], chosen: _Step) -> list[_Step]:
    """Return rungs that may be right instead of the chosen one: gentler ones that may be fast enough, and the fastest
    of the others that may be faster by more than the tolerance."""
    place, chosen_s = steps.index(chosen), chosen.choice.iteration_s
    fastest_s = min(step.choice.iteration_s for step in steps)
    content = chosen.choice.plan.buckets, chosen.choice.attachment
    steps = [step if step.candidate is None else dataclasses.replace(step, choice=step.candidate) for step in steps]
    others = [s for s in steps if not s.choice.nothing and (s.choice.plan.buckets, s.choice.attachment) != content]
    gentler = [
        step
        for step in steps[:place]
        if step in others and step.choice.iteration_s <= (1 + TOLERANCE) * DOUBT * fastest_s
    ]
    harsher = [
        step
        for step in steps[place + 1 :]
        if step in others and (1 + TOLERANCE) * step.choice.iteration_s <= DOUBT * chosen_s
    ]
    nearest = [*gentler[-1:], *sorted(harsher, key=lambda step: step.choice.iteration_s), *reversed(gentler[:-1])]
    return [step for step in steps if step in nearest[:_MOST_RIVALS]]


def _exchange_of(choice: Choice) -> Exchange | None:
    return None if choice.attachment is None else made_of(choice.attachment.exchange)


def _variants(name: str, network: Network) -> list[Updates]:
    """Return an exchange of updates, and where hosts have several ranks, also its variant that sums inside hosts."""
    entry = UPDATES[name]
    if not isinstance(entry.exchange, OkTopk) or not (network.hosts > 1 and network.ranks > network.hosts):
        return [entry]
    across = Hierarchical(across=entry.exchange)
    inside = dataclasses.replace(entry, exchange_name="hierarchical+oktopk", exchange=across)
    return [entry, inside]


def _time_of(step: _Step) -> RungTime:
    rung, choice = step.rung, step.choice
    return RungTime(
        rung=rung.name, quality=rung.quality, lossless=rung.quality == "exact", iteration_s=choice.iteration_s
    )
