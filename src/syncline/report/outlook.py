"""What is predicted for a model on a cluster: the schedule that is looked at, plans beside it, and more hosts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, Exchange, Hierarchical
from syncline.predict import Prediction, Schedule, predict
from syncline.predict.diagnosis import Diagnosis, diagnose
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.report import figures
from syncline.report.story import Story, Subject

_HOSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_MOST_RANKS = 16_384
"""Of what is predicted without being asked for: beyond, counting who sends what to whom takes seconds."""
_EFFORT = 8_000
"""Buckets that are simulated on other numbers of hosts, for a curve: of a schedule with more there is none."""
_FURTHEST = 32
"""Times as many hosts as are known, without being asked."""
_MOST_OTHERS = 3
"""Beside the one that is looked at: more lines than that nobody tells apart."""


@dataclass(frozen=True)
class Curve:
    """One schedule on one kind of link, over numbers of hosts."""

    name: str
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class Outlook:
    profile: Profile
    network: Network
    """The one that is looked at in detail."""
    measured: Network
    """Of which it may be a larger or a faster one."""
    first: tuple[str, Schedule]
    others: Mapping[str, Schedule]
    """By what they are called on the page."""
    hosts: tuple[int, ...] = ()
    rates_bps: tuple[int | None, ...] = (None,)

    @property
    def source(self) -> str:
        """What its figures are."""
        return "predicted" if self.network.measured else "predicted, links assumed"

    @functools.cached_property
    def diagnosis(self) -> Diagnosis:
        return diagnose(self.profile, self.network, self.first[1])

    @functools.cached_property
    def predictions(self) -> dict[str, Prediction]:
        """The first, then the others, on this cluster."""
        others = {name: predict(self.profile, self.network, schedule) for name, schedule in self.others.items()}
        return {self.first[0]: self.diagnosis.prediction, **others}

    @functools.cached_property
    def curves(self) -> tuple[Curve, ...]:
        """Nothing where only one number of hosts can be said anything about."""
        counts = self._counts()
        schedules = {self.first[0]: self.first[1], **self.others}
        most = _EFFORT // max(1, len(counts) * len(self.rates_bps))
        schedules = {name: one for name, one in schedules.items() if len(one.buckets) <= most}
        found = []
        for rate_bps in self.rates_bps[: _MOST_OTHERS + 1]:
            for name, schedule in schedules.items():
                moved = (_moved(self.measured, count, rate_bps) for count in counts)
                label = f"{name}, {figures.rate(rate_bps)}" if rate_bps and len(self.rates_bps) > 1 else name
                found.append(Curve(label, tuple(predict(self.profile, one, schedule) for one in moved)))
        return tuple(found) if len(counts) > 1 else ()

    def _counts(self) -> list[int]:
        if self.hosts:
            return sorted(set(self.hosts))
        if self.measured.hosts < 2:
            return []
        each = max(1, self.measured.ranks // self.measured.hosts)
        most = min(_FURTHEST * self.measured.hosts, _MOST_RANKS // each)
        return sorted({self.measured.hosts, *(count for count in _HOSTS if count <= most)})


def outlook_of(story: Story, subject: Subject) -> Outlook | None:
    """None where a profile or a network is missing, or the network says too little to predict from."""
    profile, network = subject.profile, subject.network
    if profile is None or network is None:
        return None
    schedules = {label(text): _schedule(profile, text, network, subject.caps) for text in story.schedules}
    (name, first), *others = schedules.items()
    others += _planned(profile, subject.plans)
    try:
        here = _moved(network, story.hosts[0] if story.hosts else network.hosts, story.rates_bps[0])
        beside = dict(others[:_MOST_OTHERS])
        found = Outlook(profile, here, network, (name, first), beside, story.hosts, story.rates_bps)
        found.predictions  # noqa: B018 - worked out here, where it can still be left out
        found.curves  # noqa: B018
    except UsageError:
        return None
    return found


def _schedule(profile: Profile, text: str, network: Network, caps: Sequence[int]) -> Schedule:
    """Plain DDP is the script's, with its own buckets, where they are known."""
    schedule = Schedule.parse(profile, text, network.backend)
    if text == "ddp" and caps:
        return dataclasses.replace(schedule, buckets=filled(profile.gradients, caps))
    return schedule


def _moved(network: Network, hosts: int, rate_bps: int | None) -> Network:
    moved = network.with_hosts(hosts)
    return moved if rate_bps is None else moved.with_rate(rate_bps)


def label(text: str) -> str:
    """A schedule's name on the page."""
    name, *options = text.split(",")
    return ", ".join(["plain DDP" if name.strip() == "ddp" else name.strip(), *(option.strip() for option in options)])


def _planned(profile: Profile, plans: Mapping[str, Plan]) -> Iterator[tuple[str, Schedule]]:
    for name, plan in plans.items():
        schedule = None if plan.nothing else schedule_of(plan, profile)
        if schedule is not None:
            yield name, schedule


def schedule_of(plan: Plan, profile: Profile) -> Schedule | None:
    """What a plan does, as predictions know it; None where its lanes are not dealt in turn, as they simulate it, or its
    gradients are not the profile's."""
    if any(bucket.lane != index % plan.lanes for index, bucket in enumerate(plan.buckets)):
        return None
    place = {gradient.name: index for index, gradient in enumerate(profile.gradients)}
    if {name for bucket in plan.buckets for name in bucket.parameters} != set(place):
        return None
    return Schedule(
        "plan",
        tuple(tuple(place[name] for name in bucket.parameters) for bucket in plan.buckets),
        lanes=plan.lanes,
        each=tuple((_name_of(exchange), exchange) for exchange in plan.exchanges),
    )


def _name_of(exchange: Exchange) -> str:
    """By which a profile knows what it computes; of one with other settings, that of its kind."""
    for name, make in EXCHANGES.items():
        usual = make()
        if usual == exchange:
            return name
        levels = isinstance(usual, Hierarchical) and isinstance(exchange, Hierarchical)
        if levels and usual.across == exchange.across:  # type: ignore[attr-defined]
            return name
    return type(exchange).__name__
