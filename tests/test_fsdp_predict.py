"""Predictions of sharded models: what each step waits for, and profiles that contain FSDP's units."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import syncline
from ddp_helpers import batch, on_ranks
from syncline.cli import app
from syncline.cluster import Rank
from syncline.errors import UsageError
from syncline.fsdp.profile import profile_sharded
from syncline.measure.assumed_network import assumed_network
from syncline.measure.beside import factors
from syncline.predict.sharded import FLOOR, SHARDED, predict_sharded
from syncline.predict.sharded_step import EXCHANGED, GATHERED, REDUCED
from syncline.predict.streams import Task, run
from syncline.records.link_costs import Beside
from syncline.records.profile import Contention, Gradient, Profile, UnderLoad, Work
from syncline.records.sharding import ProfiledUnit, Sharding

SLOW = 100_000_000  # bits per second


def sharded_profile(
    rows: list[int], device: str = "cuda", measured: int = 0, forward_s: float = 0.02, backward_s: float = 0.04
) -> Profile:
    """A model of blocks with one matrix each, and a matrix of the whole model that is used at both ends."""
    names = ["whole", *(f"block{number}.weight" for number in range(len(rows) - 1))]
    order = [*reversed(names[1:]), names[0]]
    gradients = tuple(
        Gradient(
            name=name,
            shape=(rows[names.index(name)], 64),
            dtype="float32",
            bytes=rows[names.index(name)] * 256,
            ready_s=backward_s * (position + 1) / len(order),
        )
        for position, name in enumerate(order)
    )
    units = tuple(
        ProfiledUnit(
            name=name.rpartition(".")[0],
            gradients=(name,),
            gathered="bfloat16",
            reduced="float32",
            reshards="." in name,
        )
        for name in names
    )
    return Profile(
        model="blocks",
        gradients=gradients,
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=0.001,
        device=device,
        where="",
        how="",
        steps=1,
        batch=1,
        sharding=Sharding(units=units, measured_shards=measured),
    )


BLOCKS = [3000, 2001, 2001, 2001]
NCCL, GLOO = assumed_network(2, 2, SLOW), assumed_network(2, 2, SLOW, "gloo")


@pytest.mark.parametrize("method", [*SHARDED, FLOOR])
def test_on_cpus_collectives_and_computation_add_up(method: str) -> None:
    step = predict_sharded(sharded_profile(BLOCKS, "cpu"), GLOO, method)
    if step.method.updates is None:
        busy_s = sum(span.end_s - span.start_s for span in step.timeline.spans)
        assert step.iteration_s == pytest.approx(step.compute_s + busy_s)
        in_order = sorted((span.start_s, span.end_s) for span in step.timeline.spans)
        assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(in_order))
    assert sum(step.losses.by_cause.values()) == pytest.approx(step.iteration_s - step.compute_s)
    assert step.low_s <= step.iteration_s <= step.high_s


def test_contention_is_a_part_of_the_overhead() -> None:
    waits = Work(fixed_s=0.5, s_per_byte=0.0)
    contention = Contention(exchanges={"dense": UnderLoad(beside=waits, alone=waits)})
    quiet = sharded_profile(BLOCKS, "cpu")
    step = predict_sharded(msgspec.structs.replace(quiet, contention=contention), GLOO, "hsdp+local-15")
    without = predict_sharded(quiet, GLOO, "hsdp+local-15")
    assert step.losses.overhead_s == pytest.approx(step.iteration_s - without.iteration_s)
    assert step.losses.overhead_s > 0.05


def test_on_gpus_replicas_exchange_a_unit_while_the_next_ones_compute() -> None:
    step = predict_sharded(sharded_profile(BLOCKS), NCCL, "hsdp")
    spans = {(span.bucket, span.what): span for span in step.timeline.spans if span.what != GATHERED}
    for number in range(3):
        assert spans[f"block{number}", EXCHANGED].start_s >= spans[f"block{number}", REDUCED].end_s
    assert spans["block2", EXCHANGED].start_s < spans["block1", REDUCED].start_s < spans["block2", EXCHANGED].end_s
    for lane in (0, 1):
        own = sorted((span.start_s, span.end_s) for span in step.timeline.spans if span.lane == lane)
        assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(own))
    busy_s = sum(span.end_s - span.start_s for span in step.timeline.spans)
    assert step.compute_s < step.iteration_s < step.compute_s + busy_s


def test_units_are_gathered_again_in_backward_unless_they_stay() -> None:
    step = predict_sharded(sharded_profile(BLOCKS), NCCL, "fsdp")
    gathered = [span.bucket for span in sorted(step.timeline.spans, key=lambda s: s.start_s) if span.what == GATHERED]
    assert gathered == ["root", "block0", "block1", "block2", "block2", "block1", "block0"]


def test_types_and_padding_decide_the_bytes() -> None:
    step = predict_sharded(sharded_profile(BLOCKS), NCCL, "fsdp")
    padded = 64 * (3000 + 3 * 2004)  # rows in four equal parts
    again = 64 * 3 * 2004
    assert step.sent_bytes == (padded * 4 + (padded + again) * 2) * 3 // 4


def test_a_profile_that_was_measured_among_shards_contains_their_collectives() -> None:
    profile = sharded_profile(BLOCKS, measured=2)
    floor, step = predict_sharded(profile, NCCL, FLOOR), predict_sharded(profile, NCCL, "hsdp+int4")
    assert floor.iteration_s == pytest.approx(profile.step_s)
    assert {span.what for span in step.timeline.spans} == {EXCHANGED}
    with pytest.raises(UsageError, match="measured among 2 shards, and fsdp has 4 here"):
        predict_sharded(profile, NCCL, "fsdp")
    bare = msgspec.structs.replace(profile, sharding=None)
    with pytest.raises(UsageError, match="needs a profile with FSDP's units"):
        predict_sharded(bare, NCCL, "hsdp")


def test_updates_of_shards_take_turns() -> None:
    profile = sharded_profile([60_000, *(30_000,) * 4])
    floor, step = predict_sharded(profile, NCCL, FLOOR), predict_sharded(profile, NCCL, "hsdp+local-15")
    assert floor.iteration_s < step.iteration_s < predict_sharded(profile, NCCL, "hsdp+int4").iteration_s
    assert 50 * step.sent_bytes < predict_sharded(profile, NCCL, "hsdp").sent_bytes


def test_collectives_at_the_same_time_slow_each_other_down() -> None:
    profile = sharded_profile(BLOCKS)
    crowded = msgspec.structs.replace(NCCL, beside=Beside(inside=20.0, between=1.5))
    assert predict_sharded(profile, crowded, "hsdp").iteration_s > predict_sharded(profile, NCCL, "hsdp").iteration_s
    assert factors((1.0, 2.0), (2.0, 3.0)) == Beside(inside=2.0, between=2.0)
    assert factors((1.0, 2.0), (1.0, 2.0)) == Beside(inside=1.0, between=1.0)
    assert factors((1.0, 2.0), (3.0, 2.0)).inside == 100.0  # one waited for the whole other one
    tasks = [Task("a", 1.0), Task("b", 1.0), Task("a", 1.0), Task("c", 0.5, after=(1,))]
    assert run(tasks, {"a": 2.0, "b": 2.0}) == [(0.0, 2.0), (0.0, 2.0), (2.0, 3.0), (2.0, 2.5)]


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.integers(1, 5000), min_size=2, max_size=6),
    method=st.sampled_from([*SHARDED, FLOOR]),
    device=st.sampled_from(["cpu", "cuda"]),
    faster=st.floats(1.0, 100.0),
)
def test_faster_links_never_make_a_step_longer(rows: list[int], method: str, device: str, faster: float) -> None:
    profile, network = sharded_profile(rows, device), NCCL if device == "cuda" else GLOO
    step = predict_sharded(profile, network, method)
    quicker = predict_sharded(profile, network.with_faster("host", faster), method)
    assert step.compute_s - 1e-9 <= quicker.iteration_s <= step.iteration_s * (1 + 1e-6)
    assert math.isfinite(step.high_s)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"units": ()}, "is in no unit"),
        ({"units": [{"name": "", "gradients": ["absent"]}]}, "absent is not a gradient of the profile"),
        ({"units": [{"name": "", "gradients": [], "gathered": "int3"}]}, "gathered"),
    ],
)
def test_units_that_do_not_fit_the_profile_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    sharded_profile(BLOCKS).save(path)
    tree = json.loads(path.read_text())
    first = tree["sharding"]["units"][0]
    tree["sharding"]["units"] = [first | unit for unit in change["units"]]
    path.write_text(json.dumps(tree))
    with pytest.raises(UsageError, match=says):
        Profile.load(path)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40)
        self.last = nn.Linear(40, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(x))))


def test_the_profile_of_a_sharded_model_has_its_units_and_when_they_are_reduced() -> None:
    def main(rank: Rank) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))["shard"]
        model: Any = Blocks()
        for block in (model.first, model.second):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with pytest.raises(UsageError, match="profile_sharded"):
            syncline.measure_backward(model, lambda net: net(batch(rank.rank, 0, 8, 40)).square().mean())
        profile = profile_sharded(model, lambda net: net(batch(rank.rank, 0, 8, 40)).square().mean(), steps=3)
        assert profile.sharding is not None
        units = {unit.name: unit for unit in profile.sharding.units}
        assert profile.sharding.measured_shards == 2
        assert units["first"].gradients == ("first.weight", "first.bias")
        assert units["first"].reshards and not units[""].reshards
        assert units[""].reduced == units[""].gathered == "float32"
        ready = {gradient.name: gradient.ready_s for gradient in profile.gradients}
        assert 0 < ready["second.weight"] < ready["first.weight"] <= profile.backward_s
        assert profile.gradients[0].shape[0] == 40  # of the whole parameter, not of the shard
        handle = syncline.attach(model)
        with pytest.raises(UsageError, match="profile it before attach"):
            profile_sharded(model, lambda net: net(batch(rank.rank, 0, 8, 40)).square().mean(), steps=1)
        handle.detach()

    on_ranks(2, main)


def test_predict_lists_methods_for_sharded_models(tmp_path: Path) -> None:
    sharded_profile(BLOCKS, measured=1).save(tmp_path / "profile.json")
    NCCL.save(tmp_path / "network.json")
    files = ["--profile", str(tmp_path / "profile.json"), "--network", str(tmp_path / "network.json")]
    page = tmp_path / "page.html"
    wanted = [*files, "--hosts", "2,4", "--json", str(tmp_path / "rows.json"), "--report", str(page)]
    answer = CliRunner().invoke(app, ["predict", *wanted])
    assert answer.exit_code == 0, answer.output
    assert "2 replicas of 2 shards take" in " ".join(answer.stdout.split())
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["plan"], row["hosts"]) for row in rows] == [
        *(("hsdp", 2), ("hsdp", 4), ("hsdp+int4", 2), ("hsdp+int4", 4)),
    ]
    assert rows[0]["iteration_ms"] > rows[2]["iteration_ms"]
    assert "Sharded models" in page.read_text() and "hsdp+int4" in page.read_text()
    assert "Predicted for hsdp: 2 replicas of 2 shards take" in page.read_text().replace("\u00a0", " ")
    mixed = CliRunner().invoke(app, ["predict", *files, "--plan", "hsdp", "--plan", "ddp"])
    assert mixed.exit_code == 2 and "ask for one kind" in " ".join(mixed.stderr.split())
