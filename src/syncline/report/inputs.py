"""Everything a page is made from, checked to belong together: files, predictions, and the commands to repeat them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from syncline.errors import UsageError
from syncline.exchange import name_of
from syncline.predict import Prediction, Schedule, predict
from syncline.predict.diagnosis import Diagnosis, diagnose
from syncline.records.bench_result import BenchResult, DemoResult
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.postmortem import Postmortem
from syncline.records.profile import Profile
from syncline.records.run_record import ModelRecord, RunRecord
from syncline.units import count_text, rate_text, size_text

# Names on the page of the plans of methods of the bench and the demo.
_PLAN_NAMES = {"plan": "the plan, lossless", "plan-lossy": "the plan, lossy allowed"}
_PLAN_NAMES |= {"tune": "the plan, lossless", "tune-bf16": "the plan, 16 bits allowed"}
_PLAN_NAMES |= {f"tune-{quality}": f"the plan, quality {quality}" for quality in ("exact", "same", "close")}

PREDICT = "Predict again", "syncline predict --profile {profile} --network {network}"
PLAN = "Plan again", "syncline plan --profile {profile} --network {network}"
PROBE = "Probe again, on the cluster", "torchrun … -m syncline probe --output {network}"
PROFILE = "Profile again", "syncline profile MODEL --output {profile}"

HOSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # numbers of hosts that are predicted without being asked for
_MOST_TIMES_HOSTS = 32  # largest multiple of the known number of hosts that a page shows without being asked for
_MOST_BUCKETS = 8_000  # buckets simulated for one scaling curve; schedules with more have no curve
_MOST_SCHEDULES = 4  # more lines could not be distinguished


@dataclass(frozen=True)
class Inputs:
    """Everything that one page may show; any part may be missing.

    Raises:
        UsageError: The parts contradict each other, for instance a plan and a profile of different models.
    """

    profile: Profile | None = None
    network: Network | None = None
    plans: Mapping[str, Plan] = field(default_factory=dict)  #: by their names on the page
    benches: tuple[BenchResult, ...] = ()
    demo: DemoResult | None = None
    runs: tuple[RunRecord, ...] = ()  #: records of one run, of some or all of its ranks
    failure: Postmortem | None = None  #: the failure reports of its ranks, and what follows from them
    schedules: tuple[str, ...] = ("ddp",)
    """Schedules to predict, as `syncline predict --plan` takes them; the first is analysed in detail."""
    hosts: tuple[int, ...] = ()
    """Numbers of hosts to predict, the first in detail; by default the network's, and many more for the scaling."""
    rates_bps: tuple[int | None, ...] = (None,)
    """Rates of the hosts' links to predict, the first in detail; None: the network's own."""
    sharded: tuple[str, ...] = ()
    """Methods for sharded models to predict; if there are any, no schedules are predicted."""
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  #: names of the files that were read, by kind
    command: str = ""  #: the command that makes the page again, if there is one

    def __post_init__(self) -> None:
        _check_runs(self.runs)
        if self.failure is not None and self.runs and not belongs_to(self.failure, self.runs):
            raise UsageError("the failure reports are not of this run: make a page for each, or remove old files")
        _check_consistent(self)
        if self.demo is not None:
            for method in self.demo.methods:
                if all(row.method != method for row in self.demo.rows):
                    file = next(iter(self.files.get("demo", ())), "demo")
                    raise UsageError(f"{file}: rows: {method} is missing; run the demo again")

    @property
    def models(self) -> tuple[ModelData, ...]:
        """The models of a run, or the one model that the other files describe."""
        return tuple(_models_of_runs(self)) or (_model_of_files(self),)

    def again(self, purpose: str = "", command: str = "") -> tuple[tuple[str, str], ...]:
        """Return a command with the names of the files that were read, or else the one that makes the whole page."""
        files = {kind: shlex.quote(paths[0]) for kind, paths in self.files.items() if paths}
        try:
            filled = command.format_map(files)
        except KeyError:  # a file was not read
            filled = ""
        recorded = [(purpose, filled), ("Make this page again", self.command)]
        recorded += [("Run again", run.command) for run in self.runs]
        recorded += [("Measure again", made.command) for made in (self.demo, *self.benches) if made is not None]
        return tuple(entry for entry in recorded if entry[1])[:1]


class Forecast(msgspec.Struct, frozen=True):
    profile: Profile
    network: Network  # the cluster that is analysed in detail
    diagnosis: Diagnosis  # diagnosis of the first schedule
    predictions: Mapping[str, Prediction]  # by the schedules' names on the page, in order
    curves: Mapping[str, tuple[Prediction, ...]]  # on increasing numbers of hosts, by schedule and rate, if there are

    @property
    def name(self) -> str:
        """Name of the first schedule."""
        return next(iter(self.predictions))

    @property
    def source(self) -> str:
        """Text of the badge on charts of predictions."""
        return "predicted" if self.network.measured else "predicted, links assumed"


class ModelData(msgspec.Struct, frozen=True):
    """One model on one cluster, and all that is known about it."""

    name: str
    profile: Profile | None = None
    network: Network | None = None
    plans: Mapping[str, Plan] = {}
    records: tuple[tuple[int, ModelRecord], ...] = ()  # ranks and what each recorded
    forecast: Forecast | None = None


def all_networks(models: Sequence[ModelData]) -> list[Network]:
    return list(dict.fromkeys(model.network for model in models if model.network is not None))


def _model_of_files(inputs: Inputs) -> ModelData:
    profile, network, plans = inputs.profile, inputs.network, dict(inputs.plans)
    for result in inputs.benches:
        profile, network = profile or result.profile, network or result.network
        plans = plans or {_PLAN_NAMES[name]: plan for name, plan in result.plans.items() if name in _PLAN_NAMES}
    names = [known.model for known in (profile, *plans.values()) if known is not None]
    names += [result.model.name for result in inputs.benches]
    if inputs.demo is not None:
        tunings = inputs.demo.tunings
        network = network or inputs.demo.network
        # The profile of the tuning whose plan is shown, because their measurements differ a little.
        planned = sorted(tunings.values(), key=lambda tuning: tuning.plan.nothing)
        profile = profile or next((tuning.profile for tuning in planned), None)
        if not plans:  # tuning may also have applied something without a plan
            shown = {name: t.plan for name, t in tunings.items() if inputs.demo.model is None or not t.plan.nothing}
            plans = {_PLAN_NAMES.get(name, name): plan for name, plan in shown.items()}
        trained = inputs.demo.model
        names = ["a CNN on real digits" if trained is None else f"{trained.name} on Python source code"]
    return ModelData(next(filter(None, names), ""), profile, network, plans)


def _models_of_runs(inputs: Inputs) -> Iterator[ModelData]:
    """Match the ranks' models by name and by the order in which the script builds them."""
    records_of: dict[tuple[int, str], list[tuple[int, ModelRecord]]] = {}
    for run in sorted(inputs.runs, key=lambda run: run.rank):
        for position, model in enumerate(run.models):
            records_of.setdefault((position, model.name), []).append((run.rank, model))
    only = len(records_of) == 1  # files that were passed beside a run describe its only model
    for (_, name), records in records_of.items():
        profile, network, plan = (
            next(filter(None, (getattr(model, field) for _, model in records)), None)
            for field in ("profile", "network", "plan")
        )
        profile, network = profile or (inputs.profile if only else None), network or inputs.network
        yield ModelData(name, profile, network, {"the plan": plan} if plan else inputs.plans, tuple(records))


def _check_runs(runs: tuple[RunRecord, ...]) -> None:
    for index, run in enumerate(runs):
        if not 0 <= run.rank < run.ranks:
            raise UsageError(f"a run's record claims to be of rank {run.rank} of {run.ranks}: there is no such rank")
        if run.ranks != runs[0].ranks:
            ranks = f"{runs[0].ranks} ranks and {run.ranks}"
            raise UsageError(f"these records are of two runs, with {ranks}: pass one run, or remove old records")
        if any(run.rank == other.rank for other in runs[:index]):
            raise UsageError(f"two records are of rank {run.rank}: pass the records of one run")


def belongs_to(failure: Postmortem, runs: Sequence[RunRecord]) -> bool:
    """Return whether a rank that wrote a failure report also wrote a record. Both name its host and process."""
    process_of = {run.rank: (run.host, run.process) for run in runs}
    return any(process_of.get(report.rank) in ((report.host, report.process), ("", None)) for report in failure.reports)


def _check_consistent(inputs: Inputs) -> None:
    """Raise unless all files describe the same model on the same cluster."""
    sizes = {"the profile": inputs.profile.gradient_bytes} if inputs.profile is not None else {}
    sizes |= {name: sum(gradient.nbytes for gradient in plan.gradients) for name, plan in inputs.plans.items()}
    sizes |= {f"bench {number}": bench.model.gradient_bytes for number, bench in enumerate(inputs.benches, 1)}
    records = inputs.models[0].records if len(inputs.models) == 1 else ()
    recorded = {f"{record.name} of rank {rank}": record for rank, record in records}
    if inputs.profile is not None:
        sizes |= {name: record.gradient_bytes for name, record in recorded.items()}
    for name, size in sizes.items():
        other, known = next(iter(sizes.items()))
        most = 2 * known if name in recorded else known  # a profile has no parameters that are never used
        if not known <= size <= most:
            texts = f"{name} has {size_text(size)} of gradients, but {other} has {size_text(known)}"
            raise UsageError(f"{texts}: are these files of two different models?")
    networks = [inputs.network, *(bench.network for bench in inputs.benches)]
    expected = next((network.host_of_rank for network in networks if network is not None), None)
    hosts = {name: plan.where.host_of_rank for name, plan in inputs.plans.items()}
    if inputs.network is not None:
        hosts |= {name: record.host_of_rank for name, record in recorded.items() if record.host_of_rank}
    for name, host_of_rank in hosts.items():
        if expected is not None and host_of_rank != expected:
            ours, theirs = map(_hosts_text, (host_of_rank, expected))
            order = " in another order" if ours == theirs else ""
            texts = f"{name} is for {ours}{order}, but the network has {theirs}"
            raise UsageError(f"{texts}: are these files of two different clusters?")


def _hosts_text(host_of_rank: tuple[int, ...]) -> str:
    return f"{count_text(len(set(host_of_rank)), 'host')} with {count_text(len(host_of_rank), 'rank')}"


def forecast_for(inputs: Inputs, model: ModelData) -> Forecast | None:
    """Predict a model; None if its profile or network is missing, or the network lacks what predictions need."""
    profile, network = model.profile, model.network
    if profile is None or network is None or inputs.sharded:
        return None
    if profile.sharding is not None and profile.sharding.measured_shards > 1:  # it contains FSDP's collectives
        return None
    schedules = {}
    for text in inputs.schedules:
        schedule = Schedule.parse(profile, text, network.backend)
        if text == "ddp" and model.records and (caps := model.records[0][1].caps):  # the script's own buckets
            schedule = replace(schedule, buckets=filled(profile.gradients, caps))
        schedules[re.sub(r"^ddp\b", "plain DDP", text.replace(",", ", "))] = schedule
    for name, plan in model.plans.items():
        if not plan.nothing and (schedule_of_plan := _schedule_of(plan, profile)) is not None:
            schedules[name] = schedule_of_plan
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
    counts, rates = sorted(set(inputs.hosts)), inputs.rates_bps
    if not counts and network.hosts > 1:
        counts = sorted({network.hosts, *(count for count in HOSTS if count <= _MOST_TIMES_HOSTS * network.hosts)})
    curves = {}
    for rate_bps, (name, schedule) in itertools.product(rates[:_MOST_SCHEDULES], schedules.items()):
        if len(counts) > 1 and len(schedule.buckets) * len(counts) * len(rates) <= _MOST_BUCKETS:
            label = f"{name}, {rate_text(rate_bps)}" if rate_bps and len(rates) > 1 else name
            curves[label] = tuple(predict(profile, resized(network, n, rate_bps), schedule) for n in counts)
    return curves


def resized(network: Network, hosts: int, rate_bps: int | None) -> Network:
    """Return the network with another number of hosts and, if not None, another rate of their links."""
    network = network.with_hosts(hosts)
    return network if rate_bps is None else network.with_rate(rate_bps)


def slowest_forward_and_update_s(profile: Profile, prediction: Prediction) -> tuple[float, float]:
    """Return the seconds of forward and of the optimizer step on the rank that all others wait for."""
    slowest = profile.slowest if prediction.ranks > 1 else None
    times = profile if slowest is None or slowest.step_s <= profile.step_s else slowest
    return times.forward_s, times.update_s


def _schedule_of(plan: Plan, profile: Profile) -> Schedule | None:
    """Convert a plan for the predictor; None if its lanes are not assigned in turn or its gradients differ."""
    index_of = {gradient.name: index for index, gradient in enumerate(profile.gradients)}
    in_turn = all(bucket.lane == index % plan.lanes for index, bucket in enumerate(plan.buckets))
    if not in_turn or {name for bucket in plan.buckets for name in bucket.parameters} != set(index_of):
        return None
    buckets = tuple(tuple(index_of[name] for name in bucket.parameters) for bucket in plan.buckets)
    # A profile holds the costs of an exchange under its name without settings.
    each = tuple((name_of(exchange).partition("(")[0], exchange) for exchange in plan.exchanges)
    return Schedule("plan", buckets, lanes=plan.lanes, each=each)
