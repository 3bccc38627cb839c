"""Everything a page is made from, checked to belong together, and the commands that make it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from syncline.errors import UsageError
from syncline.records.bench_result import BenchResult, DemoResult
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.records.run_record import ModelRecord, RunRecord
from syncline.report.forecast import Forecast
from syncline.units import count_text, size_text

_PLAN_NAMES = {
    "plan": "the plan, lossless",
    "plan-lossy": "the plan, lossy allowed",
    "tune": "the plan, lossless",
    "tune-bf16": "the plan, 16 bits allowed",
}
"""What the plan of a bench's or demo's method is called on the page."""

PREDICT = "Predict again", "syncline predict --profile {profile} --network {network}"
PLAN = "Plan again", "syncline plan --profile {profile} --network {network}"
PROBE = "Probe again, on the cluster", "torchrun … -m syncline probe --output {network}"
PROFILE = "Profile again", "syncline profile MODEL --output {profile}"

Commands = tuple[tuple[str, str], ...]
"""Pairs of a purpose, such as "Predict again", and a command."""


@dataclass(frozen=True)
class Inputs:
    """Everything that one page may show; any part may be missing.

    Raises:
        UsageError: The parts contradict each other, for instance a plan and a profile of different models.
    """

    profile: Profile | None = None
    network: Network | None = None
    plans: Mapping[str, Plan] = field(default_factory=dict)
    """By their names on the page."""
    benches: tuple[BenchResult, ...] = ()
    demo: DemoResult | None = None
    runs: tuple[RunRecord, ...] = ()
    """Records of one run, of some or all of its ranks."""
    schedules: tuple[str, ...] = ("ddp",)
    """Schedules to predict, as `syncline predict --plan` takes them; the first is analysed in detail."""
    hosts: tuple[int, ...] = ()
    """Numbers of hosts to predict, the first in detail; by default the network's, and many more for the scaling."""
    rates_bps: tuple[int | None, ...] = (None,)
    """Rates of the hosts' links to predict, the first in detail; None: the network's own."""
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the files that were read, by kind."""
    command: str = ""
    """The command that makes the page again, if there is one."""

    def __post_init__(self) -> None:
        _check_runs(self.runs)
        _check_consistent(self)
        if self.demo is not None:
            for method in ("nosync", "ddp", "tune", "tune-bf16"):
                if all(row.method != method for row in self.demo.rows):
                    raise UsageError(f"{self.file('demo') or 'demo'}: rows: {method} is missing; run the demo again")

    @property
    def models(self) -> tuple[ModelData, ...]:
        """The models of a run, or the one model that the other files describe."""
        return tuple(_models_of_runs(self)) or (_model_of_files(self),)

    def file(self, kind: str) -> str | None:
        """Return the first file of a kind, if any."""
        return next(iter(self.files.get(kind, ())), None)

    def again(self, purpose: str = "", command: str = "") -> Commands:
        """Return a command with the names of the files that were read, or else the one that makes the whole page."""
        files = {kind: shlex.quote(paths[0]) for kind, paths in self.files.items() if paths}
        try:
            filled = command.format_map(files)
        except KeyError:  # a file was not read
            filled = ""
        recorded = [(purpose, filled), ("Make this page again", self.command)]
        recorded += [("Run again", run.command) for run in self.runs]
        recorded += [("Train again", self.demo.command)] if self.demo is not None else []
        recorded += [("Measure again", bench.command) for bench in self.benches]
        return tuple(entry for entry in recorded if entry[1])[:1]


@dataclass(frozen=True)
class ModelData:
    """One model on one cluster, and all that is known about it."""

    name: str
    profile: Profile | None = None
    network: Network | None = None
    plans: Mapping[str, Plan] = field(default_factory=dict)
    records: tuple[tuple[int, ModelRecord], ...] = ()
    """Ranks and what each recorded."""
    forecast: Forecast | None = None


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
        profile = profile or next((tuning.profile for tuning in reversed(tunings.values())), None)
        plans = plans or {_PLAN_NAMES.get(name, name): tuning.plan for name, tuning in tunings.items()}
        names = ["a CNN on real digits"]
    return ModelData(next(filter(None, names), ""), profile, network, plans)


def _models_of_runs(inputs: Inputs) -> Iterator[ModelData]:
    """Match the ranks' models by name and by the order in which the script builds them."""
    records_of: dict[tuple[int, str], list[tuple[int, ModelRecord]]] = {}
    for run in sorted(inputs.runs, key=lambda run: run.rank):
        for position, model in enumerate(run.models):
            records_of.setdefault((position, model.name), []).append((run.rank, model))
    only = len(records_of) == 1  # files that were passed beside a run describe its only model
    for (_, name), records in records_of.items():
        models = [model for _, model in records]
        profile = next((model.profile for model in models if model.profile is not None), None)
        network = next((model.network for model in models if model.network is not None), None)
        plan = next((model.plan for model in models if model.plan is not None), None)
        yield ModelData(
            name,
            profile or (inputs.profile if only else None),
            network or inputs.network,
            inputs.plans if plan is None else {"the plan": plan},
            tuple(records),
        )


def _check_runs(runs: tuple[RunRecord, ...]) -> None:
    seen: set[int] = set()
    for run in runs:
        if not 0 <= run.rank < run.ranks:
            raise UsageError(f"a run's record claims to be of rank {run.rank} of {run.ranks}: there is no such rank")
        if run.ranks != runs[0].ranks:
            ranks = f"{runs[0].ranks} ranks and {run.ranks}"
            raise UsageError(f"these records are of two runs, with {ranks}: pass one run, or remove old records")
        if run.rank in seen:
            raise UsageError(f"two records are of rank {run.rank}: pass the records of one run")
        seen.add(run.rank)


def _check_consistent(inputs: Inputs) -> None:
    """Raise unless all files describe the same model on the same cluster."""
    sizes = {"the profile": inputs.profile.gradient_bytes} if inputs.profile is not None else {}
    sizes |= {name: sum(gradient.bytes for gradient in plan.gradients) for name, plan in inputs.plans.items()}
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
            ours, theirs = (
                f"{count_text(len(set(place)), 'host')} with {count_text(len(place), 'rank')}"
                for place in (host_of_rank, expected)
            )
            order = " in another order" if ours == theirs else ""
            texts = f"{name} is for {ours}{order}, but the network has {theirs}"
            raise UsageError(f"{texts}: are these files of two different clusters?")
