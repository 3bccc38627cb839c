"""Every registered exchange keeps every law, and every law detects an exchange that breaks it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exchanges import VARIANTS
from syncline.dist.local_comm import LocalComm, run_ranks
from syncline.errors import MismatchError, UsageError
from syncline.exchange import (
    EXCHANGES,
    Comm,
    Cost,
    Dense,
    Layout,
    Level,
    OkTopk,
    Phase,
    Rounding,
    State,
    Topology,
    Work,
)
from syncline.testing import LAWS, LawBrokenError, check_laws, run_steps


def hosts(*groups: tuple[int, ...]) -> Topology:
    """Return a topology with a level of hosts."""
    return dataclasses.replace(Topology.flat(sum(map(len, groups))), levels=(Level("host", groups),))


EVERY = {**{name: make() for name, make in EXCHANGES.items()}, **VARIANTS}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", EVERY)
def test_every_exchange_keeps_every_law(name: str, law: str, device: str) -> None:
    exchange = EVERY[name]
    for ranks, numels in {1: (1, 1001), 2: (1, 3, 64, 1001), 3: (3, 1001), 7: (1, 3, 1001)}.items():
        for numel in numels:
            LAWS[law](exchange, ranks, numel, torch.float32, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EVERY)
def test_laws_hold_for_buckets_of_other_types(name: str, dtype: torch.dtype, device: str) -> None:
    check_laws(EVERY[name], ranks=(1, 3), numels=(1, 501), dtypes=(dtype,), device=device)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=4),
        min_size=2,
        max_size=5,
    ),
    wire=st.sampled_from(["bf16", "fp16"]),
)
def test_sixteen_bit_wires_stay_within_their_stated_bound_at_any_scale(values: list[list[float]], wire: str) -> None:
    inputs = [torch.tensor(row, dtype=torch.float32) / len(values) for row in values]
    exchange = Dense(wire=wire)
    result = run_steps(exchange, [inputs])[0].results[0].to(torch.float64)
    exact = torch.stack(inputs).to(torch.float64)
    bound = exchange.rounding(torch.float32, len(inputs))
    allowed = bound.of_sum * exact.abs().sum(0) + bound.of_largest * exact.abs().max() + bound.absolute
    representable = exact.abs().sum(0) < torch.finfo(torch.bfloat16).max / 2
    error = (result - exact.sum(0)).abs()
    assert bool((error <= allowed)[representable].all()), (error, allowed)


def test_fp16_wire_carries_gradients_far_outside_of_fp16s_range() -> None:
    for scale in (1e-20, 1e20):
        inputs = [torch.tensor([1.0, -2.0, 3.0]) * scale for _ in range(2)]
        result = run_steps(Dense(wire="fp16"), [inputs])[0].results[0]
        assert torch.allclose(result, inputs[0] * 2, rtol=1e-3, atol=0)


def test_a_sixteen_bit_wire_halves_the_bytes() -> None:
    topology = Topology.flat(4)
    full = Dense().cost(1_000_000, torch.float32, topology).sent_bytes["world"]
    assert Dense(wire="bf16").cost(1_000_000, torch.float32, topology).sent_bytes["world"] * 2 == full


@pytest.mark.parametrize("thing", [Dense, "dense", None])
def test_only_an_exchange_has_laws_to_keep(thing: object) -> None:
    with pytest.raises(UsageError, match="is not an exchange"):
        check_laws(thing)


def test_an_unknown_wire_is_refused_at_construction() -> None:
    with pytest.raises(UsageError, match="wire must be one of fp32, bf16, fp16"):
        Dense(wire="int8")


@dataclass(frozen=True)
class _Broken:
    """A dense exchange with the named defect."""

    defect: str
    lossless: bool = True
    keeps: bool = False
    waits: bool = True

    def prepare(self, layout: Layout, comm: Comm) -> State:
        if self.defect == "all or nothing":
            return _AllOrNothing(layout.numel)
        return _Accumulating(layout.numel) if self.defect == "keeps" else State()

    def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
        if isinstance(state, _Accumulating):
            flat += state.seen
            state.seen.copy_(flat)
        if self.defect == "hides" and not bool(torch.isfinite(flat).all()):
            flat.zero_()
        if self.defect == "synchronises":
            flat.sum().item()
        if self.defect == "branches" and bool((flat == 0).all()):
            return None
        comm.all_reduce(flat).wait()
        if self.defect == "loses":
            flat[0] = 0
        if self.defect == "miscounts":
            flat *= 1.25
        if self.defect == "disagrees" and comm.rank:
            flat += 1e-3
        if self.defect == "chatters":
            comm.all_reduce(flat.clone()).wait()
        return None

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost:
        return Cost((Phase.of("all_reduce", numel, dtype.itemsize, topology),))

    def rounding(self, dtype: torch.dtype, ranks: int) -> Rounding:
        return Rounding.of_summation(dtype, ranks)


class _Accumulating(State):
    def __init__(self, numel: int) -> None:
        self.seen = torch.zeros(numel)


class _AllOrNothing(_Accumulating):
    """Applies a step to all elements even if it was applied to some only."""

    def __init__(self, numel: int) -> None:
        super().__init__(numel)
        self.before = self.seen.clone()

    def settle(self, applied: Tensor) -> None:
        self.seen = torch.where(applied.any(), self.seen, self.before)
        self.before = self.seen.clone()

    def tensors(self, layout: Layout) -> dict[str, dict[str, Tensor]]:
        return {slot.name: {"seen": slot.view(self.seen)} for slot in layout.slots}


@pytest.mark.parametrize(
    ("defect", "law"),
    [
        ("loses", "conservation"),
        ("loses", "identity"),
        ("disagrees", "agreement"),
        ("chatters", "honesty"),
        ("hides", "commit_on_success"),
        ("keeps", "commit_on_success"),
        ("all or nothing", "partial_application"),
        ("branches", "data_independence"),
    ],
)
def test_each_law_catches_the_exchange_that_breaks_it(defect: str, law: str) -> None:
    with pytest.raises(LawBrokenError):
        LAWS[law](_Broken(defect), 3, 10, torch.float32, "cpu")
    LAWS[law](_Broken("none"), 3, 10, torch.float32, "cpu")


def test_a_weight_must_be_a_number_of_ranks_and_a_decay_must_be_stated() -> None:
    @dataclass(frozen=True)
    class Weighted(_Broken):
        mean: str = "contributors"
        decay: float | None = None

    LAWS["conservation"](Weighted("none"), 3, 10, torch.float32, "cpu")
    with pytest.raises(LawBrokenError, match="conservation"):
        LAWS["conservation"](Weighted("miscounts"), 3, 10, torch.float32, "cpu")  # neither of 1, 2 or 3 thirds
    LAWS["conservation"](OkTopk(density=0.2, decay=0.5), 3, 501, torch.float32, "cpu")

    @dataclass(frozen=True)
    class Hidden(OkTopk):
        def prepare(self, layout: Layout, comm: Comm) -> State:
            return dataclasses.replace(OkTopk(self.density), decay=0.5).prepare(layout, comm)

    with pytest.raises(LawBrokenError, match="conservation"):
        LAWS["conservation"](Hidden(density=0.2), 3, 501, torch.float32, "cpu")


@pytest.mark.parametrize("device", DEVICES[1:])
def test_waiting_for_the_device_is_caught(device: str) -> None:
    with pytest.raises(LawBrokenError):
        LAWS["no_host_synchronisation"](_Broken("synchronises"), 3, 10, torch.float32, device)
    LAWS["no_host_synchronisation"](_Broken("none"), 3, 10, torch.float32, device)


def test_what_is_issued_at_another_level_is_seen_too() -> None:
    @dataclass(frozen=True)
    class Nosy(_Broken):
        """Issues an additional collective inside the host, depending on the data."""

        def run(self, flat: Tensor, state: State, comm: Comm) -> Work | None:
            if bool(flat.any()):
                comm.level("host").all_reduce(flat.clone()).wait()
            return comm.all_reduce(flat)

    topology = hosts((0, 1), (2, 3))
    calm = run_steps(Nosy("none"), [[torch.zeros(3)] * 4], topology=topology)
    busy = run_steps(Nosy("none"), [[torch.ones(3)] * 4], topology=topology)
    assert calm[0].calls == [("world", "all_reduce", 3, "torch.float32", None)]
    assert [call[0] for call in busy[0].calls] == ["host", "world"]


def test_local_ranks_that_issue_different_collectives_all_learn_how_they_differ() -> None:
    def main(comm: LocalComm) -> str:
        tensor = torch.zeros(2 if comm.rank == 1 else 3)
        with pytest.raises(MismatchError) as error:
            comm.all_reduce(tensor).wait()
        return str(error.value)

    for message in run_ranks(3, main):
        assert "'all_reduce', 2" in message
        assert "'all_reduce', 3" in message


def test_a_local_result_is_not_there_before_it_was_waited_for() -> None:
    def main(comm: LocalComm) -> tuple[float, float]:
        tensor = torch.ones(1)
        work = comm.all_reduce(tensor)
        early = tensor.item()
        work.wait()
        return early, tensor.item()

    assert run_ranks(3, main) == [(1.0, 3.0)] * 3


def test_local_levels_are_counted_apart() -> None:
    def main(comm: LocalComm) -> tuple[float, dict[str, int]]:
        tensor = torch.full((4,), float(comm.rank))
        comm.level("host").all_reduce(tensor).wait()
        comm.all_reduce(tensor).wait()
        return tensor[0].item(), dict(comm.counter.sent_bytes)

    for value, sent in run_ranks(hosts((0, 1), (2, 3)), main):
        assert value == 2 * (0 + 1 + 2 + 3)
        assert sent == {"host": 2 * 1 * 2 * 4, "world": 2 * 3 * 1 * 4}
