"""What is known, from wherever it comes, and whether it belongs together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from syncline.errors import UsageError
from syncline.records.bench_result import BenchResult, DemoResult
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.records.run_record import ModelRecord, RunRecord
from syncline.report import figures


@dataclass(frozen=True)
class Story:
    """Everything that one page may tell of; each part may be missing."""

    profile: Profile | None = None
    network: Network | None = None
    plans: Mapping[str, Plan] = field(default_factory=dict)
    """By what they are called on the page."""
    benches: tuple[BenchResult, ...] = ()
    demo: DemoResult | None = None
    runs: tuple[RunRecord, ...] = ()
    """Of one run, by rank; not necessarily of all."""
    schedules: tuple[str, ...] = ("ddp",)
    """As `syncline predict --plan` takes them; the first is looked at in detail."""
    hosts: tuple[int, ...] = ()
    """How many of them to look at, the first in detail; by default the network's, and from two to many more."""
    rates_bps: tuple[int | None, ...] = (None,)
    """Of the hosts' links, the first in detail; None: as they are."""
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind, for people: what it was read from."""
    command: str = ""
    """That makes all of this again, where one does."""

    def __post_init__(self) -> None:
        _check_runs(self)
        for subject in self.subjects:
            _check_subject(self, subject)
        for result in self.benches:
            _check_bench(self, result)
        if self.demo is not None:
            _check_demo(self, self.demo)

    @property
    def empty(self) -> bool:
        return not (self.profile or self.network or self.plans or self.benches or self.demo or self.runs)

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """The models: those of a run, or the one that the other files tell of."""
        return tuple(_of_runs(self)) or (_of_files(self),)

    def name(self, kind: str, otherwise: str) -> str:
        """A file, in an error."""
        return next(iter(self.files.get(kind, ())), otherwise)


@dataclass(frozen=True)
class Subject:
    """One model on one cluster."""

    name: str
    profile: Profile | None = None
    network: Network | None = None
    plans: Mapping[str, Plan] = field(default_factory=dict)
    records: tuple[tuple[int, ModelRecord], ...] = ()
    """By rank."""

    @property
    def caps(self) -> tuple[int, ...]:
        """Bytes at which a script's DDP closes its own buckets, where that is known."""
        return self.records[0][1].caps if self.records else ()

    @property
    def parameters(self) -> int | None:
        return self.records[0][1].parameters if self.records else None

    @property
    def gradient_bytes(self) -> int | None:
        if self.profile is not None:
            return self.profile.gradient_bytes
        if self.records:
            return self.records[0][1].gradient_bytes
        plan = next(iter(self.plans.values()), None)
        return None if plan is None else sum(gradient.bytes for gradient in plan.gradients)


def _of_files(story: Story) -> Subject:
    profile, network, plans = story.profile, story.network, dict(story.plans)
    for result in story.benches:
        profile, network = profile or result.profile, network or result.network
        plans = plans or {_PLANNED[name]: plan for name, plan in result.plans.items() if name in _PLANNED}
    if story.demo is not None:
        network = network or story.demo.network
        profile = profile or next((found.profile for found in reversed(story.demo.tunings.values())), None)
        plans = plans or {_TUNED.get(name, name): found.plan for name, found in story.demo.tunings.items()}
    names = ["a CNN on real digits"] if story.demo is not None else []
    names += [one.model for one in (profile, *plans.values()) if one is not None]
    names += [result.model.name for result in story.benches]
    return Subject(next((name for name in names if name), ""), profile, network, plans)


_PLANNED = {"plan": "the plan, lossless", "plan-lossy": "the plan, lossy allowed"}
_TUNED = {"tune": "the plan, lossless", "tune-bf16": "the plan, 16 bits allowed"}


def _of_runs(story: Story) -> Iterator[Subject]:
    """Models of one name, in the order in which scripts make them, are the same on all ranks."""
    found: dict[tuple[int, str], list[tuple[int, ModelRecord]]] = {}
    for run in sorted(story.runs, key=lambda run: run.rank):
        for place, model in enumerate(run.models):
            found.setdefault((place, model.name), []).append((run.rank, model))
    for (_, name), records in found.items():
        models = [model for _, model in records]
        plan = next((model.plan for model in models if model.plan is not None), None)
        alone = len(found) == 1
        yield Subject(
            name,
            next((model.profile for model in models if model.profile is not None), story.profile if alone else None),
            next((model.network for model in models if model.network is not None), story.network),
            ({"the plan": plan} if plan is not None else story.plans) if alone or plan is None else {"the plan": plan},
            tuple(records),
        )


def _check_runs(story: Story) -> None:
    for index, run in enumerate(story.runs):
        if not 0 <= run.rank < run.ranks:
            raise UsageError(f"a run's record says that it is of rank {run.rank} of {run.ranks}: there is none")
        if run.ranks != story.runs[0].ranks:
            counts = f"{story.runs[0].ranks} ranks and {run.ranks}"
            raise UsageError(f"these records are of two runs, with {counts}: pass those of one, or remove old ones")
        if any(other.rank == run.rank for other in story.runs[:index]):
            raise UsageError(f"two records are of rank {run.rank}: pass those of one run")


def _check_subject(story: Story, subject: Subject) -> None:
    """Only of what was brought together here: what a record or a result holds belongs together."""
    profile, network = subject.profile, subject.network
    for name, plan in subject.plans.items():
        brought = name in story.plans and plan is story.plans[name]
        if profile is not None and (brought or profile is story.profile):
            _check_plan(name, plan, profile)
        if network is not None and (brought or network is story.network):
            _check_cluster(f"{name} is for", plan.where.host_of_rank, network)
    for rank, model in subject.records:
        if profile is not None and profile is story.profile and not _fits(profile, model):
            sizes = f"{figures.size(model.gradient_bytes)}, and the profile's {figures.size(profile.gradient_bytes)}"
            raise UsageError(f"{model.name} of rank {rank} has gradients of {sizes}: were files of two models mixed?")
        if network is not None and network is story.network:
            _check_cluster(f"{model.name} ran on", model.host_of_rank, network)


def _fits(profile: Profile, model: ModelRecord) -> bool:
    """Parameters that are never used have no gradient in a profile, and a place in the model."""
    return model.gradient_bytes / 2 <= profile.gradient_bytes <= model.gradient_bytes


def _check_cluster(what: str, host_of_rank: tuple[int, ...], network: Network) -> None:
    if host_of_rank and host_of_rank != network.host_of_rank:
        theirs, ours = _cluster(host_of_rank), _cluster(network.host_of_rank)
        theirs = f"ranks that are placed otherwise ({theirs})" if theirs == ours else theirs
        raise UsageError(f"{what} {theirs}, and the network has {ours}: were files of two clusters mixed?")


def _check_plan(name: str, plan: Plan, profile: Profile) -> None:
    planned = {gradient.name: (gradient.shape, gradient.dtype) for gradient in plan.gradients}
    profiled = {gradient.name: (gradient.shape, gradient.dtype) for gradient in profile.gradients}
    for parameter in [*planned, *profiled]:
        if planned.get(parameter) != profiled.get(parameter):
            what = "is not the same in both"
            if parameter not in planned or parameter not in profiled:
                what = f"is not in the {'plan' if parameter not in planned else 'profile'}"
            raise UsageError(f"{name} is for another model than the profile: parameter {parameter} {what}")


def _check_bench(story: Story, result: BenchResult) -> None:
    profile = story.profile or next((one.profile for one in story.benches if one.profile is not None), None)
    known = [*([profile.gradient_bytes] if profile else []), *(one.model.gradient_bytes for one in story.benches)]
    if any(nbytes != result.model.gradient_bytes for nbytes in known):
        other = next(nbytes for nbytes in known if nbytes != result.model.gradient_bytes)
        raise UsageError(
            f"{story.name('bench', 'the bench')}: its model has {figures.size(result.model.gradient_bytes)} of "
            f"gradients, and another file's {figures.size(other)}: were files of two models mixed?"
        )


def _check_demo(story: Story, result: DemoResult) -> None:
    methods = [row.method for row in result.rows]
    missing = next((name for name in ("nosync", "ddp", "tune", "tune-bf16") if name not in methods), None)
    if missing is not None:
        raise UsageError(f"{story.name('demo', 'the demo')}: rows: {missing} is missing; run the demo again")


def _cluster(host_of_rank: tuple[int, ...]) -> str:
    hosts = len(set(host_of_rank))
    return f"{figures.count(hosts, 'host')} with {figures.count(len(host_of_rank), 'rank')}"
