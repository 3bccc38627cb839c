"""Tuning pays for itself: it measures no more than what is at stake, remembers links, and says what it cost."""

from __future__ import annotations

import datetime
import itertools
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import made_up
import syncline
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.cluster.links import reshape
from syncline.ddp import reducer
from syncline.plan.choice import choice_of
from syncline.plan.make import make_plan
from syncline.plan.rungs import RUNGS
from syncline.predict import Schedule as PlannedStep
from syncline.predict import predict
from syncline.records.bucket_caps import filled
from syncline.records.network import Network
from syncline.tuning.choose import find_network, why_outdated
from syncline.tuning.network_cache import MAX_AGE, cache_folder, cached_path, recall, remember
from syncline.tuning.retuning import CHECK_STEPS, CHECKS, SHARE, Retuning, exposure_drift, steps_until_check
from syncline.tuning.settings import TuneSettings
from syncline.tuning.stakes import LEAST_PROBE_S, REPAID_STEPS, Stakes
from syncline.tuning.trials import Contest, Schedule, Times, Trial, means, repaid_after

TWO = ClusterSpec(hosts=1, per_host=(2,))
KINDS = ("all_reduce", "broadcast")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())], nn.Linear(32, 4))


def links() -> Network:
    """Return links of one host with two ranks, which are so slow that anything that is allowed pays."""
    network = made_up.network((0, 0), mbit=1.0, startup_s=1e-4)
    return msgspec.structs.replace(network, links=(made_up.link("local", 1.0), *network.links))


# --- what is at stake -------------------------------------------------------------------------------------------------


def test_nothing_is_probed_where_little_could_be_saved() -> None:
    small_share = Stakes(step_s=0.1, exposed_s=0.001).why_not_probe
    assert small_share is not None and "nothing was probed: a step of 100 ms waits 1.0 ms" in small_share
    short = Stakes(step_s=0.002, exposed_s=0.0005).why_not_probe
    assert short is not None and "repaid after 3,000 steps at the earliest" in short
    assert Stakes(step_s=0.0, exposed_s=0.0).why_not_probe is not None
    assert Stakes(step_s=0.1, exposed_s=0.05).why_not_probe is None


def test_a_probe_takes_a_share_of_what_can_be_saved() -> None:
    much, little = Stakes(step_s=1.0, exposed_s=0.5), Stakes(step_s=0.02, exposed_s=0.005)
    assert much.probe_s(15.0, lossy=True) == 15.0
    assert little.probe_s(15.0, lossy=True) == LEAST_PROBE_S
    middle = Stakes(step_s=0.2, exposed_s=0.05)
    assert middle.probe_s(15.0, lossy=True) == pytest.approx(0.1 * REPAID_STEPS * 0.05)
    # Without compression, an exchange that takes far longer than computation cannot be hidden.
    busy = Stakes(step_s=0.1, exposed_s=0.098)
    assert busy.probe_s(15.0, lossy=False) < 0.5 * busy.probe_s(15.0, lossy=True)
    # Where only buckets could be better, no training may end more than about 5 % later.
    steps = middle.steps_to_wait(15.0)
    assert middle.probe_s(15.0, lossy=False) < 0.05 * steps * middle.step_s
    assert 'quality="same"' in busy.hint and Stakes(step_s=0.1, exposed_s=0.01).hint == ""


def trial_of(plain_s: list[float], plan_s: list[float]) -> Trial:
    return Trial.between(Times.of(plain_s), Times.of(plan_s), len(plan_s))


def test_a_plan_wins_only_by_more_than_the_noise() -> None:
    steady = trial_of([0.100, 0.101, 0.099, 0.100] * 2, [0.090, 0.091, 0.089, 0.090] * 2)
    noisy = trial_of([0.100, 0.140, 0.070, 0.100] * 2, [0.090, 0.130, 0.060, 0.090] * 2)
    assert steady.won and steady.clear and steady.saved_s == pytest.approx(0.01)
    assert not noisy.won and not noisy.clear and noisy.saved_s == 0.0
    assert "within the noise" in noisy.describe() and "the plan stays" in steady.describe()
    assert "plain DDP 100.0 ms (99.8–100.2)" in steady.describe()
    period = trial_of([0.1] * 6, means([0.0, 0.0, 0.3] * 2, 3))
    assert period.plan_s == pytest.approx(0.1) and not period.won
    assert repaid_after(7.0, 0.1) == "Tuning took 7.0 s, and saves 100.0 ms per step: it is repaid after 70 steps."
    assert repaid_after(7.0, 0.0) == "Tuning took 7.0 s."
    assert Schedule.within(100.0, 0.1).counted == 15
    assert Schedule.on_live_steps(0.1, keeps=True).passes == 1


def contest_of(**times_s: float) -> Contest:
    """Return a contest in which plain DDP takes 100 ms, and each rung as long as given, give or take 1 %."""
    group, plain = dist.group.WORLD, made_up.profile()
    assert group is not None
    names = {rung.name.replace(" ", "_"): rung for rung in RUNGS}
    base = choice_of(make_plan(plain, made_up.network((0, 1), mbit=100.0, startup_s=1e-4)))
    choices = [
        msgspec.structs.replace(base, rung=names[name].name, lossless=names[name].quality == "exact", attachment=None)
        for name in times_s
    ]
    contest = Contest(group, choices)
    contest.note(None, [0.099, 0.1, 0.1, 0.101] * 2)
    for choice, step_s in zip(choices, times_s.values(), strict=True):
        contest.note(choice, [0.99 * step_s, step_s, step_s, 1.01 * step_s] * 2)
    return contest


def test_the_gentlest_contender_that_is_as_fast_as_the_fastest_stays(one_rank: None) -> None:
    near = contest_of(overlap=0.062, **{"8_bits": 0.052, "4_bits": 0.050})
    assert near.best.rung == "8 bits" and near.trial.won
    assert "4 bits (lossy) 50.0 ms" in near.trial.describe() and "overlap 62.0 ms" in near.trial.describe()
    far = contest_of(overlap=0.060, **{"8_bits": 0.055, "4_bits": 0.050})
    assert far.best.rung == "4 bits"
    # Plain DDP is the gentlest of all, so what is lossy must win by more than the tolerance.
    little = contest_of(**{"4_bits": 0.096})
    assert not little.trial.won and contest_of(overlap=0.096).trial.won


def test_a_contest_has_a_second_pass_unless_the_first_is_clear(one_rank: None) -> None:
    schedule = Schedule.on_live_steps(0.1, keeps=False)
    assert [turn and turn.rung for turn in contest_of(overlap=0.05).turns(schedule)] == [None, "overlap"]
    rungs = [turn and turn.rung for turn in contest_of(overlap=0.098).turns(schedule)]
    assert rungs == [None, "overlap", "overlap", None]


# --- remembered links -------------------------------------------------------------------------------------------------


def test_links_are_remembered_between_runs(tmp_path: Path) -> None:
    def main(rank: Rank) -> list[str]:
        os.environ["XDG_CACHE_HOME"] = str(tmp_path)
        rank.init_process_group()
        torch.set_num_threads(1)
        group, settings = dist.group.WORLD, TuneSettings()
        assert group is not None
        first = find_network(group, settings, 1.5)
        path = cached_path(group)
        assert path is not None and path.parent == cache_folder() and path.is_relative_to(tmp_path)
        said: list[str] = []
        assert find_network(group, settings, 1.5, log=said.append) == first
        assert recall(group, path, ("all_reduce", "all_to_all")) is not None  # two ranks on a host have levels
        assert recall(group, path, ("no such collective",)) is None

        dist.barrier()
        if rank.rank == 0:
            assert [entry.name for entry in path.parent.iterdir()] == [path.name]
            text = path.read_text()
            now = datetime.datetime.now(datetime.timezone.utc)
            bad = [text[: len(text) // 2], "", "[]", text.replace('"gloo"', '"glue')]
            for days in (MAX_AGE.days + 1, -1):
                date = (now - datetime.timedelta(days=days)).isoformat()
                bad.append(msgspec.json.encode(msgspec.structs.replace(first, date=date)).decode())
            bad.append(msgspec.json.encode(msgspec.structs.replace(first, date="yesterday")).decode())
        for number in range(7):
            if rank.rank == 0:
                path.write_text(bad[number])
            assert recall(group, path, KINDS) is None, number
        remember(group, path, first)
        assert recall(group, path, KINDS) == first
        remember(group, path, msgspec.structs.replace(first, collectives=first.collectives[:1]))
        assert recall(group, path, KINDS) == first  # a file with more collectives stays
        dist.barrier()
        again = find_network(group, settings, 1.5, why_outdated=lambda _: "they are slower", log=said.append)
        assert again != first and recall(group, path, KINDS) == again
        remember(group, Path("/proc/nowhere/network.json"), first)  # it is no error that it cannot be written
        assert recall(group, None, KINDS) is None
        return said

    (said, _) = launch(TWO, main, shaped=False)
    assert said[0].startswith("using the links that were probed at 20")
    assert re.fullmatch(r"the links that were probed at 20\S+ are not used: they are slower", said[1])
    assert said[2].startswith("probing the links for about 1.5 s")


def test_remembered_links_that_mispredict_plain_ddp_are_outdated(one_rank: None) -> None:
    model, profile, network = DDP(net()), made_up.profile(), made_up.network((0, 1), mbit=100.0, startup_s=1e-4)
    step_s = predict(
        profile, network, PlannedStep("ddp", filled(profile.gradients, reducer.own_caps(model)))
    ).iteration_s
    assert why_outdated(model, profile, step_s * 1.2, network) is None
    assert re.fullmatch(
        r"plain DDP takes \d+ ms per step, and they predict \d+ ms",
        why_outdated(model, profile, step_s / 2, network) or "",
    )


def test_emulated_hosts_are_not_remembered() -> None:
    def main(rank: Rank) -> None:
        rank.init_process_group()
        assert dist.group.WORLD is not None
        assert cached_path(dist.group.WORLD) is None

    launch(ClusterSpec(hosts=2), main)


# --- tune and follow --------------------------------------------------------------------------------------------------


def test_a_model_that_hardly_waits_is_left_alone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.tuning.stakes.REPAID_STEPS", 1)  # a busy machine makes even tiny models wait

    def main(rank: Rank) -> list[str]:
        rank.init_process_group()
        torch.set_num_threads(1)
        inputs = torch.randn(4, 4)
        tuned = syncline.tune(DDP(nn.Linear(4, 4)), lambda model: model(inputs).sum().backward(), quiet=True)
        assert tuned.handle is None and tuned.trial is None and tuned.network is None and tuned.plan.nothing
        followed = DDP(nn.Linear(4, 4))
        following = syncline.follow(followed, quiet=True)
        for _ in range(15):
            followed(inputs).sum().backward()
        assert following.done and following.network is None and following.seconds < 1.0
        return [tuned.describe(), following.describe()]

    for texts in launch(TWO, main, shaped=False):
        for text in texts:
            assert text.startswith("Plain DDP stays, and nothing was probed: a step of ")
            assert re.search(r"Tuning took \d+\.\d s\.$", text)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()


def test_a_compiled_model_is_tuned_without_changing_its_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(rank: Rank) -> list[str]:
        rank.init_process_group()
        torch.set_num_threads(1)
        texts = []
        for ratio in (0.0, float("inf")):
            monkeypatch.setattr("syncline.tuning.trials._MAX_RATIO", ratio)
            model = DDP(torch.compile(net(), backend="eager"))
            config, inside = reducer.own(model), model.reducer
            following = syncline.follow(model, network=links(), quality="same", quiet=True)
            train(model, torch.optim.SGD(model.parameters(), lr=0.01), 60)
            assert following.done and following.trial is not None, following.describe()
            assert model.reducer is inside and reducer.own(model) is config
            assert (following.handle is not None) == (ratio > 0)
            following.close()
            texts.append(following.describe())
        return texts

    (lost, kept), _ = launch(TWO, main, shaped=False)
    for text in (lost, kept):
        assert "DDP's buckets stay as they are, because a compiled model would have to be compiled again." in text
    assert "plain DDP stays" in lost and "the choice stays" in kept


def test_live_tuning_may_exchange_updates_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.plan.ladder.UPDATES_WARMUP_STEPS", 12)

    def main(rank: Rank) -> list[Any]:
        rank.init_process_group()
        torch.set_num_threads(1)
        ended: list[Any] = []
        for ratio in (float("inf"), 0.0):
            monkeypatch.setattr("syncline.tuning.trials._MAX_RATIO", ratio)
            model = DDP(net())
            optimizer = torch.optim.AdamW(model.parameters())
            following = syncline.follow(model, network=links(), quality="close", optimizer=optimizer, quiet=True)
            train(model, optimizer, 35)  # 13 are measured, and 18 are plain DDP's turn
            assert following.handle is not None and not following.done
            train(model, optimizer, 55)
            assert following.done, following.describe()
            record = following.record()
            ended.append([record.way, following.handle is not None, following.describe()])
            counts = {pace.way: pace.steps for pace in record.paces}
            assert record.steps == 90 and sum(counts.values()) == 90
            assert counts["the warm-up"] == 12
            following.close()
        return ended

    (kept, lost), _ = launch(TWO, main, shaped=False)
    assert kept[0].startswith("updates by ") and kept[1]
    assert kept[2].startswith("Lossy: updates by ") and "the choice stays" in kept[2]
    assert lost[0] == "plain DDP" and not lost[1] and "plain DDP stays" in lost[2]


# --- tuning again -----------------------------------------------------------------------------------------------------


def test_only_a_lasting_change_causes_another_tuning_and_a_flickering_link_does_not() -> None:
    flickering = Retuning(began_s=0.0, cost_s=1.0)
    assert not any(flickering.due(check % 2 == 0, now_s=1e9) for check in range(100))
    lasting = Retuning(began_s=0.0, cost_s=10.0)
    assert [lasting.due(True, now_s=1e9) for _ in range(CHECKS)] == [False] * (CHECKS - 1) + [True]

    # However the link behaves, tunings take at most the stated share of the time, and become rarer.
    restless, tunings = Retuning(began_s=0.0, cost_s=10.0), []
    for check in range(1, 2001):
        now_s = 20.0 * check
        if restless.due(True, now_s):
            restless.tuned(10.0)
            tunings.append(check)
            assert restless.spent_s <= SHARE * now_s
    gaps = [after - before for before, after in itertools.pairwise(tunings)]
    assert len(tunings) > 2 and all(after >= before for before, after in itertools.pairwise(gaps))


def test_steps_that_wait_longer_than_after_tuning_are_a_reason_to_tune_again() -> None:
    before = Stakes(step_s=0.1, exposed_s=0.02)
    assert exposure_drift(before, Stakes(step_s=0.105, exposed_s=0.025)) is None
    assert exposure_drift(before, Stakes(step_s=0.16, exposed_s=0.08)) == (
        "the model waits 80.0 ms per step, and 20.0 ms after it was tuned"
    )
    assert steps_until_check(0.001) == CHECK_STEPS and steps_until_check(0.5) == 10 == steps_until_check(100.0)


def test_changed_links_are_noticed_and_all_ranks_tune_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.tuning.trials._MAX_RATIO", float("inf"))
    monkeypatch.setattr("syncline.tuning.retuning.CHECK_STEPS", 15)
    monkeypatch.setattr("syncline.tuning.retuning.SHARE", 1e9)
    monkeypatch.setattr("syncline.ddp.engine._DRIFT_FACTOR", -1e9)  # every exchange takes longer than planned

    def main(rank: Rank) -> list[Any]:
        rank.init_process_group()
        torch.set_num_threads(1)
        model = DDP(net())
        following = syncline.follow(model, network=links(), allow=("bf16",), retune="auto", cache=False, quiet=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        while not following.done:
            train(model, optimizer, 1)
        first, network = following.describe(), following.network
        train(model, optimizer, 50)
        while not following.done:
            train(model, optimizer, 1)
        assert following.network is not network  # it was probed again, because the links have changed
        assert following.handle is None or following.handle.plan is not None
        following.close()
        return [first, following.describe(), following.record().steps]

    ours, theirs = launch(TWO, main, shaped=False)
    assert ours == theirs
    assert ours[0].startswith("Lossy: ") and "the plan stays" in ours[0]
    assert ours[1].startswith("Tuned again, after a change of the links. ")


@pytest.mark.waits
def test_a_link_that_is_cut_to_a_quarter_is_tuned_for_again_and_one_that_flickers_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("syncline.tuning.retuning.SHARE", 1.0)  # this training is too short for 2 % to pay for anything
    monkeypatch.setattr("syncline.tuning.retuning.CHECK_S", 1.0)
    mbit = 1_000_000

    def main(rank: Rank) -> dict[str, Any]:
        rank.init_process_group()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = DDP(nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        following = syncline.follow(model, quality="same", retune="auto", probe_s=1.5, cache=False, quiet=True)
        inputs, targets = torch.randn(2, 16, 256, generator=torch.Generator().manual_seed(1))
        losses: list[float] = []

        def trained(until: Callable[[], bool], most: int = 600) -> None:
            for _ in range(most):
                optimizer.zero_grad()
                loss = (model(inputs) - targets).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
                if until():
                    return

        trained(lambda: following.done)
        links = []
        for turn in range(16):
            reshape((200 if turn % 2 else 50) * mbit)
            trained(lambda: False, most=9 if turn % 2 else 3)
            links.append(following.network)
        reshape(200 * mbit)
        trained(lambda: False, most=60)
        tunings = len({id(network) for network in [*links, following.network]})
        first, began_s = following.network, time.monotonic()
        reshape(50 * mbit)
        trained(lambda: not following.done)
        trained(lambda: following.done)
        took_s = time.monotonic() - began_s
        trained(lambda: False, most=5)
        following.close()
        rates = [network.link("host").bytes_per_s for network in (first, following.network)]
        return {"tunings": tunings, "s": took_s, "said": following.describe(), "rates": rates, "losses": losses}

    ours, theirs = launch(ClusterSpec(hosts=2, rate_bps=200 * mbit), main, deadline_s=240)
    for answer in (ours, theirs):
        assert answer["tunings"] == 1, "a flickering link was tuned for"
        assert answer["s"] < 60 and answer["said"] == ours["said"]
        assert answer["said"].startswith("Tuned again, after a change of the links. ")
        assert answer["rates"][1] < 0.5 * answer["rates"][0]
        assert answer["losses"][-1] < 0.99 * answer["losses"][0]
        assert all(math.isfinite(loss) for loss in answer["losses"])
