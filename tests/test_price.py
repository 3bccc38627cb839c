"""The cost of groups' collectives on a network, the time of a whole exchange, and the gain of pipelined chunks."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from made_up import MBIT, collective, link
from made_up import network as made_up_network
from made_up import profile as made_up_profile
from syncline.exchange import WORLD, BucketPath, Cost, Dense, Hierarchical, Level, Phase, Topology, Tree, wire
from syncline.measure.assumed_network import assumed_links, assumed_network
from syncline.predict import Schedule, ddp_buckets, predict
from syncline.predict.exchange_time import capacities, flow, pricing, solo_s, topology_of
from syncline.predict.timeline import Bucket, Capacity, Collective, Span, Timeline, simulate
from syncline.records.network import Network

law = settings(max_examples=80, deadline=None)
NUMEL = 240_000
RATE = 1e6


def layered(
    host_of_rank: tuple[int, ...] = (0, 0, 1, 1), *, mbit: float = 1000.0, local_mbit: float = 8000.0
) -> Network:
    """Return a network with start-ups of 1 ms among all ranks, 0.5 ms among hosts and 0.1 ms inside hosts."""
    ranks, hosts = len(host_of_rank), max(host_of_rank) + 1
    fullest = max(host_of_rank.count(host) for host in set(host_of_rank))
    return Network(
        backend="gloo",
        device="cpu",
        host_of_rank=host_of_rank,
        rack_of_host=(0,) * hosts,
        links=(link("host", mbit), link("local", local_mbit)),
        collectives=tuple(
            collective(kind, size, startup_s, level)
            for level, size, startup_s in ((WORLD, ranks, 1e-3), ("hosts", hosts, 5e-4), ("local", fullest, 1e-4))
            for kind in wire.KINDS
        ),
        in_flight=2,
    )


# --- the topology of a network ----------------------------------------------------------------------------------


def test_a_networks_topology_has_its_hosts_its_racks_and_its_backend() -> None:
    network = made_up_network((0, 0, 1, 1, 2, 2), rack_of_host=(0, 0, 1), trunk_mbit=100.0)
    place = topology_of(network)
    assert place.ranks == 6
    assert place.backend == "gloo"
    assert place.levels == Tree.of_hosts(network.host_of_rank, network.rack_of_host).levels
    assert [level.name for level in place.levels] == ["local", "hosts", "racks"]
    assert topology_of(assumed_network(2, 2, 10**9, "nccl")).backend == "nccl"


def test_a_given_tree_replaces_the_one_that_was_found() -> None:
    tree = Tree.given([[0, 2], [1, 3]], 4)
    assert topology_of(layered(), tree).levels == tree.levels


def test_a_topology_among_a_level_knows_the_same_links() -> None:
    place = topology_of(layered())
    inner = place.among(place.levels[0])
    assert inner.ranks == 2
    assert inner.levels == ()
    assert inner.seconds is place.seconds


# --- bytes on links ---------------------------------------------------------------------------------------------


def test_shards_that_cross_side_by_side_add_up_on_their_hosts_uplink() -> None:
    """Two all-reduces of one half each, among ranks on the same hosts, load a link like one of the whole."""
    network = layered()
    _, hosts = topology_of(network).levels
    assert len(hosts.groups) == 2
    side_by_side = network.loads("all_reduce", NUMEL // 2, 4, hosts)
    alone = network.loads("all_reduce", NUMEL, 4, Level("hosts", hosts.groups[:1]))
    assert side_by_side == alone == {"host": 4 * NUMEL}


def test_leaders_alone_load_their_uplinks_with_one_flow() -> None:
    network = layered()
    local, hosts = topology_of(network).levels
    leaders = hosts.led_by(local)
    assert leaders.groups == ((0, 2),)
    both, one = (network.loads("all_reduce", NUMEL, 4, level)["host"] for level in (hosts, leaders))
    assert both == 2 * one


def test_groups_inside_hosts_load_memory_and_no_uplink() -> None:
    network = layered()
    local, _ = topology_of(network).levels
    assert network.loads("all_to_all", NUMEL, 4, local) == {"local": 4 * NUMEL // 2}
    assert msgspec.structs.replace(network, links=(link("host", 1.0),)).loads("all_to_all", NUMEL, 4, local) == {}


def test_groups_of_hosts_in_one_rack_leave_its_trunk_alone() -> None:
    network = made_up_network(tuple(range(4)), rack_of_host=(0, 0, 1, 1), trunk_mbit=100.0)
    _, hosts, racks = topology_of(network).levels
    assert hosts.groups == ((0, 1), (2, 3))
    assert network.loads("all_reduce", NUMEL, 4, hosts) == {"host": 4 * NUMEL}
    # Both groups across racks use both trunks; each host's link carries one of them.
    assert network.loads("all_reduce", NUMEL, 4, racks) == {"host": 4 * NUMEL, "rack": 2 * 4 * NUMEL}


def test_the_busiest_uplink_of_unequal_groups_counts() -> None:
    network = made_up_network((0, 1, 2, 3, 4))
    level = Level("mixed", ((0, 1), (2, 3, 4)))
    three = wire.sent_bytes("all_reduce", NUMEL, 4, 3)
    assert network.loads("all_reduce", NUMEL, 4, level) == {"host": three}
    assert network.loads("all_reduce", NUMEL, 4, Level("mixed", ((0,), (1, 2)))) == {"host": 4 * NUMEL}


def test_groups_of_different_sizes_add_up_where_they_share_a_host() -> None:
    network = made_up_network((0, 0, 1, 1, 2))
    level = Level("mixed", ((0, 2), (1, 3, 4)))
    expected = wire.sent_bytes("all_reduce", NUMEL, 4, 2) + wire.sent_bytes("all_reduce", NUMEL, 4, 3)
    assert network.loads("all_reduce", NUMEL, 4, level) == {"host": expected}


@pytest.mark.parametrize("kind", wire.KINDS)
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1)])
def test_a_level_of_everyone_loads_what_the_world_does(kind: str, hosts: tuple[int, ...]) -> None:
    network = layered(hosts)
    assert network.loads(kind, NUMEL, 4, topology_of(network).whole) == network.loads(kind, NUMEL, 4, WORLD)


@given(hosts=st.integers(2, 5), per_host=st.integers(1, 4), kind=st.sampled_from(["all_reduce", "all_gather"]))
@law
def test_shards_across_hosts_load_what_one_rank_per_host_would(hosts: int, per_host: int, kind: str) -> None:
    """This holds for every number of ranks per host."""
    network = assumed_network(hosts, per_host, 10**9, "gloo")
    level = topology_of(network).levels[1]
    elements = 120 * per_host * hosts
    apart = assumed_network(hosts, 1, 10**9, "gloo")
    assert network.loads(kind, elements // per_host, 4, level) == apart.loads(kind, elements, 4)


# --- start-ups of groups ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", wire.KINDS)
def test_groups_cost_what_was_measured_at_their_level(kind: str) -> None:
    network = layered()
    place = topology_of(network)
    local, hosts = place.levels
    assert network.collective(kind, local).startup_s == pytest.approx(1e-4)
    assert network.collective(kind, hosts).startup_s == pytest.approx(5e-4)
    assert network.collective(kind, place.whole).startup_s == pytest.approx(1e-3)


@pytest.mark.parametrize("kind", wire.KINDS)
def test_start_ups_grow_with_the_messages_of_a_group(kind: str) -> None:
    network = layered((0, 0, 1, 1, 2, 2))
    pair = Level("some", ((0, 2),))
    fitted = network.collective(kind, pair)
    assert fitted.ranks == 2
    assert fitted.startup_s == pytest.approx(5e-4 * wire.hops(kind, 2) / wire.hops(kind, 3))
    four = Level("some", ((0, 1, 2, 3),))
    assert network.collective(kind, four).startup_s == pytest.approx(5e-4 * wire.hops(kind, 4) / wire.hops(kind, 3))


def test_a_network_that_measured_only_the_world_scales_that() -> None:
    network = made_up_network((0, 0, 1, 1), startup_s=6e-3)
    for level in topology_of(network).levels:
        assert network.collective("all_reduce", level).startup_s == pytest.approx(6e-3 * 2 / 6)
        assert network.collective("all_reduce", level).ranks == 2


def test_groups_that_were_not_measured_inside_cost_what_those_between_hosts_do() -> None:
    network = layered()
    without = msgspec.structs.replace(
        network, collectives=tuple(entry for entry in network.collectives if entry.level != "local")
    )
    local, _ = topology_of(network).levels
    assert without.collective("broadcast", local).startup_s == pytest.approx(5e-4)


# --- time of an exchange ----------------------------------------------------------------------------------------

WAYS = tuple(
    Hierarchical(shape=shape, within=within, across=across)
    for shape, within, across in (
        ("leader", Dense(), Dense()),
        ("sharded", Dense(), Dense()),
        ("sharded", Dense(wire="bf16"), Dense()),
        ("leader", Dense(), Dense(wire="bf16")),
    )
)
NETWORKS = {
    "host by host": layered(),
    "scrambled": layered((0, 1, 0, 1)),
    "assumed": assumed_links((0, 0, 0, 1, 1, 1), 10**9, "nccl"),
    "racks": made_up_network((0, 0, 1, 1, 2, 2, 3, 3), rack_of_host=(0, 0, 1, 1), mbit=1000.0, trunk_mbit=300.0),
}


def alone_s(network: Network, phase: Phase) -> float:
    return simulate([Bucket("0", 0.0, 0, (flow(network, phase),))], capacities(network)).end_s["0"]


@pytest.mark.parametrize("exchange", WAYS)
@pytest.mark.parametrize("name", NETWORKS)
def test_one_chunk_costs_the_sum_of_its_phases_each_alone(name: str, exchange: Hierarchical) -> None:
    network = NETWORKS[name]
    cost = in_chunks(exchange, 1).cost(NUMEL, torch.float32, topology_of(network))
    assert cost.chunks == 1
    assert pricing(network)(cost) == pytest.approx(sum(alone_s(network, phase) for phase in cost.phases), rel=1e-6)


def in_chunks(exchange: Hierarchical, chunks: int) -> Hierarchical:
    return Hierarchical(exchange.within, exchange.across, exchange.shape, exchange.levels, chunks)


@pytest.mark.parametrize("kind", wire.KINDS)
def test_a_collective_of_all_ranks_costs_what_it_takes_alone(kind: str) -> None:
    network = layered()
    phase = Phase.of(kind, NUMEL, 4, Topology.flat(4))
    assert pricing(network)(Cost((phase,))) == pytest.approx(solo_s(network, kind, NUMEL, 4), rel=1e-6)


def test_an_empty_exchange_takes_no_time() -> None:
    assert pricing(layered())(Cost(())) == 0.0


@pytest.mark.parametrize("exchange", WAYS)
@pytest.mark.parametrize("name", NETWORKS)
def test_without_start_ups_more_chunks_never_cost_more(name: str, exchange: Hierarchical) -> None:
    network = NETWORKS[name].without(startups=True)
    seconds = pricing(network)
    times = [
        seconds(in_chunks(exchange, chunks).cost(NUMEL, torch.float32, topology_of(network)))
        for chunks in (1, 2, 4, 8, 16)
    ]
    for fewer, more in itertools.pairwise(times):
        assert more <= fewer * (1 + 1e-9)
    assert times[-1] < times[0]


@pytest.mark.parametrize("exchange", WAYS)
@pytest.mark.parametrize("name", NETWORKS)
def test_with_start_ups_ever_more_chunks_cost_more_in_the_end(name: str, exchange: Hierarchical) -> None:
    network = NETWORKS[name]
    seconds = pricing(network)
    few, many = (
        seconds(in_chunks(exchange, chunks).cost(NUMEL, torch.float32, topology_of(network))) for chunks in (4, 512)
    )
    assert many > few


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
@pytest.mark.parametrize("exchange", WAYS)
@pytest.mark.parametrize("name", NETWORKS)
def test_but_for_start_ups_the_formula_is_near_the_simulation(name: str, exchange: Hierarchical, chunks: int) -> None:
    """Chunks that share a link leave it idle at times, so the two differ, but never by much."""
    network = NETWORKS[name].without(startups=True)
    cost = in_chunks(exchange, chunks).cost(NUMEL, torch.float32, topology_of(network))
    bucket = Bucket("0", 0.0, 0, tuple(flow(network, phase) for phase in cost.phases), cost.chunks)
    links = capacities(network)
    simulated = simulate([bucket], links, network.in_flight, network.slowdown, network.crowding).end_s["0"]
    assert pricing(network)(cost) == pytest.approx(simulated, rel=0.35)


@pytest.mark.parametrize("exchange", WAYS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_chunk_after_the_first_pays_for_the_work_of_its_start_ups(name: str, exchange: Hierarchical) -> None:
    network = NETWORKS[name]
    seconds, free = pricing(network), pricing(network.without(startups=True))
    cost = in_chunks(exchange, 8).cost(NUMEL, torch.float32, topology_of(network))
    startups_s = sum(network.collective(phase.kind, phase.level).startup_s for phase in cost.parts[0])
    assert seconds(cost) - free(cost) >= 7 * startups_s * network.slowdown(4) / 4 * (1 - 1e-9)


@pytest.mark.parametrize("exchange", WAYS)
@pytest.mark.parametrize("name", NETWORKS)
def test_no_price_is_below_what_the_busiest_link_needs(name: str, exchange: Hierarchical) -> None:
    network = NETWORKS[name]
    for chunks in (1, 4, 32):
        cost = in_chunks(exchange, chunks).cost(NUMEL, torch.float32, topology_of(network))
        busy: dict[str, float] = {}
        for phase in cost.phases:
            for link_name, seconds in network.busy_s(phase.kind, phase.elements, phase.itemsize, phase.level).items():
                busy[link_name] = busy.get(link_name, 0.0) + seconds
        assert pricing(network)(cost) >= max(busy.values()) * (1 - 1e-9)


def test_a_hierarchical_exchange_costs_what_a_calculation_by_hand_gives() -> None:
    """Two hosts of two ranks at 1 Gbit/s: a reduce and a broadcast inside, 2(m−1)/m of all bytes across, and three
    start-ups."""
    network = layered()
    cost = Hierarchical(shape="leader", chunks=1).cost(NUMEL, torch.float32, topology_of(network))
    nbytes = 4 * NUMEL
    inside = 8000 * MBIT
    expected = (0.5e-4 + nbytes / inside) * 2 + 2.5e-4 + nbytes / (1000 * MBIT)
    assert pricing(network)(cost) == pytest.approx(expected, rel=1e-6)


# --- chunks on the timeline -------------------------------------------------------------------------------------


def stage(load: float = 0.0, serial_s: float = 0.0, spread_s: float = 0.0, **loads: float) -> Collective:
    return Collective("all_reduce", "world", serial_s, spread_s, loads or {"host": load})


seconds = st.one_of(st.just(0.0), st.floats(1e-4, 1.0))
sizes = st.one_of(st.just(0.0), st.floats(1.0, 1e6))
stages = st.lists(
    st.builds(lambda host, local, serial_s: stage(serial_s=serial_s, host=host, local=local), sizes, sizes, seconds),
    min_size=1,
    max_size=4,
)
LINKS = {"host": Capacity(RATE), "local": Capacity(3 * RATE)}


def run(parts: list[Collective], chunks: int, in_flight: int = 1) -> Timeline:
    return simulate([Bucket("0", 0.0, 0, tuple(parts) * chunks, chunks)], LINKS, in_flight)


def spans_by_stage(timeline: Timeline, stages: int, chunks: int) -> list[list[Span]]:
    """Return the spans of each stage's chunks, sorted by start. Stages differ in their kinds."""
    found = [[span for span in timeline.spans if span.what == str(place)] for place in range(stages)]
    assert all(len(spans) == chunks for spans in found)
    return [sorted(spans, key=lambda span: span.start_s) for spans in found]


def labelled(parts: list[Collective]) -> list[Collective]:
    return [
        Collective(str(place), part.level, part.serial_s, part.spread_s, part.load_bytes)
        for place, part in enumerate(parts)
    ]


@given(parts=stages, chunks=st.integers(1, 6), in_flight=st.integers(1, 3))
@law
def test_pipelined_chunks_end_no_later_than_one_after_the_other(
    parts: list[Collective], chunks: int, in_flight: int
) -> None:
    sequential = chunks * run(parts, 1).end_s["0"]
    assert run(parts, chunks, in_flight).end_s["0"] <= sequential * (1 + 1e-6) + 1e-9


@given(parts=stages, chunks=st.integers(1, 6), in_flight=st.integers(1, 3))
@law
def test_pipelined_chunks_end_no_earlier_than_their_links_and_start_ups_allow(
    parts: list[Collective], chunks: int, in_flight: int
) -> None:
    end = run(parts, chunks, in_flight).end_s["0"]
    for name, capacity in LINKS.items():
        assert end >= chunks * sum(part.load_bytes[name] for part in parts) / capacity.bytes_per_s * (1 - 1e-6)
    assert end >= run(parts, 1).end_s["0"] * (1 - 1e-6)
    assert end >= max(part.serial_s for part in parts) * -(-chunks // in_flight) * (1 - 1e-6)


@given(parts=stages, chunks=st.integers(1, 6), in_flight=st.integers(1, 3))
@law
def test_a_stage_does_as_many_chunks_at_a_time_as_it_may_and_each_chunk_takes_its_stages_in_order(
    parts: list[Collective], chunks: int, in_flight: int
) -> None:
    timeline = run(labelled(parts), chunks, in_flight)
    by_stage = spans_by_stage(timeline, len(parts), chunks)
    for spans in by_stage:
        for early, late in zip(spans, spans[in_flight:], strict=False):
            assert late.start_s >= early.end_s - 1e-9
    for before, after in itertools.pairwise(by_stage):
        for place in range(chunks):
            # A chunk starts a stage only after it has ended the previous one.
            ended = sorted(span.end_s for span in before)[place]
            assert after[place].start_s >= ended - 1e-9
    assert timeline.end_s["0"] == max((span.end_s for span in timeline.spans), default=0.0)


@pytest.mark.parametrize(("in_flight", "end_s"), [(1, 1.0 + 3 * 1.0 + 1.0), (2, 1.0 + 1.0 + 1.0 + 1.0), (4, 3.0)])
def test_start_ups_of_chunks_overlap_as_far_as_chunks_may(in_flight: int, end_s: float) -> None:
    """Three chunks of three stages of 1 s each form a pipeline; with more chunks in flight, a shorter one."""
    parts = [stage(serial_s=1.0)] * 3
    assert run(parts, 3, in_flight).end_s["0"] == pytest.approx(end_s)


def test_different_links_are_busy_at_the_same_time() -> None:
    """Each chunk takes 1 s inside and 1 s across, so ten chunks take 11 s."""
    parts = [stage(local=3 * RATE), stage(host=RATE)]
    assert run(parts, 10).end_s["0"] == pytest.approx(11.0)
    assert 10 * run(parts, 1).end_s["0"] == pytest.approx(20.0)


def test_stages_that_share_a_link_gain_nothing() -> None:
    assert run([stage(RATE), stage(RATE)], 5).end_s["0"] == pytest.approx(10.0)


def test_the_next_bucket_of_a_lane_waits_for_all_chunks() -> None:
    first = Bucket("first", 0.0, 0, (stage(serial_s=1.0),) * 6, 3)
    timeline = simulate([first, Bucket("second", 0.0, 0, (stage(serial_s=1.0),))], LINKS)
    assert timeline.end_s == pytest.approx({"first": 4.0, "second": 5.0})


def test_a_price_does_not_depend_on_what_was_priced_before() -> None:
    network = made_up_network((0, 0, 1, 1, 2, 2, 3, 3), rack_of_host=(0, 0, 1, 1), mbit=200.0, trunk_mbit=100.0)
    exchange = Hierarchical(chunks=1)
    ways = [BucketPath(("leader", "sharded")), BucketPath(("sharded", "leader"))]

    def prices(order: list[BucketPath]) -> dict[BucketPath, float]:
        place = topology_of(network)
        assert place.seconds is not None
        return {way: place.seconds(exchange._cost(way, 1_000_000, torch.float32, place)) for way in order}

    assert prices(ways) == prices(ways[::-1])
    assert len(set(prices(ways).values())) == 2


def test_a_prediction_climbs_the_levels_that_the_exchange_was_given() -> None:
    network = made_up_network((0, 0, 1, 1), mbit=200.0)
    profile = made_up_profile([100_000] * 10)
    across_hosts = Hierarchical(levels=[[0, 2], [1, 3]], chunks=1, shape="leader")
    plan = Schedule("mine", ddp_buckets(profile.gradients), across_hosts, "hierarchical")
    found = predict(profile, network, plan)
    inside = predict(profile, network, dataclasses.replace(plan, exchange=Hierarchical(chunks=1, shape="leader")))
    assert found.iteration_s > 1.2 * inside.iteration_s
