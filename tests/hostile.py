"""Files and messages that nobody should send, and the oracle that says whether they were met as they should be.

A format has valid examples, a way to read them, and a statement of what every object that was read must satisfy. What
is made of an example is either read, and then it satisfies that statement and is the same after it was written and read
again; or it is refused, in one line that begins with the file. All else is a finding: another exception, a warning, a
second of computation, an object that should not exist. (Warnings are for whoever runs cases to turn into errors.)

Everything follows from a seed: a case is made again by its format's name and its number.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import operator
import random
import re
import signal
import struct
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import safetensors.torch
import torch
from torch import Tensor

import made_up
from syncline.bench.result import BenchResult, Cluster, Model, Row
from syncline.engine.failure import Event, Failure, Pending
from syncline.engine.signs import Kind, Suspect
from syncline.engine.state import HEADER, SCHEMA, load_state, seal_of, sealed, write_draft
from syncline.errors import ExchangeError, SynclineError
from syncline.exchange import AllgatherTopk, Comm, Dense, Hierarchical, Layout, OkTopk, Topology, Work, settings
from syncline.files import read_json, write_json
from syncline.kernels import Slots
from syncline.kernels.cpu import CpuKernels
from syncline.measure.activations import Activations, Block, Line
from syncline.measure.network import Network
from syncline.measure.profile import Buffers, Overheads, Profile, Spread
from syncline.measure.profile import Work as OwnWork
from syncline.plan.plan import Alternative, Plan, PlannedBucket, PlannedGradient, Where
from syncline.report.record import BucketSpan, Loss, ModelRecord, Pace, PhaseSpan, RunRecord, StepSpan

T = TypeVar("T")
Mutate = Callable[[random.Random, Sequence[bytes]], bytes]

SLOW_S = 1.0
LONGEST_LINE = 500


class Finding(AssertionError):  # noqa: N818 - not an error of this program, but one that it found
    """A case that was not met as it should be."""


class TooSlow(BaseException):
    """Not an `Exception`: nothing that reads a file may catch it."""


class Format(Protocol):
    """Of files, or of messages between ranks."""

    @property
    def name(self) -> str: ...

    def case(self, seed: int, number: int) -> bytes:
        """The same for the same numbers."""

    def judge(self, case: bytes, folder: Path) -> str:
        """What became of it: `accepted`, or the kind of its refusal. Raises a `Finding` for all else."""


@dataclass(frozen=True)
class Files(Generic[T]):
    """`read` raises a `SynclineError`, or returns what satisfies `check` and what `write` writes for `read`."""

    name: str
    examples: tuple[bytes, ...]
    mutate: Mutate
    read: Callable[[Path], T]
    write: Callable[[Path, T], Path]
    """Into a folder; returns where."""
    check: Callable[[T], None]
    same: Callable[[T, T], bool] = operator.eq

    def case(self, seed: int, number: int) -> bytes:
        return self.mutate(random.Random(f"{self.name} {seed} {number}"), self.examples)

    def judge(self, case: bytes, folder: Path) -> str:
        path = folder / f"{self.name.replace(' ', '-')}.file"
        with path.open("wb") as file:
            file.write(case)
        try:
            with watched():
                found = self.read(path)
        except SynclineError as error:
            return refusal_of(error, f"{path}: ")
        except BaseException as error:
            raise _finding(error) from error
        try:
            self.check(found)
            with watched():
                again = self.read(self.write(folder, found))
        except BaseException as error:
            raise _finding(error, "accepted, but ") from error
        if not self.same(found, again):
            raise Finding(f"accepted, and something else after it was written: {again!r}")
        return "accepted"


def refusal_of(error: SynclineError, begins: str) -> str:
    """The kind of a refusal in one line that can be printed."""
    line = str(error)
    if not line.startswith(begins) or len(line.splitlines()) != 1 or not line.isprintable():
        raise Finding(f"refused, but not in one line that begins with {begins!r}: {line!r}") from error
    if len(line) > LONGEST_LINE:
        raise Finding(f"refused in {len(line)} characters: {line!r}") from error
    return kind_of(error)


def _finding(error: BaseException, what: str = "") -> BaseException:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    return Finding(f"{what}{type(error).__name__}: {error}")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Raises after a second of this process's own time."""

    def stop(_: int, __: types.FrameType | None) -> None:
        raise TooSlow(f"took more than {SLOW_S:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SLOW_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def kind_of(error: BaseException) -> str:
    """Refusals are of one kind if the same line of the program, or msgspec for the same reason, refused."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, msgspec.ValidationError):
        return re.sub(r" - at .*|`[^`]*`(?=$| - )|\d+", "", str(error), flags=re.DOTALL)
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    frames = [
        (Path(frame.f_code.co_filename).name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if "syncline" in frame.f_code.co_filename
    ]
    return f"{type(error).__name__} at {frames[-1][0]}:{frames[-1][1]}" if frames else str(error)


# --- bytes ------------------------------------------------------------------------------------------------------

HEADS = (
    b"PK\x03\x04\x14\x00\x00\x00\x08\x00",
    b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94",
    b"cos\nsystem\n(S'true'\ntR.",
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
    b"\x1f\x8b\x08\x00",
    b"\x7fELF\x02\x01\x01",
    b"\xef\xbb\xbf",
    b"\xff\xfe{\x00",
    b"#!/bin/sh\n",
    b"<html>",
    b"\x00" * 16,
)
"""Of files that are something else."""


def mutated_bytes(draw: random.Random, examples: Sequence[bytes]) -> bytes:
    """A valid file after what disks, editors and copying do to one; or something that never was one."""
    data = bytearray(draw.choice(examples))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        size = len(data)
        at, length = draw.randrange(size + 1), min(draw.choice((1, 2, 4, 8, 64, 1000)), size)
        match draw.randrange(12):
            case 0 | 1 | 2 if at < size:
                data[at] ^= 1 << draw.randrange(8)
            case 3 if at < size:
                data[at] = draw.choice(b'\x00\xff{}[]",:0919eE+-.\\unt \n\t\x7f\x80')
            case 4:
                del data[at:]
            case 5:
                del data[at : at + length]
            case 6:
                data[at:at] = draw.randbytes(length)
            case 7:
                data[at:at] = data[at : at + length] * draw.choice((1, 2, 30))
            case 8:
                other = draw.choice(examples)
                data[at:] = other[draw.randrange(len(other)) :]
            case 9:
                data[at : at + length] = bytes(len(data[at : at + length]))
            case 10:
                data[:0] = draw.choice(HEADS)
            case 11:
                data[:] = draw.choice(HEADS) + draw.randbytes(draw.randrange(200))
    return bytes(data)


# --- JSON -------------------------------------------------------------------------------------------------------

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 16, 17, 255, 2**31 - 1, 2**31, 2**53 + 1, 2**60, 2**63 - 1, 2**63, 2**64, 10**18, 10**19),
    *(10**30, -(10**30), 10**308, 10**400, 10**4000),
    *(0.0, -0.0, 0.5, -0.5, 1.0, 1e-300, 5e-324, 1e9, 1e18, 1e300, 1.7976931348623157e308, -1e300),
    *(math.nan, math.inf, -math.inf),
)
TEXTS = (
    *(
        "",
        "a",
        "0",
        "1",
        "null",
        "cpu",
        "cuda",
        "gloo",
        "nccl",
        "float32",
        "bfloat16",
        "int8",
        "world",
        "local",
        "host",
    ),
    *(
        "all_reduce",
        "broadcast",
        "Dense",
        "OkTopk",
        "Hierarchical",
        "AllgatherTopk",
        "layer0",
        "layer1",
        "a.b",
        ".",
        "..",
    ),
    *("\ud800", "\udfff\ud800", "a\nb", "\x00", "\x1b[2J", "\u202e", "é\u0301", "x" * 2000, "{}", "%s%n", "../../etc"),
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [{}], {"": {}}, {"type": "Dense"}, [0], [0, 0], [1], ["a"])
KEYS = ("schema", "name", "type", "extra", "", "\ud800", "a\nb", "__proto__", "__class__", "x" * 600)


def any_value(draw: random.Random) -> Any:
    chosen = draw.random()
    if chosen < 0.45:
        return draw.choice(NUMBERS)
    return draw.choice(TEXTS) if chosen < 0.75 else draw.choice(OTHERS)


class Trees:
    """Edits of parsed JSON; what an edit does not touch is shared with the example."""

    def __init__(self, examples: Sequence[bytes]) -> None:
        self.trees = [json.loads(example) for example in examples]
        self.places = [list(_places(tree)) for tree in self.trees]

    def put(self, number: int, place: tuple[Any, ...], value: Any) -> Any:
        """An example with something else in one place."""
        return _edited(self.trees[number], place, lambda _: value)

    def mutated(self, draw: random.Random, examples: Sequence[bytes]) -> bytes:
        if draw.random() < 0.3:
            return mutated_bytes(draw, examples)
        number = draw.randrange(len(self.trees))
        tree = self.trees[number]
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            place = draw.choice(self.places[number])
            try:
                tree = _edited(tree, place, lambda value: self._edit(draw, value))
            except (LookupError, TypeError):  # an edit before this one took the place away
                continue
        text = json.dumps(tree, ensure_ascii=draw.random() < 0.8)
        if draw.random() < 0.05:
            text = _with_text(draw, text)
        return text.encode("utf-8", "surrogatepass")

    def _edit(self, draw: random.Random, value: Any) -> Any:
        kind = draw.randrange(10)
        if isinstance(value, dict) and value and kind < 6:
            return self._edited_object(draw, value, kind)
        if isinstance(value, list) and value and kind < 6:
            return _edited_list(draw, value, kind)
        if isinstance(value, int | float) and not isinstance(value, bool) and kind < 4:
            with contextlib.suppress(OverflowError):
                return draw.choice((value + 1, value - 1, -value, value * 2, float(value), value * 1e30, 0))
        if kind == 9:
            other = draw.randrange(len(self.trees))
            return _at(self.trees[other], draw.choice(self.places[other]))
        return any_value(draw)

    def _edited_object(self, draw: random.Random, value: dict[str, Any], kind: int) -> dict[str, Any]:
        key, other = draw.choice(list(value)), draw.choice(list(value))
        match kind:
            case 0:
                return {name: one for name, one in value.items() if name != key}
            case 1:
                return {**value, draw.choice(KEYS): any_value(draw)}
            case 2:
                return {**value, key: value[other], other: value[key]}
            case 3:
                return {(draw.choice(KEYS) if name == key else name): one for name, one in value.items()}
            case 4:
                return {**value, key: any_value(draw)}
            case _:
                return {name: value[name] for name in draw.sample(list(value), len(value))}


def _edited_list(draw: random.Random, value: list[Any], kind: int) -> list[Any]:
    at = draw.randrange(len(value))
    match kind:
        case 0:
            return value[:at] + value[at + 1 :]
        case 1:
            return [*value, value[at]]
        case 2:
            return draw.sample(value, len(value))
        case 3:
            return value * draw.choice((0, 2, 20))
        case 4:
            return [*value[:at], any_value(draw), *value[at + 1 :]]
        case _:
            return value[::-1]


def _with_text(draw: random.Random, text: str) -> str:
    """What no tree can say: keys twice, numbers and depths that nobody writes."""
    match draw.randrange(5):
        case 0:
            names = re.findall(r'"[a-z_]+": ', text)
            return text.replace(name := draw.choice(names), f"{name}0, {name}", 1) if names else text
        case 1:
            depth = draw.choice((3, 100, 900, 1100, 5000))
            return re.sub(r": [0-9.]+", lambda _: ": " + "[" * depth + "]" * depth, text, count=1)
        case 2:
            depth = draw.choice((3, 40, 300, 1100))
            return re.sub(
                r'"type": ', lambda _: '"across": {"type": "Hierarchical", ' * depth + '"type": ', text, count=1
            )
        case 3:
            number = draw.choice(
                ("9" * 5000, "1e99999", "-1e-99999", "0x10", "01", "1.", ".5", "+1", "1_0", "-", "Infinity")
            )
            return re.sub(r": [0-9.]+", lambda _: f": {number}", text, count=draw.randrange(1, 3))
        case _:
            keys = ", ".join(f'"{number}": 0' for number in range(draw.choice((10, 1000))))
            return text.replace("{", "{" + keys + ", ", 1)


def _places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from _places(value, (*place, key))


def _at(tree: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def _edited(tree: Any, place: tuple[Any, ...], edit: Callable[[Any], Any]) -> Any:
    if not place:
        return edit(tree)
    copied = dict(tree) if isinstance(tree, dict) else list(tree)
    copied[place[0]] = _edited(tree[place[0]], place[1:], edit)
    return copied


# --- the files that there are -----------------------------------------------------------------------------------


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
PLAN = Plan(
    model="made up",
    gradients=tuple(
        PlannedGradient(name=name, shape=shape, dtype=dtype)
        for name, shape, dtype in (("a", (30, 4), "float32"), ("b", (30,), "float32"), ("c", (), "bfloat16"))
    ),
    where=Where(host_of_rank=(0, 0, 1, 1), backend="gloo", device="cpu"),
    buckets=(
        PlannedBucket(
            parameters=("a",),
            lane=1,
            exchange=settings(Hierarchical(across=OkTopk(density=0.05), levels=[[0, 1], [2, 3]], chunks=2)),
        ),
        PlannedBucket(parameters=("b",), lane=0, exchange=settings(OkTopk(momentum=0.9, warmup=3))),
        PlannedBucket(parameters=("c",), lane=0, exchange=settings(Dense(wire="bf16"))),
    ),
    lanes=2,
    iteration_s=0.06,
    low_s=0.05,
    high_s=0.08,
    compute_s=0.04,
    plain_s=0.1,
    exchange_s=0.03,
    reason="Fewer start-ups.",
    alternatives=(Alternative(name="do nothing", iteration_s=0.1, lossless=True),),
    how="by hand",
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
FAILURE = Failure(
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
    step=6,
    error="exchanging bucket 0 failed in step 6: Connection closed by peer",
    suspects=(Suspect(2, Kind.SILENT, "no sign of life for 2 s"), Suspect(0, Kind.VICTIM, "it failed too")),
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
    assert all(gradient.bytes >= 0 and all(size >= 0 for size in gradient.shape) for gradient in plan.gradients)
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


def check_failure(failure: Failure) -> None:
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


# --- what exchanges keep ----------------------------------------------------------------------------------------

ABOUT: dict[str, Any] = {
    "schema": SCHEMA,
    "exchange": settings(OkTopk(density=0.1)),
    "rank": 1,
    "world_size": 4,
    "levels": None,
    "steps": 7,
    "buckets": [["a", "b/c"], ["d"]],
}
TENSORS = {
    "residual/a": torch.linspace(-1, 1, 12).view(3, 4),
    "velocity/a": torch.linspace(0, 3, 12).view(3, 4),
    "residual/b/c": torch.tensor(0.5, dtype=torch.bfloat16),
    "residual/d": torch.zeros(0, 5),
}
STATES = (
    sealed(ABOUT, TENSORS),
    sealed({**ABOUT, "levels": "((0, 1), (2, 3))", "weights": "00ff"}, {}),
    sealed({**ABOUT, "rank": 0, "world_size": 1, "steps": 0, "buckets": []}, {"residual/a": torch.ones(2)}),
)
_TYPES = (torch.float64, torch.float16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn)


def parted(file: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header, and what follows it."""
    (length,) = struct.unpack_from("<Q", file)
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def joined(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if length is None else length) + text + data


_HEADERS = Trees([json.dumps(parted(state)[0]).encode() for state in STATES])
_ABOUTS = Trees([parted(state)[0]["__metadata__"][HEADER[0]].encode() for state in STATES])


def damaged_state(draw: random.Random, examples: Sequence[bytes]) -> bytes:
    """Nobody seals it again."""
    if draw.random() < 0.5:
        return mutated_bytes(draw, examples)
    header, data = parted(draw.choice(examples))
    tensors = [name for name in header if name != "__metadata__"]
    match draw.randrange(6):
        case 0:
            return joined(header, data, draw.choice((0, 1, 7, 2**31, 2**32, 2**63, 2**64 - 1, len(data))))
        case 1 if tensors:
            ends = draw.choice(
                ((0, 0), (0, 2**63 - 1), (4, 0), (-1, 4), (0, len(data) + 8), (2**64, 2**64 + 4), (0, 4))
            )
            header[draw.choice(tensors)]["data_offsets"] = ends
        case 2 if tensors:
            shape = draw.choice(
                ([2**62, 4], [0, 2**63], [-1], [2**64], [1] * 100, [12], [4, 3], [], ["3", "4"], [3.0, 4.0])
            )
            header[draw.choice(tensors)]["shape"] = shape
        case 3 if tensors:
            kinds = ("F64", "F16", "BF16", "I32", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "C64", "U64", "X", "")
            header[draw.choice(tensors)]["dtype"] = draw.choice(kinds)
        case 4:
            return safetensors.torch.save(
                {"weight": torch.ones(3)}, draw.choice((None, {"format": "pt"}, {HEADER[0]: "{}"}))
            )
        case _:
            try:
                header = json.loads(_HEADERS.mutated(draw, examples))
            except (ValueError, RecursionError):
                return mutated_bytes(draw, examples)
    return joined(header, data)


def forged_state(draw: random.Random, examples: Sequence[bytes]) -> bytes:
    """Sealed by somebody who knows how."""
    header, data = parted(draw.choice(examples))
    about = header["__metadata__"]
    if draw.random() < 0.7:
        text = _ABOUTS.mutated(draw, [about[HEADER[0]].encode()]).decode("utf-8", "ignore")
        header["__metadata__"] = {
            HEADER[0]: text,
            HEADER[1]: about[HEADER[1]],
            HEADER[2]: seal_of(text, about[HEADER[1]]),
        }
        return joined(header, data)
    tensors = dict(TENSORS)
    name = draw.choice(("residual/a", "residual/", "/", "a", "\n/\n", "x" * 700, "residual/" + "y" * 700, "é/é"))
    shape = draw.choice(((), (0,), (1,), (3, 4), (2, 0, 7)))
    kind = draw.choice(_TYPES)
    value = draw.choice((0.0, 1.0, math.nan, math.inf)) if kind.is_floating_point else 1
    tensors[name] = torch.full(shape, value, dtype=torch.float32 if kind.is_floating_point else kind).to(kind)
    return sealed({**ABOUT, "steps": draw.choice((0, 1, 2**62 - 1, 2**62, 2**63))}, tensors)


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def flat(state: dict[str, Any]) -> dict[tuple[str, str], Tensor]:
        return {(name, kind): tensor for name, kinds in state["tensors"].items() for kind, tensor in kinds.items()}

    mine, theirs = flat(one), flat(other)
    about = [{field: value for field, value in state.items() if field != "tensors"} for state in (one, other)]
    return (
        about[0] == about[1]
        and mine.keys() == theirs.keys()
        and all(
            tensor.dtype == theirs[key].dtype
            and tensor.shape == theirs[key].shape
            and tensor.reshape(-1).view(torch.uint8).equal(theirs[key].reshape(-1).view(torch.uint8))
            for key, tensor in mine.items()
        )
    )


def check_state(state: dict[str, Any]) -> None:
    assert state["schema"] == SCHEMA and isinstance(state["exchange"], dict)
    assert 0 <= state["rank"] < state["world_size"] < 100_000
    assert 0 <= state["steps"] < 2**63
    assert state["levels"] is None or isinstance(state["levels"], str)
    assert all(isinstance(name, str) for names in state["buckets"] for name in names)
    for kinds in state["tensors"].values():
        for tensor in kinds.values():
            assert bool(torch.isfinite(tensor.to(torch.float64 if not tensor.is_complex() else tensor.dtype)).all())


def _read_of(example: bytes) -> dict[str, Any]:
    """A state file read without the code that is tested."""
    header, _ = parted(example)
    state = json.loads(header["__metadata__"][HEADER[0]])
    state["tensors"] = {}
    for key, tensor in safetensors.torch.load(example).items():
        kind, _, name = key.partition("/")
        state["tensors"].setdefault(name, {})[kind] = tensor
    return state


_WRITTEN = [_read_of(state) for state in STATES]


def check_undamaged(state: dict[str, Any]) -> None:
    """Whatever was done to the file, what was read is what was once written."""
    check_state(state)
    assert any(same_state(state, written) for written in _WRITTEN), f"a damaged state was read: {state}"


# --- what ranks send each other ---------------------------------------------------------------------------------


class _Done:
    def wait(self) -> None: ...


@dataclass
class Peers:
    """A `Comm` of which all ranks but this one say what they like."""

    rank: int
    size: int
    rows: list[Tensor]
    """For each collective, in order: what the others send, a row per rank."""
    received: list[Tensor]
    topology: Topology

    def level(self, name: str) -> Comm | None:
        return None

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        return self._deliver(output, input.view(self.size, -1)[self.rank])

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        return self._deliver(output, input.view(-1))

    def _deliver(self, output: Tensor, mine: Tensor) -> Work:
        rows = self.rows.pop(0).clone()
        rows[self.rank] = mine
        output.copy_(rows.view_as(output))
        self.received.append(rows)
        return _Done()

    def all_reduce(self, tensor: Tensor) -> Work:
        raise NotImplementedError

    def reduce(self, tensor: Tensor, root: int) -> Work:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        raise NotImplementedError


Entries = list[tuple[int, float]]


def entries_in(row: Tensor, slots: Slots, region: int) -> Entries | None:
    """A slot read by its description, one word after the other: places in the bucket, and values; None for one that
    cannot be."""
    words = struct.unpack(f"<{slots.words}H", row.numpy().tobytes())
    counts = words[1 : 1 + slots.cells]
    if sum(counts) > slots.entries or max(counts) > slots.cell:
        return None
    cells = [cell for cell, count in enumerate(counts) for _ in range(count)]
    places = words[slots.places_at : slots.places_at + len(cells)]
    where = [(cell * slots.regions + region) * slots.cell + place for cell, place in zip(cells, places, strict=True)]
    if any(place >= slots.cell for place in places) or any(place >= slots.numel for place in where):
        return None
    if any(before >= after for before, after in itertools.pairwise(where)):
        return None
    values = row.view(torch.int16)[slots.values_at :].clone().view(slots.values)[: len(where)].to(torch.float32)
    if slots.values == torch.float16:
        exponent = struct.unpack("<h", struct.pack("<H", words[0]))[0]
        values = values * 2.0 ** -max(-120, min(120, exponent))
    return list(zip(where, values.tolist(), strict=True))


@dataclass(frozen=True)
class Messages:
    """What this rank's exchange makes of anything that others send: the sum of it, an error, or a step that does not
    count; and nothing is written but the bucket."""

    name: str
    exchange: OkTopk | AllgatherTopk
    numel: int
    ranks: int
    rank: int
    dtype: torch.dtype = torch.float32

    @functools.cached_property
    def slots(self) -> Slots:
        slots = self.exchange.slots(self.numel, self.dtype, self.ranks)
        assert slots is not None, f"{self.name}: goes whole"
        return slots

    @functools.cached_property
    def honest(self) -> tuple[Tensor, ...]:
        """By collective: what others would send."""
        packed = torch.stack([self._packed(seed) for seed in range(2 * self.ranks)])
        ranks = torch.arange(self.ranks)
        if self.slots.regions == 1:
            return (packed[: self.ranks, 0],)
        return packed[: self.ranks, self.rank], packed[self.ranks + ranks, ranks]

    def _packed(self, seed: int) -> Tensor:
        rows = torch.zeros(self.slots.regions, self.slots.bytes, dtype=torch.uint8)
        turn, flat = torch.zeros((), dtype=torch.int32), self._gradient(seed)
        CpuKernels(self.slots).pack(flat, 1.0, torch.zeros(2, self.numel), turn, None, rows)
        return rows

    def _gradient(self, seed: int) -> Tensor:
        return torch.randn(self.numel, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def case(self, seed: int, number: int) -> bytes:
        draw = random.Random(f"{self.name} {seed} {number}")
        phases = [bytearray(rows.contiguous().numpy().tobytes()) for rows in self.honest]
        for _ in range(draw.choice((1, 1, 2, 4))):
            phase = draw.choice(phases)
            row = draw.randrange(self.ranks) * self.slots.bytes
            self._spoil(draw, phase, row)
        return b"".join(phases)

    def _spoil(self, draw: random.Random, phase: bytearray, row: int) -> None:
        slots, end = self.slots, row + self.slots.bytes
        start, stop = draw.choice(((0, 1), (1, 1 + slots.cells), (slots.places_at, slots.values_at), (0, slots.words)))
        words = (
            0,
            1,
            2,
            0xFFFF,
            0x8000,
            0x7FFF,
            0x7F80,
            0x7C00,
            slots.cell,
            slots.cell - 1,
            slots.cell + 1,
            slots.entries,
        )
        at = row + 2 * draw.randrange(start, stop)
        match draw.randrange(8):
            case 0 | 1:
                phase[at : at + 2] = struct.pack("<H", draw.choice(words))
            case 2:
                phase[at] ^= 1 << draw.randrange(8)
            case 3:
                phase[row:end] = draw.randbytes(slots.bytes)
            case 4:
                phase[row:end] = bytes(slots.bytes)
            case 5:  # two entries, or counts, change places; or one is there twice
                other = row + 2 * draw.randrange(start, stop)
                phase[at : at + 2], phase[other : other + 2] = phase[other : other + 2], phase[at : at + 2]
                if draw.random() < 0.5:
                    phase[other : other + 2] = phase[at : at + 2]
            case 6:
                other = draw.randrange(self.ranks) * slots.bytes
                phase[row:end] = phase[other : other + slots.bytes]
            case _:
                values = row + 2 * slots.values_at
                phase[values:end] = draw.randbytes(end - values)

    def judge(self, case: bytes, folder: Path) -> str:
        rows = torch.frombuffer(bytearray(case), dtype=torch.uint8).view(len(self.honest), self.ranks, -1)
        comm = Peers(self.rank, self.ranks, list(rows), [], Topology.flat(self.ranks))
        state = self.exchange.prepare(Layout.flat(self.numel, self.dtype), comm)
        memory = torch.full((self.numel + 2 * _GUARD,), _UNTOUCHED, dtype=self.dtype)
        flat = memory[_GUARD:-_GUARD].copy_(self._mine)
        try:
            with watched():
                state.begin(0)
                self.exchange.run(flat, state, comm)
                finite = state.finite(flat)
                state.settle(finite)
            kind = "accepted"
        except ExchangeError as error:
            kind = refusal_of(error, "")
        except BaseException as error:
            raise _finding(error) from error
        expected = self._expected(comm.received)
        if not bool((memory[:_GUARD] == _UNTOUCHED).all() & (memory[-_GUARD:] == _UNTOUCHED).all()):
            raise Finding("something was written beside the bucket")
        if expected is None:
            if kind == "accepted":
                raise Finding("a message that cannot be was taken for one")
            if bool(flat.any()):
                raise Finding("a message was refused after a part of it had been applied")
            return kind
        if kind != "accepted":
            raise Finding(f"a message was refused without need: {kind}")
        if not torch.equal(flat.nan_to_num(7.0), expected.nan_to_num(7.0)):
            raise Finding("the bucket holds something else than what was sent")
        if bool(finite) != bool(expected.isfinite().all()):
            raise Finding(f"the result is told to be finite: {bool(finite)}, and that is not so")
        kept = state.kept()
        if kept is None or not bool(kept.isfinite().all()):
            raise Finding("what is kept is no longer finite")
        return kind if bool(finite) else "accepted, not finite"

    @functools.cached_property
    def _mine(self) -> Tensor:
        return self._gradient(999)

    def _expected(self, received: list[Tensor]) -> Tensor | None:
        """What the bucket should hold after it; None where something arrived that cannot be."""
        sums = torch.zeros(self.numel)
        for phase, rows in enumerate(received):
            last = phase == len(self.honest) - 1
            for sender, row in enumerate(rows):
                spreads = last and self.slots.regions > 1
                entries = entries_in(row, self.slots, sender if spreads else self.rank % self.slots.regions)
                if entries is None:
                    return None
                if last and entries:
                    where = torch.tensor([place for place, _ in entries])
                    sums[where] += torch.tensor([value for _, value in entries], dtype=torch.float64).to(torch.float32)
        return sums.to(self.dtype) if len(received) == len(self.honest) else None


_GUARD, _UNTOUCHED = 64, 12345.0


def _write_state(folder: Path, state: dict[str, Any]) -> Path:
    return write_draft(folder, state)


def _states(name: str, mutate: Mutate, check: Callable[[dict[str, Any]], None]) -> Files[dict[str, Any]]:
    return Files(name, STATES, mutate, load_state, _write_state, check, same_state)


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        _json_format("plan", Plan, (PLAN, NOTHING), check_plan),
        _json_format("profile", Profile, (PROFILE, made_up.profile([40, 10])), check_profile),
        _json_format("network", Network, (made_up.RICH_NETWORK, made_up.network((0, 1))), check_network),
        _json_format("record", RunRecord, (RECORD,), check_record),
        _json_format("bench", BenchResult, (BENCH,), _sensible),
        _json_format("failure", Failure, (FAILURE, msgspec.structs.replace(FAILURE, step=None)), check_failure),
        _states("state", damaged_state, check_undamaged),
        _states("forged state", forged_state, check_state),
        Messages("oktopk", OkTopk(density=0.1, values="bf16"), 1000, 3, 1),
        Messages("oktopk fp16", OkTopk(density=0.1, values="fp16", momentum=0.9), 777, 2, 0, torch.bfloat16),
        Messages("oktopk fp32", OkTopk(density=0.05, values="fp32"), 3001, 4, 3),
        Messages("topk-allgather", AllgatherTopk(density=0.05), 1001, 2, 0),
    )
}
