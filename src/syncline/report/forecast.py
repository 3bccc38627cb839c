"""Predictions for a model on a cluster: one schedule in detail, plans beside it, and both on more hosts."""

from __future__ import annotations

import dataclasses
import itertools
import re
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
from syncline.units import rate_text

if TYPE_CHECKING:
    from syncline.report.inputs import Inputs, ModelData

HOSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of hosts that are predicted without being asked for."""
_MOST_TIMES_HOSTS = 32
"""Largest multiple of the known number of hosts that a page shows without being asked for."""
_MOST_BUCKETS = 8_000
"""Buckets simulated for one scaling curve; schedules with more have no curve."""
_MOST_SCHEDULES = 4
"""More lines could not be distinguished."""


@dataclass(frozen=True)
class Forecast:
    profile: Profile
    network: Network
    """The cluster that is analysed in detail."""
    diagnosis: Diagnosis
    """Diagnosis of the first schedule."""
    predictions: Mapping[str, Prediction]
    """By the schedules' names on the page, in order."""
    curves: Mapping[str, tuple[Prediction, ...]]
    """Predictions on increasing numbers of hosts, by schedule and rate. Empty if there is only one number."""

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
    schedules = {}
    for text in inputs.schedules:
        schedule = Schedule.parse(profile, text, network.backend)
        if text == "ddp" and model.records and (caps := model.records[0][1].caps):  # the script's own buckets
            schedule = dataclasses.replace(schedule, buckets=filled(profile.gradients, caps))
        schedules[re.sub(r"^ddp\b", "plain DDP", text.replace(",", ", "))] = schedule
    planned = {name: _schedule_of(plan, profile) for name, plan in model.plans.items() if not plan.nothing}
    schedules |= {name: schedule for name, schedule in planned.items() if schedule is not None}
    schedules = dict(itertools.islice(schedules.items(), _MOST_SCHEDULES))
    (name, first), *others = schedules.items()
    try:
        here = resized(network, inputs.hosts[0] if inputs.hosts else network.hosts, inputs.rates_bps[0])
        diagnosis = diagnose(profile, here, first)
        predictions = {name: diagnosis.prediction, **{other: predict(profile, here, plan) for other, plan in others}}
        return Forecast(profile, here, diagnosis, predictions, _curves(inputs, profile, network, schedules))
    except UsageError:
        return None


def _curves(
    inputs: Inputs, profile: Profile, network: Network, schedules: Mapping[str, Schedule]
) -> dict[str, tuple[Prediction, ...]]:
    counts = sorted(set(inputs.hosts))
    if not counts and network.hosts > 1:
        counts = sorted({network.hosts, *(count for count in HOSTS if count <= _MOST_TIMES_HOSTS * network.hosts)})
    curves = {}
    for rate_bps, (name, schedule) in itertools.product(inputs.rates_bps[:_MOST_SCHEDULES], schedules.items()):
        if len(counts) > 1 and len(schedule.buckets) * len(counts) * len(inputs.rates_bps) <= _MOST_BUCKETS:
            label = f"{name}, {rate_text(rate_bps)}" if rate_bps and len(inputs.rates_bps) > 1 else name
            clusters = (resized(network, count, rate_bps) for count in counts)
            curves[label] = tuple(predict(profile, cluster, schedule) for cluster in clusters)
    return curves


def resized(network: Network, hosts: int, rate_bps: int | None) -> Network:
    """Return the network with another number of hosts and, if not None, another rate of their links."""
    network = network.with_hosts(hosts)
    return network if rate_bps is None else network.with_rate(rate_bps)


def slowest_forward_and_update_s(profile: Profile, prediction: Prediction) -> tuple[float, float]:
    """Return the seconds of forward and of the optimizer step on the rank that all others wait for."""
    slowest = profile.slowest if prediction.ranks > 1 else None
    if slowest is not None and slowest.step_s > profile.step_s:
        return slowest.forward_s, slowest.update_s
    return profile.forward_s, profile.update_s


def _schedule_of(plan: Plan, profile: Profile) -> Schedule | None:
    """Convert a plan for the predictor; None if its lanes are not assigned in turn or its gradients differ."""
    index_of = {gradient.name: index for index, gradient in enumerate(profile.gradients)}
    in_turn = all(bucket.lane == index % plan.lanes for index, bucket in enumerate(plan.buckets))
    if not in_turn or {name for bucket in plan.buckets for name in bucket.parameters} != set(index_of):
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
        hierarchical = isinstance(default, Hierarchical) and isinstance(exchange, Hierarchical)
        if default == exchange or (hierarchical and default.across == exchange.across):  # type: ignore[attr-defined]
            return name
    return type(exchange).__name__
