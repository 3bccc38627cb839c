"""The diagnosis names the cause and the best remedy, in cases staged to lose their time to one cause."""

from __future__ import annotations

import functools

import msgspec
import pytest

import made_up
from made_up import CASES, Case
from syncline.predict import Losses, Schedule, predict
from syncline.predict.diagnosis import CAUSES, Diagnosis, diagnose, lost_to, shares_hint
from syncline.records.profile import Buffers, Overheads, Spread
from syncline.units import milliseconds_text


@functools.cache
def diagnosed(name: str) -> Diagnosis:
    case = CASES[name]
    return diagnose(case.profile, case.network, Schedule.parse(case.profile, case.plan))


@pytest.fixture(scope="module", params=CASES)
def staged(request: pytest.FixtureRequest) -> tuple[Case, Diagnosis]:
    return CASES[request.param], diagnosed(request.param)


def test_a_staged_cause_is_named(staged: tuple[Case, Diagnosis]) -> None:
    case, found = staged
    assert found.culprit == case.culprit
    assert lost_to(found.prediction.losses)[case.culprit] > 0.5 * sum(found.prediction.losses.by_cause.values())


def test_the_best_remedy_is_against_the_cause(staged: tuple[Case, Diagnosis]) -> None:
    case, found = staged
    assert found.remedies[0].name == case.remedy


def test_remedies_save_time_and_the_best_is_first(staged: tuple[Case, Diagnosis]) -> None:
    _, found = staged
    order = [(remedy.last, remedy.prediction.iteration_s) for remedy in found.remedies]
    assert order == sorted(order)
    assert all(time < 0.98 * found.prediction.iteration_s for _, time in order)


def test_what_changes_how_a_model_trains_is_named_last_and_as_lossy(staged: tuple[Case, Diagnosis]) -> None:
    _, found = staged
    for remedy in found.remedies:
        assert remedy.last == any(word in remedy.name for word in ("oktopk", "int8", "int4", "int3"))
        assert remedy.lossy or not remedy.last
        assert remedy.name not in ("topk-allgather", "topk-chunks")


def test_a_remedy_is_worth_what_trying_it_predicts() -> None:
    case = CASES["400 tiny tensors, one by one"]
    best = diagnosed("400 tiny tensors, one by one").remedies[0]
    tried = predict(case.profile, case.network, Schedule.of(case.profile, bucket_mb=best.prediction.schedule.bucket_mb))
    assert tried.iteration_s == best.prediction.iteration_s
    assert tried.schedule.bucket_mb is not None and tried.schedule.bucket_mb > 0.1
    assert "bucket_cap_mb" in best.what


def test_tiny_tensors_are_counted() -> None:
    why = diagnosed("400 tiny tensors, one by one").why
    assert "400 buckets of 2 kB" in why and "1 ms" in why


def test_the_slow_rank_is_named() -> None:
    assert diagnosed("one slow rank").why == "rank 2 computes for 90.0 ms, a typical rank for 60.0 ms"


def test_the_slow_links_rate_is_named() -> None:
    assert "200 Mbit/s" in diagnosed("a slow trunk between two racks").why
    assert "100 Mbit/s" in diagnosed("slow links").why


def test_a_step_that_loses_little_gets_no_remedies() -> None:
    profile = made_up.profile([10_000] * 10)
    found = diagnose(profile, made_up.network(mbit=100_000.0, startup_s=1e-5), Schedule.of(profile))
    assert (found.culprit, found.remedies) == (None, ())
    assert "leave it alone" in found.why


def test_one_rank_has_nothing_to_lose() -> None:
    profile = made_up.profile()
    assert diagnose(profile, made_up.network().with_hosts(1), Schedule.of(profile)).culprit is None


def test_one_bucket_for_everything_is_sent_too_late() -> None:
    profile = made_up.profile([100_000] * 10)
    found = diagnose(profile, made_up.network(mbit=2000.0, startup_s=1e-5), Schedule.of(profile, bucket_mb=400))
    assert found.culprit == "tail"
    assert "the only bucket holds 4 MB" in found.why
    assert found.remedies[0].name == "buckets"


def test_jitter_is_distinguished_from_one_slow_rank() -> None:
    profile = msgspec.structs.replace(made_up.profile([10_000] * 10), jitter_s=0.03)
    found = diagnose(profile, made_up.network(mbit=10_000.0), Schedule.of(profile))
    assert found.culprit == "straggler"
    assert found.why == "in each step some rank is late, by 30.0 ms (median)"


def test_batches_by_speed_are_a_remedy_against_a_slow_rank() -> None:
    case, found = CASES["one slow rank"], diagnosed("one slow rank")
    remedy = next(remedy for remedy in found.remedies if remedy.name == "shares")
    assert "syncline.shares" in remedy.what and not remedy.lossy
    forward_backward_s = case.profile.forward_s + case.profile.backward_s
    update_s = 1.5 * case.profile.update_s  # an optimizer's step does not depend on the batch
    balanced_s = 4 / (3 + 1 / 1.5) * forward_backward_s + update_s
    assert remedy.prediction.profile.step_s == pytest.approx(balanced_s)
    saved_s = found.prediction.iteration_s - remedy.prediction.iteration_s
    assert saved_s == pytest.approx(0.09 - balanced_s, rel=0.15)
    hint = shares_hint(case.profile)
    assert "Rank 2 computes for 90.0 ms per step, a typical rank for 60.0 ms" in hint
    assert f"(syncline.shares) would save about {milliseconds_text(0.09 - balanced_s)} (predicted)." in hint
    assert shares_hint(made_up.with_slow_rank(1, 1.02)) == shares_hint(made_up.profile()) == ""
    uneven = msgspec.structs.replace(case.profile, spread=Spread(low_s=0.05, high_s=0.1))
    assert not shares_hint(uneven), "the steps of a typical rank vary as much"


def test_buffers_and_copies_are_causes_too() -> None:
    plain = made_up.profile([10_000] * 10)
    network = made_up.network(mbit=1000.0)
    buffers = msgspec.structs.replace(plain, buffers=(Buffers(dtype="float32", bytes=8_000_000),))
    overheads = Overheads(copy_in_s_per_byte=1e-7, copy_out_s_per_byte=1e-7, hook_s=0.001, work={})
    copies = msgspec.structs.replace(plain, overheads=overheads)
    assert diagnose(buffers, network, Schedule.of(plain)).culprit == "buffers"
    assert diagnose(copies, network, Schedule.of(plain)).culprit == "overhead"


def test_slow_software_is_distinguished_from_a_slow_link() -> None:
    profile = made_up.profile([100_000] * 10)
    quick = made_up.network(mbit=100_000.0, startup_s=1e-5)
    slow = tuple(msgspec.structs.replace(entry, own_s_per_byte=1e-7) for entry in quick.collectives)
    found = diagnose(profile, msgspec.structs.replace(quick, collectives=slow), Schedule.of(profile))
    assert found.culprit == "software"


def test_lossy_and_hardware_remedies_are_marked() -> None:
    found = diagnosed("slow links")
    by_name = {remedy.name: remedy for remedy in found.remedies}
    assert by_name["bf16"].lossy and not by_name["bf16"].hardware
    assert by_name["host × 2.5"].hardware and not by_name["host × 2.5"].lossy


def test_every_loss_has_a_description() -> None:
    everything = {field: 1.0 for field in Losses.__struct_fields__ if field != "links_s"}
    links = {"host": 1.0, "rack": 1.0, "local": 1.0}
    assert set(lost_to(Losses(**everything, links_s=links))) == set(CAUSES)
