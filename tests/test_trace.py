"""Tests of recorded collectives, and of the trace for Perfetto."""

from __future__ import annotations

import csv
import gc
import io
import json
import os
import shutil
import subprocess
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from ddp_helpers import SMALL_BUCKETS, TIMEOUT_S, batch, seeded
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.dist.lane import Job, Phases
from syncline.exchange import AllgatherTopk, Dense, Hierarchical, OkTopk, name_of
from syncline.files import FileError
from syncline.records.run_record import BucketSpan, ModelRecord, PhaseSpan, RunRecord, StepSpan
from syncline.report.trace import trace_of, write_trace

STEPS = 4
WAYS: dict[str, syncline.Exchange] = {
    "dense": Dense(),
    "bf16": Dense(wire="bf16"),
    "leader": Hierarchical(levels=(2, 2), shape="leader", chunks=3),
    "sharded": Hierarchical(levels=(2, 2), shape="sharded", chunks=3),
    "sparse": OkTopk(density=0.1),
}


def _wide() -> nn.Module:
    """Return two layers, of which only the larger is suitable for a sparse exchange."""
    return nn.Sequential(nn.Linear(16, 256), nn.Linear(256, 32))


def _spans(handle: syncline.Handle) -> tuple[BucketSpan, ...]:
    return tuple(msgspec.convert(msgspec.to_builtins(bucket), BucketSpan) for bucket in handle.stats().buckets)


def _trained(rank: Rank, name: str, exchange: syncline.Exchange) -> tuple[ModelRecord, dict[str, Any]]:
    model = DDP(seeded(_wide), **SMALL_BUCKETS)
    handle = syncline.attach(model, exchange)
    spans, seen = [], dict[str, Any]()
    for number in range(STEPS + 1):
        handle.trace(number < STEPS)
        start_s = time.monotonic()
        loss = model(batch(rank.rank, number)).square().mean()
        backward_s = time.monotonic()
        loss.backward()
        end_s = time.monotonic()
        model.zero_grad()
        buckets = _spans(handle)
        if number == STEPS:
            seen["untraced"] = [len(bucket.phases) for bucket in buckets]
            break
        backward_end_s = max(bucket.ready_s for bucket in buckets)
        step = StepSpan(
            step=number,
            way=name,
            start_s=start_s,
            backward_s=backward_s,
            backward_end_s=backward_end_s,
            end_s=end_s,
            buckets=buckets,
        )
        spans.append(step)
        seen["sent"] = handle.stats().sent_bytes
    jobs = [weakref.ref(job) for job in handle._engine.runner.last_step.jobs]
    gc.collect()
    gc.disable()
    handle.detach()
    seen["left"] = sum(job() is not None for job in jobs)  # there is no reference cycle
    gc.enable()
    return _model(name, spans), seen


def _model(name: str, spans: Sequence[StepSpan], host_of_rank: tuple[int, ...] = (0, 0, 1, 1)) -> ModelRecord:
    return ModelRecord(
        name=name,
        parameters=1,
        gradient_bytes=4,
        host_of_rank=host_of_rank,
        backend="gloo",
        device="cpu",
        steps=len(spans),
        outcome="attached",
        way=name,
        spans=tuple(spans),
    )


def _record(rank: int, models: Sequence[ModelRecord], *, ranks: int = 4, clock_s: float = 0.0) -> RunRecord:
    return RunRecord(
        rank=rank,
        ranks=ranks,
        command="torchrun train.py",
        ended="finished",
        seconds=1.0,
        tuning_s=0.0,
        date="2026-11-15",
        torch=str(torch.__version__),
        syncline=syncline.__version__,
        clock_s=clock_s,
        models=tuple(models),
    )


Recorded = tuple[list[RunRecord], list[dict[str, dict[str, Any]]]]
"""The run record of each rank, and further observations by method."""


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """Train one model per method on four ranks."""

    def main(rank: Rank) -> Any:
        rank.init_process_group(TIMEOUT_S)
        ran = {name: _trained(rank, name, exchange) for name, exchange in WAYS.items()}
        record = _record(rank.rank, [model for model, _ in ran.values()], clock_s=time.time() - time.monotonic())
        return msgspec.to_builtins(record), {name: seen for name, (_, seen) in ran.items()}

    results = launch(ClusterSpec(hosts=2, per_host=(2, 2)), main, shaped=False, deadline_s=90.0)
    return [msgspec.convert(record, RunRecord) for record, _ in results], [seen for _, seen in results]


def _last_step(record: RunRecord, way: str) -> StepSpan:
    return next(model for model in record.models if model.name == way).spans[-1]


def _calls(step: StepSpan) -> list[list[tuple[str, str]]]:
    return [[(phase.name, phase.level) for phase in bucket.phases] for bucket in step.buckets]


# --- phases -----------------------------------------------------------------------------------------------------


def test_every_collective_of_an_exchange_is_recorded_with_its_level(recorded: Recorded) -> None:
    records, _ = recorded
    for record in records:
        assert _calls(_last_step(record, "dense")) == [[("all_reduce", "world")]] * 2
        assert _calls(_last_step(record, "bf16")) == [[("all_reduce", "world")]] * 2
        assert _calls(_last_step(record, "sparse")) == [[("all_to_all", "world"), ("all_gather", "world")]] * 2
        leads = record.rank in (0, 2)
        up, across, down = ("reduce", "level1"), ("all_reduce", "level2"), ("broadcast", "level1")
        for calls in _calls(_last_step(record, "leader")):
            assert Counter(calls) == Counter({up: 3, across: 3, down: 3} if leads else {up: 3, down: 3})
        up, down = ("all_to_all", "level1"), ("all_gather", "level1")
        for calls in _calls(_last_step(record, "sharded")):
            assert Counter(calls) == Counter({up: 3, across: 3, down: 3})


def test_the_bytes_of_collectives_add_up_to_those_of_the_step(recorded: Recorded) -> None:
    records, seen = recorded
    for record, saw in zip(records, seen, strict=True):
        for way in WAYS:
            total: Counter[str] = Counter()
            for bucket in _last_step(record, way).buckets:
                for phase in bucket.phases:
                    total[phase.level] += phase.sent_bytes
            assert dict(total) == saw[way]["sent"], way


def test_collectives_lie_inside_their_bucket_and_pipelined_chunks_overlap(recorded: Recorded) -> None:
    records, _ = recorded
    overlaps: Counter[str] = Counter()
    for record in records:
        for model in record.models:
            for bucket in (bucket for step in model.spans for bucket in step.buckets):
                assert bucket.ready_s <= bucket.start_s
                for phase in bucket.phases:
                    assert bucket.start_s <= phase.start_s <= phase.end_s <= bucket.end_s, (model.name, bucket)
                pairs = zip(bucket.phases, bucket.phases[1:], strict=False)
                overlaps[model.name] += sum(after.start_s < before.end_s for before, after in pairs)
    assert overlaps["leader"] > 0 and overlaps["sharded"] > 0, overlaps
    assert overlaps["bf16"] == overlaps["sparse"] == 0, "these wait for each collective before they issue the next"


def test_nothing_is_recorded_without_tracing_and_tracing_leaks_nothing(recorded: Recorded) -> None:
    _, seen = recorded
    for saw in seen:
        for way in WAYS:
            assert set(saw[way]["untraced"]) == {0}, way
            assert saw[way]["left"] == 0, way


def test_a_bucket_records_the_name_of_its_exchange(recorded: Recorded) -> None:
    records, _ = recorded
    assert {bucket.exchange for bucket in _last_step(records[0], "sparse").buckets} == {"oktopk(density=0.1)"}
    assert [name_of(exchange) for exchange in (Dense(), Dense(wire="fp16"), OkTopk())] == ["dense", "fp16", "oktopk"]
    assert name_of(Hierarchical(across=OkTopk(density=0.05))) == "hierarchical+oktopk(density=0.05)"
    assert name_of(Hierarchical(within=Dense(wire="bf16"), chunks=2)) == "hierarchical(within=bf16, chunks=2)"
    assert name_of(AllgatherTopk(values="bf16")) == "topk-allgather(values='bf16')"


class _NoFuture:
    """The work of a backend without futures."""

    def wait(self) -> None: ...

    def get_future(self) -> Any:
        raise RuntimeError("not implemented for this backend")


def test_a_collective_without_a_future_ends_when_wait_returns() -> None:
    job = Job(0, 0, torch.zeros(1), lambda: None)
    phases = Phases(job.marks)
    waited, never = (phases.begin("reduce", "hosts", 8)(_NoFuture()) for _ in range(2))
    before_s = time.monotonic()
    waited.wait()
    job.marks.mark("end")
    seconds = job.marks.seconds()
    assert seconds is not None and never is not None
    (ended,) = phases.ended(seconds)
    assert ended[:3] == ("reduce", "hosts", 8)
    assert ended[3] <= before_s <= ended[4] <= time.monotonic()


# --- the trace --------------------------------------------------------------------------------------------------


def _assert_loads(trace: Mapping[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """Check a JSON trace by the rules of Perfetto's trace processor, and return the slices of each thread.

    - Events are read by time, and in the order of the file if times are equal.
    - Each thread has a stack of slices. A new slice removes those that have ended. It is dropped if it overlaps a
      remaining slice without being nested in it.
    - Threads are identified by their number alone.
    """
    text = json.dumps(trace, allow_nan=False)
    events = json.loads(text)["traceEvents"]
    assert trace["displayTimeUnit"] == "ms"
    processes: dict[int, str] = {}
    threads: dict[int, tuple[int, str]] = {}
    slices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str) and event["name"]
        assert all(type(event[key]) is int and event[key] > 0 for key in ("pid", "tid")), event
        assert type(event["ts"]) is int and event["ts"] >= 0, event
        if event["ph"] == "M":
            value = event["args"]["name" if event["name"].endswith("_name") else "sort_index"]
            if event["name"] == "process_name":
                assert event["pid"] not in processes
                processes[event["pid"]] = value
            elif event["name"] == "thread_name":
                assert event["tid"] not in threads, "two threads with the same number"
                threads[event["tid"]] = (event["pid"], value)
            else:
                assert event["name"] in ("process_sort_index", "thread_sort_index") and type(value) is int
    stacks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in sorted((event for event in events if event["ph"] != "M"), key=lambda event: event["ts"]):
        assert threads[event["tid"]][0] == event["pid"], "the thread belongs to another process, or has no name"
        stack, ts = stacks[event["tid"]], event["ts"]
        assert event["ph"] == "X", event
        end = ts + event["dur"]
        assert type(event["dur"]) is int and event["dur"] >= 0 and event["cat"]
        while stack:
            top_end = stack[-1]["ts"] + stack[-1]["dur"]
            if not (top_end < ts or (top_end == ts and (stack[-1]["dur"] or event["dur"]))):
                break
            stack.pop()
        assert all(end <= other["ts"] + other["dur"] for other in stack), (
            "overlaps without being nested",
            event,
            stack,
        )
        stack.append(event)
        slices[event["tid"]].append({**event, "depth": len(stack) - 1})
    return slices


def _rows(trace: Mapping[str, Any], process: int) -> dict[str, int]:
    """Return the numbers of a process's threads by name."""
    return {
        event["args"]["name"]: event["tid"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name" and event["pid"] == process
    }


def _processes(trace: Mapping[str, Any]) -> dict[str, int]:
    return {event["args"]["name"]: event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}


def test_the_trace_of_real_ranks_loads_with_every_step_bucket_and_collective(recorded: Recorded) -> None:
    records, _ = recorded
    trace = trace_of(list(reversed(records)))
    slices = [entry for row in _assert_loads(trace).values() for entry in row]
    titles = [f"rank {rank} on host {rank // 2}: {way}" for rank in range(4) for way in WAYS]
    assert list(_processes(trace)) == titles
    found = Counter(entry["cat"] for entry in slices)
    steps = [step for record in records for model in record.models for step in model.spans]
    buckets = [bucket for step in steps for bucket in step.buckets]
    assert found["bucket"] == len(buckets)
    assert found["collective"] == sum(len(bucket.phases) for bucket in buckets)
    assert Counter(entry["name"] for entry in slices if entry["cat"] == "computation") >= Counter(
        {"forward": len(steps), "backward": len(steps), "step 0": len(records) * len(WAYS)}
    )
    sparse = _rows(trace, _processes(trace)["rank 1 on host 0: sparse"])
    assert {"computation", "lane 0", "lane 1"} <= sparse.keys()
    assert min(event["ts"] for event in trace["traceEvents"] if event["ph"] == "X") == 0


def _step(start_s: float, *buckets: BucketSpan, step: int = 0) -> StepSpan:
    return StepSpan(
        step=step,
        way="plan",
        start_s=start_s,
        backward_s=start_s + 0.1,
        backward_end_s=start_s + 0.3,
        end_s=start_s + 0.5,
        buckets=buckets,
    )


def _bucket(index: int, ready_s: float, start_s: float, end_s: float, *phases: PhaseSpan, lane: int = 0) -> BucketSpan:
    return BucketSpan(
        bucket=index,
        lane=lane,
        bytes=100,
        exchange="dense",
        ready_s=ready_s,
        start_s=start_s,
        end_s=end_s,
        phases=phases,
    )


def _phase(name: str, start_s: float, end_s: float) -> PhaseSpan:
    return PhaseSpan(name=name, level="hosts", sent_bytes=7, start_s=start_s, end_s=end_s)


def test_concurrent_slices_are_in_separate_rows() -> None:
    first = _bucket(0, 10.15, 10.16, 10.4, _phase("reduce", 10.16, 10.3), _phase("reduce", 10.2, 10.35))
    second = _bucket(1, 10.2, 10.25, 10.45, _phase("broadcast", 10.3, 10.45))
    third = _bucket(2, 10.3, 10.4, 10.5)
    trace = trace_of([_record(0, [_model("net", [_step(10.0, first, second, third)])])])
    slices = _assert_loads(trace)
    rows = _rows(trace, _processes(trace)["rank 0 on host 0: net"])
    assert list(rows) == ["computation", "lane 0", "lane 0 (2)", "lane 0, collectives (2)"]
    shown = {name: [(entry["name"], entry["depth"]) for entry in slices[tid]] for name, tid in rows.items()}
    assert shown["lane 0"] == [("bucket 0", 0), ("reduce (hosts)", 1), ("bucket 2", 0)]
    assert shown["lane 0 (2)"] == [("bucket 1", 0), ("broadcast (hosts)", 1)]
    assert shown["lane 0, collectives (2)"] == [("reduce (hosts)", 0)]
    assert shown["computation"] == [("step 0", 0), ("forward", 1), ("backward", 1), ("waiting for gradients", 1)]
    (bucket,) = [entry for entry in slices[rows["lane 0"]] if entry["name"] == "bucket 2"]
    assert bucket["args"] == {"bytes": 100, "exchange": "dense", "step": 0, "way": "plan", "waited_us": 100000}


def test_ranks_are_aligned_by_their_wall_clocks() -> None:
    """Monotonic clocks start with each host: the same moment is 5 s on one host and 900 s on the other."""
    here = _record(0, [_model("net", [_step(5.0)])], clock_s=1_790_000_000.0)
    there = _record(2, [_model("net", [_step(900.000002)])], clock_s=1_790_000_000.0 - 895.0)
    starts = [
        event["ts"] for event in trace_of([there, here])["traceEvents"] if event["name"] == "step 0" and event["pid"]
    ]
    assert starts == [0, 2]


def test_models_are_separate_processes_and_unusual_records_load() -> None:
    name = 'a "quoted" <b>name</b> \ud800 ☃'
    # Overlapping steps, and buckets that are ready before backward, have no duration, or end after the step.
    odd = [
        _step(1.0, _bucket(0, 0.9, 0.95, 1.7), _bucket(1, 1.2, 1.2, 1.2), step=0),
        _step(1.4, _bucket(0, 1.45, 1.5, 2.6, _phase("all_reduce", 1.4, 2.7)), step=1),
        StepSpan(step=2, way="", start_s=3.0, backward_s=3.0, backward_end_s=3.0, end_s=3.0),
    ]
    models = [_model(name, odd, host_of_rank=(0, 1)), _model(name, odd[:1]), _model("empty", [])]
    trace = trace_of([_record(1, models)])
    slices = _assert_loads(trace)
    titles = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert titles == [f"rank 1: {name}", f"rank 1 on host 0: {name}", "rank 1 on host 0: empty"]
    assert sum(entry["cat"] == "bucket" for row in slices.values() for entry in row) == 5
    assert trace_of([]) == {"traceEvents": [], "displayTimeUnit": "ms", "otherData": {}}


def test_a_trace_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    record = _record(0, [_model("net", [_step(1.0)])])
    write_trace(tmp_path / "trace.json", [record])
    assert json.loads((tmp_path / "trace.json").read_text()) == trace_of([record])
    for bad in (float("nan"), float("inf")):
        broken = msgspec.structs.replace(record, clock_s=bad)
        with pytest.raises(FileError, match=r"trace\.json: not written"):
            write_trace(tmp_path / "trace.json", [record, broken])
    with pytest.raises(FileError, match="cannot be written"):
        write_trace(tmp_path / "missing" / "trace.json", [record])
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


PROCESSOR = os.environ.get("TRACE_PROCESSOR") or shutil.which("trace_processor_shell")


@pytest.mark.skipif(PROCESSOR is None, reason="needs trace_processor_shell, or its path in $TRACE_PROCESSOR")
def test_perfettos_trace_processor_imports_everything(recorded: Recorded, tmp_path: Path) -> None:
    records, _ = recorded
    trace = trace_of(records)
    write_trace(tmp_path / "trace.json", records)
    query = tmp_path / "query.sql"
    query.write_text(
        "SELECT (SELECT COUNT(*) FROM slice) AS slices, "
        "(SELECT COUNT(*) FROM process WHERE name LIKE 'rank %') AS processes, "
        "(SELECT COUNT(*) FROM thread WHERE name LIKE 'lane %' OR name LIKE 'computation%') AS threads, "
        "(SELECT COALESCE(SUM(value), 0) FROM stats WHERE severity IN ('error', 'data_loss')) AS problems;\n"
    )
    assert PROCESSOR is not None
    ran = subprocess.run(
        [PROCESSOR, "-q", str(query), str(tmp_path / "trace.json")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (row,) = csv.DictReader(io.StringIO(ran.stdout.strip()))
    events = trace["traceEvents"]
    names = Counter(event["name"] for event in events if event["ph"] == "M")
    kinds = Counter(event["ph"] for event in events)
    assert {key: int(value) for key, value in row.items()} == {
        "slices": kinds["X"],
        "processes": names["process_name"],
        "threads": names["thread_name"],
        "problems": 0,
    }
