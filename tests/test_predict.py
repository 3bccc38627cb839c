"""Predictions: losses add up, buckets equal those of a real DDP, and bytes equal those of an attached exchange."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import made_up
import syncline
from ddp_helpers import on_ranks
from syncline.cluster import Rank
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, wire
from syncline.measure.backward import measure_backward
from syncline.predict import Prediction, Schedule, ddp_buckets, predict, solo_s
from syncline.records.link_costs import Collective, Link, Overlap, Switch
from syncline.records.network import Network
from syncline.records.profile import (
    BUFFER_ITEM_BYTES,
    ITEM_BYTES,
    Buffers,
    Gradient,
    Overheads,
    Profile,
    RankTimes,
    Spread,
    Work,
    load_profile,
)

law = settings(max_examples=80, deadline=None)
seconds = st.one_of(st.just(0.0), st.floats(1e-6, 0.5))
costs = st.one_of(st.just(0.0), st.floats(1e-12, 1e-7))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    backward_s = draw(seconds)
    ready = sorted(draw(st.lists(st.floats(0, 1), min_size=1, max_size=12)))
    gradients = []
    for place, share in enumerate(ready):
        dtype = draw(st.sampled_from(["float32", "float64", "bfloat16"]))
        elements = draw(st.one_of(st.integers(0, 20), st.integers(0, 1_000_000)))
        gradients.append(
            Gradient(
                name=f"p{place}",
                shape=(elements,),
                dtype=dtype,
                bytes=elements * ITEM_BYTES[dtype],
                ready_s=share * backward_s,
            )
        )
    times = st.builds(RankTimes, rank=st.just(0), forward_s=seconds, backward_s=seconds, update_s=seconds)
    ranks = [msgspec.structs.replace(one, rank=n) for n, one in enumerate(draw(st.lists(times, max_size=3)))]
    low_s, high_s = sorted(draw(st.tuples(seconds, seconds)))
    work = st.builds(Work, fixed_s=seconds, s_per_byte=costs)
    overheads = st.builds(
        Overheads,
        copy_in_s_per_byte=costs,
        copy_out_s_per_byte=costs,
        hook_s=seconds,
        work=st.fixed_dictionaries(dict.fromkeys(EXCHANGES, work)),
    )
    return Profile(
        model="drawn",
        gradients=tuple(gradients),
        forward_s=draw(seconds),
        backward_s=backward_s,
        update_s=draw(seconds),
        device="cpu",
        where="",
        how="",
        steps=1,
        batch=None,
        buffers=tuple(
            Buffers(dtype=dtype, bytes=draw(st.integers(0, 1000)) * BUFFER_ITEM_BYTES[dtype])
            for dtype in draw(st.sets(st.sampled_from(["float32", "int64"])))
        ),
        ranks=tuple(ranks),
        spread=draw(st.none() | st.just(Spread(low_s=low_s, high_s=high_s))),
        jitter_s=draw(seconds),
        overheads=draw(st.none() | overheads),
    )


@st.composite
def networks(draw: st.DrawFn) -> Network:
    hosts = draw(st.integers(1, 4))
    host_of_rank = draw(
        st.permutations([*range(hosts), *draw(st.lists(st.integers(0, hosts - 1), max_size=4))]).map(tuple)
    )
    racks = draw(st.integers(1, hosts))
    ranks = len(host_of_rank)
    rates = st.floats(1e4, 1e10)
    links = []
    for name in draw(st.sets(st.sampled_from(["local", "host", "rack"]))):
        low, rate, high = sorted(draw(st.tuples(rates, rates, rates)))
        links.append(
            Link(
                name=name,
                bytes_per_s=rate,
                low_bytes_per_s=low,
                high_bytes_per_s=high,
                burst_bytes=draw(st.just(0.0) | st.floats(1, 1e6)),
            )
        )
    collectives = []
    for kind in wire.KINDS if ranks > 1 else ():
        low, startup_s, high = sorted(draw(st.tuples(seconds, seconds, seconds)))
        collectives.append(
            Collective(
                level="world",
                kind=kind,
                ranks=ranks,
                startup_s=startup_s,
                startup_low_s=low,
                startup_high_s=high,
                own_s_per_byte=draw(costs),
                serial_s=draw(seconds),
                load=draw(st.floats(1.0, 3.0)),
                switches=tuple(
                    Switch(from_bytes=size, startup_s=draw(seconds), own_s_per_byte=draw(costs))
                    for size in sorted(draw(st.sets(st.integers(0, 10**6), max_size=2)))
                ),
            )
        )
    return Network(
        backend=draw(st.sampled_from(["gloo", "nccl"])),
        device="cpu",
        host_of_rank=host_of_rank,
        rack_of_host=tuple(host * racks // hosts for host in range(hosts)),
        links=tuple(links),
        collectives=tuple(collectives),
        in_flight=draw(st.integers(1, 4)),
        overlap=tuple(
            Overlap(streams=streams, slowdown=draw(st.floats(1.0, float(streams))), crowding=draw(st.floats(1.0, 3.0)))
            for streams in draw(st.sets(st.sampled_from([2, 4])))
        ),
    )


@st.composite
def schedules(draw: st.DrawFn, profile: Profile) -> Schedule:
    name = draw(st.sampled_from(["ddp", *EXCHANGES]))
    lanes = 1 if name == "ddp" else draw(st.integers(1, 4))
    return Schedule.of(profile, name, lanes=lanes, bucket_mb=draw(st.none() | st.floats(0.01, 10)))


def parts_of(prediction: Prediction) -> list[float]:
    lost = msgspec.structs.asdict(prediction.losses)
    return [*lost.pop("links_s").values(), *lost.values()]


@given(data=st.data(), profile=profiles(), network=networks(), paced=st.booleans())
@law
def test_losses_are_never_negative_and_add_up(
    data: st.DataObject, profile: Profile, network: Network, paced: bool
) -> None:
    found = predict(profile, network, data.draw(schedules(profile)), paced=paced)
    assert all(part >= 0 for part in parts_of(found))
    assert sum(parts_of(found)) == pytest.approx(sum(found.losses.by_cause.values()))
    assert sum(parts_of(found)) == pytest.approx(found.iteration_s - found.compute_s, rel=1e-9, abs=1e-12)
    assert found.low_s <= found.iteration_s <= found.high_s
    assert found.compute_s == profile.forward_s + profile.backward_s + profile.update_s
    assert 0 <= found.scaling <= 1


@given(data=st.data(), profile=profiles())
@law
def test_one_rank_loses_nothing(data: st.DataObject, profile: Profile) -> None:
    found = predict(profile, made_up.network().with_hosts(1), data.draw(schedules(profile)))
    assert found.iteration_s == pytest.approx(found.compute_s)
    assert (found.ranks, found.sent_bytes) == (1, 0)
    assert sum(parts_of(found)) == pytest.approx(0.0, abs=1e-12)


class Mixed(nn.Module):
    """Layers of several sizes and two dtypes, which run in another order than they are defined in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(64, width)
        self.last = nn.Linear(512, 3)
        self.heavy = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.exact = nn.ModuleList(nn.Linear(512, 512).double() for _ in range(3))
        self.narrow = nn.Linear(width, 512)

    def forward(self, x: Tensor) -> Tensor:
        x = self.widen(x)
        for layer in self.heavy:
            x = layer(x)
        x = self.narrow(x).double()
        for layer in self.exact:
            x = layer(x)
        out: Tensor = self.last(x.float())
        return out


CAPS = (None, 25.0, 10.0, 2.0, 0.5, 0.001)


def step(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(2, 64)).sum()
    return loss


def rebuilt_buckets(net: nn.Module, cap: float | None) -> list[list[str]]:
    """Return the parameter names in each bucket of the second step of a real DDP model."""
    model = DDP(net, bucket_cap_mb=cap)
    names = {parameter: name for name, parameter in net.named_parameters()}
    seen: dict[int, list[str]] = {}

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations, and cannot read them as strings
        seen[bucket.index()] = [names[parameter] for parameter in bucket.parameters()]
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for _ in range(2):
        seen.clear()
        step(model).backward()
    return [seen[index] for index in sorted(seen)]


def attached_bytes(net: nn.Module, name: str) -> int:
    """Return the counted and the predicted bytes of a step with an attached exchange."""
    model = DDP(net, bucket_cap_mb=2.0)
    handle = syncline.attach(model, EXCHANGES[name]())
    for _ in range(2):
        step(model).backward()
    assert handle.stats().sent_bytes == handle.predicted_sent_bytes()
    return sum(handle.predicted_sent_bytes().values())


@pytest.fixture(scope="module")
def real_ddp() -> dict[str, Any]:
    """Measure two models on two ranks: the profile and the buckets by cap of one, and the bytes by exchange of a
    smaller one."""

    def main(rank: Rank) -> dict[str, Any]:
        torch.manual_seed(3)
        net, small = Mixed(2048), Mixed(256)
        return {
            "profile": msgspec.to_builtins(measure_backward(net, step, steps=2, warmup=1)),
            "buckets": [rebuilt_buckets(net, cap) for cap in CAPS],
            "small": msgspec.to_builtins(measure_backward(small, step, steps=2, warmup=1)),
            "sent": {name: attached_bytes(small, name) for name in EXCHANGES},
        }

    return dict(on_ranks(2, main)[0])


@pytest.mark.parametrize("place", range(len(CAPS)), ids=map(str, CAPS))
def test_buckets_are_those_that_ddp_builds(real_ddp: dict[str, Any], place: int) -> None:
    profile = msgspec.convert(real_ddp["profile"], Profile)
    ours = ddp_buckets(profile.gradients, CAPS[place])
    names = [{profile.gradients[place].name for place in places} for places in ours]
    assert names == [set(theirs) for theirs in real_ddp["buckets"][place]]


@pytest.mark.parametrize("name", EXCHANGES)
def test_predicted_bytes_are_those_that_an_attached_exchange_sends(real_ddp: dict[str, Any], name: str) -> None:
    profile = msgspec.convert(real_ddp["small"], Profile)
    one_host = made_up.network((0, 0))  # the topology of the real ranks
    found = predict(profile, one_host, Schedule.of(profile, name, bucket_mb=2.0))
    assert found.sent_bytes == real_ddp["sent"][name]


def test_plain_ddp_sends_what_dense_sends() -> None:
    profile = load_profile("cnn-cpu")
    sent = {
        name: predict(profile, made_up.network(), Schedule.of(profile, name)).sent_bytes for name in ("ddp", "dense")
    }
    assert sent["ddp"] == sent["dense"] > 0


def one_layer(elements: int) -> Profile:
    return made_up.profile([elements], forward_s=0.02, backward_s=0.04, update_s=0.01)


@pytest.mark.parametrize("elements", [10, 10_000, 1_000_000])
def test_a_single_bucket_travels_after_backward_for_as_long_as_it_takes_alone(elements: int) -> None:
    profile, network = one_layer(elements), made_up.network()
    found = predict(profile, network, Schedule.of(profile))
    alone_s = solo_s(network, "all_reduce", elements, 4)
    assert found.iteration_s == pytest.approx(0.07 + alone_s)
    assert max(found.timeline.end_s.values()) - found.backward_s == pytest.approx(alone_s)


@pytest.mark.parametrize("kind", wire.KINDS)
@pytest.mark.parametrize("elements", [4, 4_000, 4_000_000])
def test_a_collective_alone_takes_the_longer_of_the_networks_two_lines(kind: str, elements: int) -> None:
    network = made_up.network()
    fitted, (link,) = network.collective(kind), network.links
    sent = wire.sent_bytes(kind, elements, 4, 4)
    crossing = wire.uplink_bytes(kind, elements, 4, range(4))
    expected_s = max(
        fitted.startup_s + fitted.own_s_per_byte * sent, fitted.serial_s + crossing * fitted.load / link.bytes_per_s
    )
    assert solo_s(network, kind, elements, 4) == pytest.approx(expected_s)


def test_beyond_a_switch_a_dearer_start_may_have_cheaper_bytes() -> None:
    base = made_up.network(mbit=8000.0)
    switch = Switch(from_bytes=1_000_000, startup_s=0.003, own_s_per_byte=0.0)
    switched = msgspec.structs.replace(
        base.collectives[0],
        startup_s=0.001,
        startup_high_s=0.003,
        own_s_per_byte=0.0,
        serial_s=0.003,
        switches=(switch,),
    )
    network = msgspec.structs.replace(base, collectives=(switched,))
    below, above = (solo_s(network, "all_reduce", elements, 4) for elements in (100_000, 400_000))
    assert below == pytest.approx(0.001 + 600_000 / 1e9)
    assert above == pytest.approx(0.003 + 2_400_000 / 1e9)


def test_one_rank_alone_exchanges_nothing() -> None:
    assert solo_s(made_up.network().with_hosts(1), "all_reduce", 1000, 4) == 0.0


def test_all_wait_for_the_slowest_rank() -> None:
    even = one_layer(10_000)
    slow = msgspec.structs.replace(
        even,
        ranks=(
            RankTimes(rank=0, forward_s=0.02, backward_s=0.04, update_s=0.01),
            RankTimes(rank=1, forward_s=0.03, backward_s=0.06, update_s=0.01),
        ),
    )
    before, after = (predict(one, made_up.network(), Schedule.of(one)) for one in (even, slow))
    assert after.iteration_s - before.iteration_s == pytest.approx(0.03)
    assert after.losses.straggler_s == pytest.approx(0.03)
    assert after.compute_s == before.compute_s


def test_ranks_faster_than_the_sum_of_medians_cause_no_waiting() -> None:
    """Each rank is fast in one part, so the sum of the medians exceeds the step of every rank."""
    parts = [(0.0, 0.04, 0.01), (0.02, 0.0, 0.01), (0.02, 0.04, 0.0)]
    ranks = tuple(
        RankTimes(rank=rank, forward_s=forward_s, backward_s=backward_s, update_s=update_s)
        for rank, (forward_s, backward_s, update_s) in enumerate(parts)
    )
    profile = msgspec.structs.replace(one_layer(10_000), ranks=ranks)
    found = predict(profile, made_up.network(), Schedule.of(profile))
    assert found.losses.straggler_s == 0.0
    assert found.iteration_s > found.compute_s


def test_every_cost_that_is_added_is_lost_to_its_own_cause() -> None:
    plain = one_layer(100_000)
    network, schedule = made_up.network(), Schedule.of(plain)
    before = predict(plain, network, schedule)
    buffers = predict(
        msgspec.structs.replace(plain, buffers=(Buffers(dtype="float32", bytes=4000),)), network, schedule
    )
    assert buffers.losses.buffers_s == pytest.approx(solo_s(network, "broadcast", 4000, 1))
    overheads = Overheads(copy_in_s_per_byte=1e-9, copy_out_s_per_byte=2e-9, hook_s=0.001, work={})
    copies = predict(msgspec.structs.replace(plain, overheads=overheads), network, schedule)
    assert copies.losses.overhead_s == pytest.approx(400_000 * 3e-9 + 0.001)
    jitter = predict(msgspec.structs.replace(plain, jitter_s=0.005), network, schedule)
    assert jitter.losses.straggler_s == pytest.approx(0.005)
    for after in (buffers, copies, jitter):
        assert after.iteration_s - before.iteration_s == pytest.approx(sum(parts_of(after)) - sum(parts_of(before)))


def test_an_exchanges_own_work_stands_around_its_collectives() -> None:
    overheads = Overheads(
        copy_in_s_per_byte=0.0, copy_out_s_per_byte=0.0, hook_s=0.0, work={"bf16": Work(fixed_s=0.003, s_per_byte=0.0)}
    )
    profile = msgspec.structs.replace(one_layer(100_000), overheads=overheads)
    found = predict(profile, made_up.network(), Schedule.of(profile, "bf16"))
    assert [span.what for span in found.timeline.spans] == ["work", "all_reduce", "work"]
    assert found.losses.overhead_s == pytest.approx(0.003)


def test_gradients_of_a_replayed_profile_do_not_wait_for_copies_before_them() -> None:
    overheads = Overheads(copy_in_s_per_byte=1e-9, copy_out_s_per_byte=0.0, hook_s=0.0, work={})
    profile = msgspec.structs.replace(made_up.profile([100_000] * 10), overheads=overheads)
    schedule = Schedule.of(profile, bucket_mb=0.001)
    at_pace, pushed = (predict(profile, made_up.network(mbit=1e5), schedule, paced=paced) for paced in (True, False))
    assert pushed.iteration_s - at_pace.iteration_s == pytest.approx(9 * 400_000 * 1e-9)


def test_two_lanes_hide_start_ups_behind_each_other() -> None:
    profile = made_up.profile([1000] * 40)
    fast = msgspec.structs.replace(made_up.network(startup_s=0.002), overlap=(Overlap(streams=2, slowdown=1.0),))
    one, two = (
        predict(profile, fast, Schedule.of(profile, "dense", lanes=lanes, bucket_mb=0.001)).iteration_s
        for lanes in (1, 2)
    )
    assert two < one


def test_messages_of_thousands_of_ranks_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    count = wire.uplinks

    def counted(kind: str, groups: Any, backend: str) -> Any:
        looked.append(kind)
        return count(kind, groups, backend)

    monkeypatch.setattr(wire, "uplinks", counted)
    profile = made_up.profile([500] * 400)
    found = predict(profile, made_up.network().with_hosts(1024), Schedule.of(profile, bucket_mb=0.0001))
    assert (found.ranks, len(found.schedule.buckets), len(found.timeline.spans)) == (1024, 400, 400)
    assert 0 < len(looked) < 40


@pytest.mark.parametrize(
    "text", ["ddp", "dense", "bf16", "dense,lanes=4", "fp16,bucket_mb=5", "dense,lanes=2,bucket_mb=0.5"]
)
def test_a_schedule_is_described_as_it_was_written(text: str) -> None:
    assert Schedule.parse(load_profile("cnn-cpu"), text).describe() == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("foo", "no exchange is called 'foo'; known: ddp, dense"),
        ("", "no exchange is called ''"),
        ("dense,lanes=99", "lanes is 99: there may be 1 to 16"),
        ("dense,lanes=0", "lanes is 0: there may be 1 to 16"),
        ("dense,lanes=1.5", "lanes must be a whole number"),
        (f"dense,lanes={'9' * 400}", "write it like"),
        ("ddp,lanes=2", "plain DDP has one lane; for several, name an exchange: dense,lanes=4"),
        ("dense,bucket_mb=0", "bucket_mb is 0: a bucket needs a positive size, in MB"),
        ("dense,bucket_mb=-1", "write it like ddp, dense,lanes=4 or bf16,bucket_mb=5"),
        ("dense,bucket_mb=9999999", "a bucket needs a positive size"),
        (f"dense,bucket_mb={'9' * 400}", "write it like"),
        ("dense,lanes=2,lanes=4", "lanes is given twice"),
        ("dense,colour=red", "write it like"),
        ("dense,", "write it like"),
    ],
)
def test_an_impossible_schedule_is_refused_with_a_reason(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        Schedule.parse(load_profile("cnn-cpu"), text)
