"""Predictions for a model on a cluster: one schedule in detail, plans beside it, and both on more hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, Exchange, Hierarchical
from syncline.predict import Prediction, Schedule, predict
from syncline.predict.diagnosis import Diagnosis, diagnose
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.report import formatting

if TYPE_CHECKING:
    from syncline.report.inputs import Inputs, ModelData

_HOSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_MOST_RANKS = 16_384
"""Largest cluster that is predicted without being asked for: larger ones take seconds."""
_MOST_TIMES_HOSTS = 32
"""Largest multiple of the known number of hosts that is predicted without being asked for."""
_MOST_BUCKETS = 8_000
"""Buckets simulated for one scaling curve; schedules with more have no curve."""
_MOST_OTHERS = 3
"""Number of schedules in addition to the first: more lines could not be distinguished."""


@dataclass(frozen=True)
class Curve:
    """One schedule on one kind of link, on increasing numbers of hosts."""

    name: str
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class Forecast:
    profile: Profile
    network: Network
    """The cluster that is analysed in detail."""
    diagnosis: Diagnosis
    """Of the first schedule."""
    predictions: Mapping[str, Prediction]
    """By the schedules' names on the page, in order."""
    curves: tuple[Curve, ...]
    """Empty if only one number of hosts can be predicted."""

    @property
    def name(self) -> str:
        """Name of the first schedule."""
        return next(iter(self.predictions))

    @property
    def others(self) -> dict[str, Prediction]:
        return {name: prediction for name, prediction in self.predictions.items() if name != self.name}

    @property
    def source(self) -> str:
        """Text of the badge on charts of predictions."""
        return "predicted" if self.network.measured else "predicted, links assumed"


def forecast_for(inputs: Inputs, model: ModelData) -> Forecast | None:
    """Predict a model; None if its profile or network is missing, or the network lacks what predictions need."""
    profile, network = model.profile, model.network
    if profile is None or network is None:
        return None
    schedules = {schedule_label(text): _parse(profile, text, network, model) for text in inputs.schedules}
    for name, plan in model.plans.items():
        schedule = None if plan.nothing else _schedule_of(plan, profile)
        if schedule is not None:
            schedules[name] = schedule
    schedules = dict(list(schedules.items())[: 1 + _MOST_OTHERS])
    (name, first), *others = schedules.items()
    try:
        here = _resized(network, inputs.hosts[0] if inputs.hosts else network.hosts, inputs.rates_bps[0])
        diagnosis = diagnose(profile, here, first)
        predictions = {name: diagnosis.prediction, **{other: predict(profile, here, plan) for other, plan in others}}
        return Forecast(profile, here, diagnosis, predictions, _curves(inputs, profile, network, schedules))
    except UsageError:
        return None


def _curves(inputs: Inputs, profile: Profile, network: Network, schedules: dict[str, Schedule]) -> tuple[Curve, ...]:
    counts = sorted(set(inputs.hosts))
    if not counts and network.hosts > 1:
        most = min(_MOST_TIMES_HOSTS * network.hosts, _MOST_RANKS // max(1, network.ranks // network.hosts))
        counts = sorted({network.hosts, *(count for count in _HOSTS if count <= most)})
    if len(counts) < 2:
        return ()
    curves = []
    for rate_bps in inputs.rates_bps[: 1 + _MOST_OTHERS]:
        for name, schedule in schedules.items():
            if len(schedule.buckets) * len(counts) * len(inputs.rates_bps) <= _MOST_BUCKETS:
                label = f"{name}, {formatting.rate(rate_bps)}" if rate_bps and len(inputs.rates_bps) > 1 else name
                clusters = (_resized(network, count, rate_bps) for count in counts)
                curves.append(Curve(label, tuple(predict(profile, cluster, schedule) for cluster in clusters)))
    return tuple(curves)


def _parse(profile: Profile, text: str, network: Network, model: ModelData) -> Schedule:
    schedule = Schedule.parse(profile, text, network.backend)
    if text == "ddp" and model.bucket_caps:  # the script's own buckets
        return dataclasses.replace(schedule, buckets=filled(profile.gradients, model.bucket_caps))
    return schedule


def _resized(network: Network, hosts: int, rate_bps: int | None) -> Network:
    resized = network.with_hosts(hosts)
    return resized if rate_bps is None else resized.with_rate(rate_bps)


def slowest_forward_and_update_s(profile: Profile, prediction: Prediction) -> tuple[float, float]:
    """Return the seconds of forward and of the optimizer step on the rank that all others wait for."""
    slowest = profile.slowest if prediction.ranks > 1 else None
    if slowest is not None and slowest.step_s > profile.step_s:
        return slowest.forward_s, slowest.update_s
    return profile.forward_s, profile.update_s


def schedule_label(text: str) -> str:
    """Return a schedule's name on the page."""
    name, *options = (part.strip() for part in text.split(","))
    return ", ".join(["plain DDP" if name == "ddp" else name, *options])


def _schedule_of(plan: Plan, profile: Profile) -> Schedule | None:
    """Convert a plan for the predictor; None if its lanes are not assigned in turn or its gradients differ."""
    if any(bucket.lane != index % plan.lanes for index, bucket in enumerate(plan.buckets)):
        return None
    index_of = {gradient.name: index for index, gradient in enumerate(profile.gradients)}
    if {name for bucket in plan.buckets for name in bucket.parameters} != set(index_of):
        return None
    return Schedule(
        "plan",
        tuple(tuple(index_of[name] for name in bucket.parameters) for bucket in plan.buckets),
        lanes=plan.lanes,
        each=tuple((_exchange_name(exchange), exchange) for exchange in plan.exchanges),
    )


def _exchange_name(exchange: Exchange) -> str:
    """Return the name under which a profile holds the exchange's costs, ignoring its other settings."""
    for name, make in EXCHANGES.items():
        default = make()
        if default == exchange:
            return name
        hierarchical = isinstance(default, Hierarchical) and isinstance(exchange, Hierarchical)
        if hierarchical and default.across == exchange.across:  # type: ignore[attr-defined]
            return name
    return type(exchange).__name__
