"""JSON files: valid ones, and what each that was read must satisfy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import made_up
from hostile.mutations import Trees
from hostile.oracle import Files, Format
from syncline.exchange import Dense, Hierarchical, OkTopk, settings
from syncline.files import read_json, write_json
from syncline.records.activations import Activations, Block, Line
from syncline.records.bench_result import BenchResult, Cluster, Model, Row
from syncline.records.failure_report import Event, FailureReport, Kind, Pending, Suspect
from syncline.records.network import Network
from syncline.records.plan import Plan, PlannedBucket, PlannedGradient, Where
from syncline.records.profile import Buffers, Overheads, Profile, Spread
from syncline.records.profile import Work as OwnWork
from syncline.records.run_record import BucketSpan, Loss, ModelRecord, Pace, PhaseSpan, RunRecord, StepSpan

T = TypeVar("T")


def _line(each: float) -> Line:
    return Line(fixed=8.0, each=each)


PROFILE = msgspec.structs.replace(
    made_up.with_slow_rank(1, 1.5),
    gradients=made_up.profile([40, 30, 20, 10]).gradients,
    buffers=(Buffers(dtype="int64", bytes=8), Buffers(dtype="float32", bytes=80)),
    spread=Spread(low_s=0.05, high_s=0.07),
    jitter_s=0.001,
    batch=8,
    overheads=Overheads(
        copy_in_s_per_byte=1e-10,
        copy_out_s_per_byte=1e-10,
        hook_s=1e-5,
        work={"bf16": OwnWork(fixed_s=1e-5, s_per_byte=1e-9)},
    ),
    activations=Activations(
        batches=(4, 8),
        blocks=(
            Block(
                name="layer0",
                held=_line(4.0),
                input=_line(2.0),
                forward_peak=_line(5.0),
                backward_peak=_line(9.0),
                forward_s=_line(1e-3),
                backward_s=_line(2e-3),
            ),
        ),
        before=_line(1.0),
        behind_peak=_line(3.0),
        before_peak=_line(2.0),
        behind_s=_line(1e-3),
        to_host_bps=1e9,
        parameter_bytes=400,
        elements=100,
        largest_bytes=160,
        optimizer_bytes=4.0,
    ),
)
PLAN = made_up.plan(
    tuple(
        PlannedGradient(name=name, shape=shape, dtype=dtype)
        for name, shape, dtype in (("a", (30, 4), "float32"), ("b", (30,), "float32"), ("c", (), "bfloat16"))
    ),
    (
        PlannedBucket(
            parameters=("a",),
            lane=1,
            exchange=settings(Hierarchical(across=OkTopk(density=0.05), levels=[[0, 1], [2, 3]], chunks=2)),
        ),
        PlannedBucket(parameters=("b",), lane=0, exchange=settings(OkTopk(momentum=0.9, warmup=3))),
        PlannedBucket(parameters=("c",), lane=0, exchange=settings(Dense(wire="bf16"))),
    ),
    Where(host_of_rank=(0, 0, 1, 1), backend="gloo", device="cpu"),
    lanes=2,
)
NOTHING = msgspec.structs.replace(PLAN, buckets=(), lanes=1)
RECORD = RunRecord(
    rank=0,
    ranks=4,
    command="torchrun -m syncline.run train.py",
    ended="finished",
    seconds=12.5,
    tuning_s=3.0,
    date="2025-01-01T00:00:00+00:00",
    torch="2.13.0",
    syncline="0.1.0",
    clock_s=1.7e9,
    models=(
        ModelRecord(
            name="Mlp",
            parameters=100,
            gradient_bytes=400,
            host_of_rank=(0, 0, 1, 1),
            backend="gloo",
            device="cpu",
            steps=60,
            outcome="The plan was kept.",
            way="the plan",
            caps=(1 << 20, 25 << 20),
            paces=(
                Pace(
                    way="the plan",
                    steps=20,
                    step_s=0.1,
                    low_s=0.09,
                    high_s=0.12,
                    forward_s=0.03,
                    backward_s=0.05,
                    exposed_s=0.02,
                    between_s=0.01,
                    sent_bytes=800,
                ),
            ),
            spans=(
                StepSpan(
                    step=3,
                    way="the plan",
                    start_s=1.0,
                    backward_s=1.25,
                    backward_end_s=1.5,
                    end_s=1.75,
                    buckets=(
                        BucketSpan(
                            bucket=0,
                            lane=0,
                            bytes=400,
                            exchange="dense",
                            ready_s=1.3,
                            start_s=1.3,
                            end_s=1.7,
                            phases=(
                                PhaseSpan(name="all_reduce", level="world", sent_bytes=600, start_s=1.4, end_s=1.7),
                            ),
                        ),
                    ),
                ),
            ),
            losses=(Loss(step=0, value=2.3), Loss(step=10, value=-0.5)),
            profile=made_up.profile([40, 10]),
            network=made_up.network((0, 1)),
            plan=NOTHING,
        ),
    ),
)
FAILURE = FailureReport(
    rank=1,
    world_size=4,
    host="host1",
    process=123,
    date="2026-11-16T09:32:58.884+00:00",
    backend="gloo",
    timeout_s=10.0,
    run="job",
    attempt="0",
    job="0123456789abcdef",
    where="step 6",
    step=6,
    error="exchanging bucket 0 failed in step 6: Connection closed by peer",
    suspects=(Suspect(2, Kind.SILENT, "no heartbeat for 2 s"), Suspect(0, Kind.VICTIM, "it failed too")),
    pending=(Pending(lane=0, step=6, bucket=0, bytes=526336, exchange="OkTopk", age_s=1.5),),
    events=(
        Event(before_s=2.0, what="ready", lane=0, step=6, bucket=0),
        Event(before_s=1.9, what="all_to_all", lane=0, step=6, bucket=0, level="world", sent_bytes=4096),
    ),
)
BENCH = BenchResult(
    cluster=Cluster(hosts=2, per_host=[2, 1], rate_bps=10**9, device="cpu", emulated=True, burst_bytes=80_000),
    model=Model(name="mlp", parameters=100, gradient_bytes=400),
    rows=[
        Row("ddp", 10.0, 9.0, 11.0, 800, 10.5, 800, wire_bytes=900, vs_ddp=1.0, vs_ddp_low=0.9, vs_ddp_high=1.1),
        Row("powersgd", 5.0, 4.0, 6.0, None, None, None, setting="rank 1"),
    ],
    rounds=5,
    batch=8,
    command="syncline bench",
    profile=made_up.profile([40, 10]),
    network=made_up.network((0, 1)),
    plans={"plan": NOTHING},
)


def _sensible(found: msgspec.Struct) -> None:
    """What no field of any file may be, wherever it stands: independent of what classes check themselves."""
    for value in _leaves(msgspec.to_builtins(found)):
        if isinstance(value, float):
            assert math.isfinite(value), f"{value} was read"
        elif isinstance(value, int):
            assert -(2**63) <= value < 2**63, f"{value} was read"
        elif isinstance(value, str):
            value.encode()


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        yield from tree
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree


def check_plan(plan: Plan) -> None:
    _sensible(plan)
    names = [gradient.name for gradient in plan.gradients]
    named = [name for bucket in plan.buckets for name in bucket.parameters]
    assert names and len(set(names)) == len(names)
    assert sorted(named) == (sorted(names) if plan.buckets else [])
    assert all(0 <= bucket.lane < plan.lanes <= 16 for bucket in plan.buckets)
    assert all(gradient.nbytes >= 0 and all(size >= 0 for size in gradient.shape) for gradient in plan.gradients)
    assert 0 <= plan.low_s <= plan.high_s
    assert min(plan.iteration_s, plan.compute_s, plan.plain_s, plan.exchange_s) >= 0
    assert set(plan.where.host_of_rank) == set(range(max(plan.where.host_of_rank) + 1))
    assert len(plan.exchanges) == len(plan.buckets) and isinstance(plan.lossless, bool)
    assert all(cap >= 0 for cap in plan.caps)


def check_profile(profile: Profile) -> None:
    _sensible(profile)
    names = [gradient.name for gradient in profile.gradients]
    ready = [gradient.ready_s for gradient in profile.gradients]
    assert names and len(set(names)) == len(names) and all(names)
    assert ready == sorted(ready) and ready[0] >= 0 and ready[-1] <= profile.backward_s * (1 + 1e-5) + 1e-8
    assert min(profile.forward_s, profile.backward_s, profile.update_s, profile.jitter_s) >= 0
    assert 0 < profile.gradient_bytes < 2**63 or all(0 in gradient.shape for gradient in profile.gradients)
    assert profile.steps >= 1 and (profile.batch is None or profile.batch >= 1) and profile.device in ("cpu", "cuda")
    assert math.isfinite(profile.step_s) and (profile.slowest is None or math.isfinite(profile.slowest.step_s))
    assert profile.scaled(time=0.5).step_s <= profile.step_s


def check_network(network: Network) -> None:
    _sensible(network)
    assert set(network.host_of_rank) == set(range(network.hosts))
    assert set(network.rack_of_host) == set(range(network.racks))
    assert len({link.name for link in network.links}) == len(network.links)
    assert all(link.bytes_per_s > 0 and link.burst_bytes >= 0 for link in network.links)
    for entry in network.collectives:
        assert entry.ranks == network.ranks_at(entry.level) >= 2
        assert 0 <= entry.least_s(10**9) < math.inf
    assert network.tree.levels
    assert 1 <= network.slowdown(3) < math.inf and 1 <= network.crowding(3) < math.inf
    assert network.in_flight >= 1


def check_record(record: RunRecord) -> None:
    _sensible(record)
    assert min(record.rank, record.ranks) >= 0  # which of how many there can be, those say who gather records
    assert min(record.seconds, record.tuning_s) >= 0
    for model in record.models:
        assert min(model.parameters, model.gradient_bytes, model.steps) >= 0
        for span in model.spans:
            assert span.start_s <= span.backward_s <= span.backward_end_s <= span.end_s
            assert all(min(bucket.bucket, bucket.lane, bucket.bytes) >= 0 for bucket in span.buckets)
        for pace in model.paces:
            assert min(pace.step_s, pace.low_s, pace.high_s, pace.forward_s, pace.backward_s, pace.exposed_s) >= 0


def check_failure(failure: FailureReport) -> None:
    _sensible(failure)
    assert 0 <= failure.rank < failure.world_size and failure.timeout_s >= 0
    assert failure.moment().tzinfo is not None
    assert all(isinstance(suspect.kind, Kind) for suspect in failure.suspects)


def _json_format(name: str, type: type[T], examples: Sequence[Any], check: Callable[[T], None]) -> Files[T]:
    contents = tuple(json.dumps(msgspec.to_builtins(example)).encode() for example in examples)

    def write(folder: Path, found: T) -> Path:
        write_json(folder / "again.json", found)  # type: ignore[arg-type]
        return folder / "again.json"

    load = getattr(type, "load", None) or (lambda path: read_json(path, type))  # type: ignore[type-var]
    return Files(name, contents, Trees(contents).mutated, load, write, check)


FILES: tuple[Format, ...] = (
    _json_format("plan", Plan, (PLAN, NOTHING), check_plan),
    _json_format("profile", Profile, (PROFILE, made_up.profile([40, 10])), check_profile),
    _json_format("network", Network, (made_up.RICH_NETWORK, made_up.network((0, 1))), check_network),
    _json_format("record", RunRecord, (RECORD,), check_record),
    _json_format("bench", BenchResult, (BENCH,), _sensible),
    _json_format("failure", FailureReport, (FAILURE, msgspec.structs.replace(FAILURE, step=None)), check_failure),
)
