"""`quality=`: the gentlest method that is fast enough, with what it gives up and the measurement that this rests on."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import made_up
import syncline
from ddp_helpers import on_ranks, refusal
from syncline.cluster import Rank
from syncline.exchange import UPDATES_WARMUP_STEPS, OkTopk, Quantized
from syncline.plan.choice import Choice
from syncline.plan.ladder import TOLERANCE, make_choice
from syncline.plan.make import SPARSE_WARMUP_STEPS, make_plan
from syncline.plan.rungs import QUALITIES, RUNGS, rungs_of
from syncline.records.network import Network
from syncline.records.profile import Profile
from syncline.tuning.settings import TuneSettings

RESULTS = (Path(__file__).parents[1] / "docs" / "results.md").read_text()
BIG = made_up.profile([1_000_000] * 10)


def slow(mbit: float = 200.0, hosts: tuple[int, ...] = (0, 1, 2, 3)) -> Network:
    return made_up.network(hosts, mbit=mbit, startup_s=1e-4)


# --- the ladder, without processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung.quality != "exact"], ids=lambda rung: rung.name)
def test_the_evidence_of_a_rung_is_a_row_of_the_results(rung: Any) -> None:
    section, row = re.findall(r'"([^"]+)"', rung.evidence)[:2]
    text = RESULTS.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    row_text = next(line for line in text.splitlines() if line.startswith("|") and f"| {row} |" in line)
    for figure in re.findall(r"\d\.\d{3}(?: ± \d\.\d{3})?", rung.evidence.partition(": ")[2].partition(", dense")[0]):
        assert figure in row_text, (figure, row_text)
    dense = re.search(r"dense (\d\.\d{3}(?: ± \d\.\d{3})?)", rung.evidence)
    assert dense is not None and dense[1] in text


def test_a_quality_permits_its_own_rungs_and_all_gentler_ones() -> None:
    assert [rung.name for rung in rungs_of("exact")] == ["lossless", "overlap"]
    assert all(rung.quality == "exact" for rung in rungs_of("exact"))
    for gentle, harsh in itertools.pairwise(QUALITIES):
        assert set(rungs_of(gentle)) < set(rungs_of(harsh))
    assert not any(rung.needs_optimizer for rung in rungs_of("close", updates=False, overlap=False))
    with pytest.raises(syncline.UsageError, match="quality is 'good': it must be one of exact, same, close"):
        make_choice(BIG, slow(), "good")


@pytest.mark.parametrize("mbit", [50.0, 1_000.0, 10_000.0, 100_000.0])
@pytest.mark.parametrize("quality", QUALITIES)
def test_the_gentlest_rung_within_5_percent_of_the_fastest_is_chosen(quality: str, mbit: float) -> None:
    choice = make_choice(BIG, slow(mbit), quality)
    times = [rung for rung in choice.rungs if QUALITIES.index(rung.quality) <= QUALITIES.index(quality)]
    fastest_s = min(rung.iteration_s for rung in times)
    gentlest = next(rung for rung in times if rung.iteration_s <= (1 + TOLERANCE) * fastest_s)
    assert choice.rung == gentlest.rung
    assert choice.lossless or choice.reason.startswith("Lossy: ")
    assert choice.lossless or quality != "exact"
    if not choice.lossless:
        rung = next(rung for rung in RUNGS if rung.name == choice.rung)
        assert f"Trade-off: {rung.trade_off}." in choice.reason and rung.evidence in choice.reason
    if choice.nothing or choice.lossless:
        assert "Evidence" not in choice.reason


def test_slow_links_climb_the_ladder_and_the_next_rung_is_predicted() -> None:
    exact, same, close = (make_choice(BIG, slow(50.0), quality) for quality in QUALITIES)
    assert exact.lossless and 'quality="same" (4 bits, lossy)' in exact.reason
    assert same.rung == "4 bits" and all(exchange == Quantized(bits=4) for exchange in same.plan.exchanges)
    assert re.search(r'quality="close" \(.*lossy\): \d+\.\d× plain DDP\'s speed instead of \d+\.\d×', same.reason)
    assert close.attachment is not None and close.attachment.updates and close.warmup == UPDATES_WARMUP_STEPS
    assert "quality=" not in close.reason and "a warm-up of 10 % of the steps" in close.reason
    alone = make_choice(BIG, slow(50.0), "same", updates=False)
    assert 'quality="close" (local steps, lossy, needs the optimizer): ' in alone.reason
    assert "optimizer=optimizer, every=15)" in close.attachment.code()
    assert msgspec.json.decode(msgspec.json.encode(close), type=Choice) == close


def test_an_exchange_of_updates_with_levels_has_no_evidence_of_its_own() -> None:
    profile = made_up.profile([1_000_000] * 10, forward_s=0.3, backward_s=0.6)
    leveled = make_choice(profile, slow(100.0, (0, 0, 1, 1)), "close", own_buckets=True)
    assert leveled.attachment is not None and leveled.attachment.exchange["type"] == "Hierarchical"
    assert "That row is about the exchange without levels" in leveled.reason
    flat = make_choice(profile, slow(100.0), "close", own_buckets=True)
    assert flat.rung == "sparse updates" and "without levels" not in flat.reason


def best_overlapped(overlap: bool) -> Choice:
    """Choose for a model whose communication takes about as long as its computation."""
    profile = made_up.profile([200_000] * 20, forward_s=0.12, backward_s=0.24)
    return make_choice(profile, slow(500.0), overlap=overlap, hint=False, caps=(1 << 20,))


def test_overlap_is_chosen_only_with_an_optimizer() -> None:
    with_optimizer, without = (best_overlapped(overlap) for overlap in (True, False))
    assert with_optimizer.attachment is not None and with_optimizer.attachment.overlap and with_optimizer.lossless
    assert 'overlap="forward"' in with_optimizer.attachment.code()
    assert without.attachment is None and without.rung == "lossless"


def test_buckets_that_must_stay_get_one_exchange_for_all() -> None:
    choice = make_choice(BIG, slow(50.0), "same", own_buckets=True)
    assert choice.attachment is not None and choice.attachment.exchange["type"] == "Quantized"
    assert "DDP's" in choice.reason and "instead of" not in choice.reason.partition("Trade-off")[0]
    leveled = make_choice(BIG, slow(50.0, (0, 0, 1, 1)), "exact", own_buckets=True)
    assert leveled.attachment is not None and leveled.attachment.exchange["shape"] == "auto"


def test_a_plan_never_has_a_sparse_exchange_without_a_warm_up() -> None:
    for hosts in ((0, 1, 2, 3), (0, 0, 1, 1)):
        plan = make_plan(BIG, slow(50.0, hosts), ("sparse",))
        inner = [getattr(exchange, "across", exchange) for exchange in plan.exchanges]
        assert any(isinstance(exchange, OkTopk) for exchange in inner)
        assert all(exchange.warmup == SPARSE_WARMUP_STEPS for exchange in inner if isinstance(exchange, OkTopk))
        assert plan.reason.startswith("Lossy: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quality": "best"}, "quality is 'best': it must be one of exact, same, close"),
        ({"quality": "same", "allow": ("bf16",)}, "quality and allow exclude each other"),
        ({"quality": "same", "exchange": syncline.Dense()}, "are for tuning, which an exchange or a plan replaces"),
        ({"quality": "same", "warmup": 9}, "every, warmup, delay and outer are for updates"),
        ({"quality": "close", "warmup": -1}, "warmup"),
        ({"retune": "often"}, "retune is 'often': it must be 'auto'"),
        ({"retune": "auto", "change": False}, "is for tuning that may change the model"),
        ({"cache": "no"}, "cache is 'no': it must be True or False"),
    ],
)
def test_contradictions_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(syncline.UsageError, match=message) as caught:
        TuneSettings(**settings)
    assert len(str(caught.value).splitlines()) == 1


# --- tune, with processes ---------------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def links(mbit: float, ranks: int = 2) -> Network:
    network = made_up.network((0,) * ranks, mbit=mbit, startup_s=1e-4)
    return msgspec.structs.replace(network, links=(made_up.link("local", mbit), *network.links))


def tuned_model(rank: Rank, **options: Any) -> tuple[Any, DDP, torch.optim.Optimizer, Any]:
    """Tune a model in the middle of its training, and check that nothing but the exchange has changed."""
    model = DDP(Wide(), bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank.rank))

    def step(net: nn.Module) -> None:
        net(inputs).square().mean().backward()

    for _ in range(3):
        optimizer.zero_grad()
        step(model)
        optimizer.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    moments = [optimizer.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]
    tuned = syncline.tune(model, step, optimizer=optimizer, budget_s=5, quiet=True, **options)
    assert all(torch.equal(before, now) for before, now in zip(weights, model.parameters(), strict=True))
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    assert all(torch.equal(before, now["exp_avg"]) for before, now in zip(moments, states, strict=True))
    assert [float(state["step"]) for state in states] == [3.0] * len(states)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert len(repr(tuned)) < 100
    return tuned, model, optimizer, step


def test_tuning_tries_updates_and_attaches_them_with_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.tuning.trials._MAX_RATIO", float("inf"))

    def main(rank: Rank) -> str:
        tuned, model, optimizer, step = tuned_model(rank, quality="close", warmup=2, network=links(1.0))
        assert tuned.trial.steps % tuned.choice.period == 0 and tuned.choice.attachment.updates
        assert tuned.handle is not None and not tuned.handle.exchanges_updates  # it warms up first
        assert "after 2 steps of gradients in 4 bits" in tuned.handle.describe()
        for _ in range(3):
            optimizer.zero_grad()
            step(model)
            optimizer.step()
        assert tuned.handle.stats().steps == 3 and tuned.handle.exchanges_updates
        return str(tuned.describe())

    first, second = on_ranks(2, main)
    assert first == second
    lines = first.splitlines()
    assert lines[0].startswith("Lossy: updates by ") and "Evidence (docs/results.md)" in lines[0]
    assert "after 2 steps of gradients in 4 bits" in lines[0]
    assert re.match(r"Tried: plain DDP \d+\.\d ms \(\d+\.\d–\d+\.\d\), the choice .* noise ± \d+\.\d ms: ", lines[1])
    assert lines[2].startswith("Tuning took ")


def test_tuning_with_an_optimizer_may_overlap_and_leaves_plain_ddp_if_that_loses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def overlapping(profile: Profile, network: Network, *_: Any, **options: Any) -> Choice:
        """Choose overlap whatever is predicted: these links are not those of the made-up network."""
        assert options["overlap"]
        return msgspec.structs.replace(best_overlapped(True), iteration_s=0.001, plain_s=0.001, rivals=())

    monkeypatch.setattr("syncline.tuning.choose.make_choice", overlapping)

    def main(rank: Rank) -> list[bool]:
        kept = []
        for ratio in (0.0, float("inf")):
            monkeypatch.setattr("syncline.tuning.trials._MAX_RATIO", ratio)
            tuned, model, optimizer, step = tuned_model(rank, network=links(1.0))
            kept.append(tuned.handle is not None)
            for _ in range(8):
                optimizer.zero_grad()
                step(model)
                optimizer.step()
            if tuned.handle is not None:
                assert "overlaps with the next forward pass" in tuned.handle.describe()
                tuned.handle.detach()
            assert not model.module._forward_pre_hooks
        return kept

    assert on_ranks(2, main) == [[False, True]] * 2


def test_wrong_arguments_of_tune_are_one_line(one_rank: None) -> None:
    model = DDP(Wide())
    assert "tune(model, step): step is 3: pass a function" in refusal(lambda: syncline.tune(model, 3))  # type: ignore[arg-type]
    assert "tune needs a DistributedDataParallel model, and this is a Wide" in refusal(
        lambda: syncline.tune(Wide(), lambda net: None)
    )
    other = torch.optim.SGD(Wide().parameters(), lr=0.1)
    assert "the optimizer does not have it" in refusal(lambda: syncline.tune(model, lambda net: None, optimizer=other))


def test_a_model_that_exchanges_something_already_is_tuned_from_what_detaching_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("syncline.tuning.trials._MAX_RATIO", 0.0)
    attached: dict[str, dict[str, Any]] = {
        "updates": {"exchange": syncline.ChunkedTopk(density=0.1), "every": 3, "warmup": 0},
        "overlap": {"exchange": syncline.Dense(), "overlap": "forward", "gather": "bf16"},
    }

    def main(rank: Rank) -> dict[str, Any]:
        results = {}
        for name, method in attached.items():
            model = DDP(Wide(), bucket_cap_mb=0.02)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank.rank))

            def step(net: nn.Module, inputs: torch.Tensor = inputs) -> None:
                net(inputs).square().mean().backward()

            syncline.attach(model, optimizer=optimizer, **method)
            for _ in range(8):
                optimizer.zero_grad()
                step(model)
                optimizer.step()
            options = {"quality": "close", "network": links(1.0), "budget_s": 5, "quiet": True}
            tuned = syncline.tune(model, step, optimizer=optimizer, **options)
            assert tuned.trial is not None and tuned.handle is None
            states = [optimizer.state[parameter] for parameter in model.parameters()]
            assert [float(state["step"]) for state in states] == [8.0] * len(states), name
            assert all(float(state["exp_avg"].abs().max()) > 0 for state in states), name
            results[name] = [parameter.flatten().tolist() for parameter in model.parameters()]
        return results

    ours, theirs = on_ranks(2, main)
    assert ours == theirs
    for name, weights in ours.items():  # overlap leaves the weights of the owners of shards, which are not rounded
        assert all(torch.tensor(each).bfloat16().tolist() != each for each in weights), name
