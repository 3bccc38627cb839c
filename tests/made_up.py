"""Invented models and clusters for tests of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from syncline.exchange import wire
from syncline.records.link_costs import Collective, Link, Overlap, Point, Startup, Switch
from syncline.records.network import WORLD, Network
from syncline.records.plan import Alternative, Plan, PlannedBucket, PlannedGradient, Where
from syncline.records.profile import Gradient, Profile, RankTimes

MBIT = 1e6 / 8


def profile(
    sizes: Sequence[int] = (100_000,) * 10, *, forward_s: float = 0.02, backward_s: float = 0.04, update_s: float = 0.0
) -> Profile:
    """Return a profile with gradients of the given numbers of float32 elements, ready one after the other."""
    return Profile(
        model="made up",
        gradients=tuple(
            Gradient(
                name=f"layer{place}",
                shape=(elements,),
                dtype="float32",
                bytes=4 * elements,
                ready_s=backward_s * (place + 1) / len(sizes),
            )
            for place, elements in enumerate(sizes)
        ),
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        device="cpu",
        where="nowhere",
        how="by hand",
        steps=3,
        batch=None,
    )


def link(name: str, mbit: float, burst_bytes: float = 0.0) -> Link:
    rate = mbit * MBIT
    return Link(
        name=name,
        bytes_per_s=rate,
        low_bytes_per_s=0.9 * rate,
        high_bytes_per_s=1.1 * rate,
        burst_bytes=burst_bytes,
    )


def collective(
    kind: str, ranks: int, startup_s: float, level: str = WORLD, points: tuple[Point, ...] = ()
) -> Collective:
    return Collective(
        level=level,
        kind=kind,
        ranks=ranks,
        startup_s=startup_s,
        startup_low_s=0.8 * startup_s,
        startup_high_s=1.2 * startup_s,
        own_s_per_byte=1e-10,
        serial_s=0.5 * startup_s,
        points=points,
    )


def network(
    host_of_rank: Sequence[int] = (0, 1, 2, 3),
    *,
    rack_of_host: Sequence[int] | None = None,
    mbit: float = 1000.0,
    trunk_mbit: float | None = None,
    startup_s: float = 1e-3,
    in_flight: int = 1,
) -> Network:
    """Return a network whose collectives have the same start-up, with a trunk if there are racks."""
    hosts = max(host_of_rank) + 1
    links = [link("host", mbit)] + ([link("rack", trunk_mbit)] if trunk_mbit is not None else [])
    return Network(
        backend="gloo",
        device="cpu",
        host_of_rank=tuple(host_of_rank),
        rack_of_host=tuple(rack_of_host or (0,) * hosts),
        links=tuple(links),
        collectives=tuple(collective(kind, len(host_of_rank), startup_s) for kind in wire.KINDS),
        in_flight=in_flight,
    )


POINT = Point(bytes=4000, sent_bytes=6000, low_s=0.001, median_s=0.0012, high_s=0.0015, fitted_s=0.0011, repeats=5)
RICH_NETWORK = Network(
    backend="gloo",
    device="cpu",
    host_of_rank=(0, 0, 1, 2),
    rack_of_host=(0, 0, 1),
    links=(link("local", 8000.0), link("host", 1000.0, burst_bytes=80_000.0), link("rack", 500.0)),
    collectives=(
        collective("all_reduce", 4, 0.002, points=(POINT,)),
        msgspec.structs.replace(
            collective("broadcast", 4, 0.001),
            switches=(
                Switch(from_bytes=50_000, startup_s=0.002, own_s_per_byte=1e-11),
                Switch(from_bytes=500_000, startup_s=0.004, own_s_per_byte=0.0),
            ),
        ),
        collective("all_reduce", 2, 0.0002, level="local"),
        collective("all_reduce", 3, 0.0015, level="hosts"),
    ),
    in_flight=2,
    overlap=(Overlap(streams=2, slowdown=1.25), Overlap(streams=4, slowdown=2.5, crowding=1.5)),
    startups=(Startup(ranks=2, seconds=0.0005), Startup(ranks=3, seconds=0.0012)),
    matrix_bytes_per_s=((0.0, 1e8, 5e7), (1e8, 0.0, 5e7), (5e7, 5e7, 0.0)),
    one_machine=True,
    paced_bytes=250_000,
    where="nowhere",
    how="by hand",
    date="2025-01-01T00:00:00+00:00",
)
"""A network with all optional fields."""


def plan(
    gradients: tuple[PlannedGradient, ...], buckets: tuple[PlannedBucket, ...], where: Where, **other: Any
) -> Plan:
    """Return a plan with the given fields; all others have arbitrary values."""
    anything: dict[str, Any] = {
        "model": "made up",
        "lanes": 1,
        "iteration_s": 0.06,
        "low_s": 0.05,
        "high_s": 0.08,
        "compute_s": 0.04,
        "plain_s": 0.1,
        "exchange_s": 0.03,
        "reason": "Fewer start-ups.",
        "alternatives": (Alternative(name="do nothing", iteration_s=0.1, lossless=True),),
        "how": "by hand",
    }
    return Plan(gradients=gradients, buckets=buckets, where=where, **{**anything, **other})


def with_slow_rank(rank: int, times: float) -> Profile:
    """Return the profile of four ranks, one of which is slower by a factor."""
    even = profile([10_000] * 10)
    paces = [times if place == rank else 1.0 for place in range(4)]
    ranks = tuple(
        RankTimes(
            rank=place,
            forward_s=pace * even.forward_s,
            backward_s=pace * even.backward_s,
            update_s=pace * even.update_s,
        )
        for place, pace in enumerate(paces)
    )
    return msgspec.structs.replace(even, ranks=ranks)


@dataclass(frozen=True)
class Case:
    """A model, a cluster and a plan that lose their time to one cause."""

    profile: Profile
    network: Network
    plan: str
    culprit: str
    remedy: str
    """The name of the best remedy."""


CASES = {
    "400 tiny tensors, one by one": Case(
        profile([500] * 400), network(startup_s=1e-3), "ddp,bucket_mb=0.001", "startups", "buckets"
    ),
    "a slow trunk between two racks": Case(
        profile([100_000] * 10),
        network(rack_of_host=(0, 0, 1, 1), mbit=10_000.0, trunk_mbit=200.0),
        "ddp,bucket_mb=1",
        "rack",
        "rack × 10",
    ),
    "one slow rank": Case(with_slow_rank(2, 1.5), network(mbit=10_000.0), "ddp", "straggler", "even ranks"),
    "slow links": Case(profile([100_000] * 10), network(mbit=100.0), "ddp,bucket_mb=1", "host", "host × 10"),
}
