"""`syncline predict`: the first screen names the cause and the remedy; mistakes get one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import made_up
from made_up import CASES, RICH_NETWORK
from syncline.cli import app
from syncline.cli.predict import PredictResult
from syncline.files import read_json
from syncline.measure.assumed_network import assumed_network
from syncline.predict import Schedule, predict
from syncline.predict.diagnosis import CAUSES
from syncline.records.profile import load_profile

runner = CliRunner()
SMALL = made_up.profile([1000] * 4)


def run(*arguments: str | Path) -> Result:
    return runner.invoke(app, ["predict", *map(str, arguments)])


def words(answer: Result) -> str:
    """Return the output without line breaks."""
    return " ".join(answer.stdout.split())


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str, str]:
    """Return the options for a small model and a small cluster."""
    SMALL.save(tmp_path / "profile.json")
    RICH_NETWORK.save(tmp_path / "network.json")
    return "--profile", str(tmp_path / "profile.json"), "--network", str(tmp_path / "network.json")


REMEDIES = {
    "startups": "(bucket_cap_mb)",
    "rack": "the links between racks 10 times as fast",
    "straggler": "all ranks as fast as a typical one",
    "host": "the hosts' links 10 times as fast",
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_screen_names_the_cause_and_the_remedy(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.profile.save(tmp_path / "profile.json")
    case.network.save(tmp_path / "network.json")
    answer = run(
        *("--profile", tmp_path / "profile.json", "--network", tmp_path / "network.json"),
        *("--plan", case.plan, "--hosts", "4", "--json", tmp_path / "result.json"),
    )
    assert answer.exit_code == 0, answer.output
    assert f"to {CAUSES[case.culprit]}: " in words(answer)
    assert REMEDIES[case.culprit] in words(answer)
    assert len(answer.stdout.splitlines()) <= 50
    assert all(len(line) <= 80 for line in answer.stdout.splitlines())
    result = read_json(tmp_path / "result.json", PredictResult)
    assert result.culprit == case.culprit
    assert next(iter(result.remedies)) == case.remedy
    assert result.measured_network


def test_a_step_without_losses_is_reported_as_such(tmp_path: Path) -> None:
    SMALL.save(tmp_path / "profile.json")
    made_up.network(mbit=100_000.0, startup_s=1e-6).save(tmp_path / "network.json")
    answer = run("--profile", tmp_path / "profile.json", "--network", tmp_path / "network.json", "--hosts", "4")
    assert "hardly anything is lost: leave it alone." in words(answer)
    assert "A step with one thing changed" not in answer.stdout


def test_rows_are_every_plan_rate_and_number_of_hosts_and_read_back(files: tuple[str, ...], tmp_path: Path) -> None:
    answer = run(
        *files,
        "--hosts",
        "3,8,8",
        "--rate",
        "1gbit,10gbit",
        "--plan",
        "ddp",
        "--plan",
        "bf16",
        "--json",
        tmp_path / "r.json",
    )
    assert answer.exit_code == 0, answer.output
    result = read_json(tmp_path / "r.json", PredictResult)
    expected = [(p, r, h) for p in ("ddp", "bf16,lanes=2") for r in (10**9, 10**10) for h in (3, 8)]
    assert [(row.plan, row.rate_bps, row.hosts) for row in result.rows] == expected
    assert result.model == "made up"
    for row in result.rows:
        assert row.low_ms <= row.iteration_ms <= row.high_ms
        assert sum(row.lost.by_cause.values()) * 1e3 == pytest.approx(row.iteration_ms - row.compute_ms, abs=1e-6)
    assert all(column in answer.stdout for column in ("plan", "links", "hosts", "per step", "scaling"))


def test_a_row_is_what_predict_says(files: tuple[str, ...], tmp_path: Path) -> None:
    assert run(*files, "--plan", "dense,lanes=2", "--hosts", "3", "--json", tmp_path / "r.json").exit_code == 0
    (row,) = read_json(tmp_path / "r.json", PredictResult).rows
    direct = predict(SMALL, RICH_NETWORK, Schedule.of(SMALL, "dense", lanes=2))
    assert row.iteration_ms == pytest.approx(direct.iteration_s * 1e3)
    assert (row.sent_bytes, row.rate_bps, row.ranks) == (direct.sent_bytes, None, 4)


def test_without_numbers_of_hosts_the_measured_one_comes_first(files: tuple[str, ...], tmp_path: Path) -> None:
    assert run(*files, "--json", tmp_path / "r.json").exit_code == 0
    hosts = [row.hosts for row in read_json(tmp_path / "r.json", PredictResult).rows]
    assert hosts[0] == 3 and hosts[1:] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def test_without_a_network_links_are_assumed_and_the_output_says_so(tmp_path: Path) -> None:
    answer = run(
        "--profile", "cnn-cpu", "--rate", "1gbit", "--hosts", "4", "--per-host", "2", "--json", tmp_path / "r.json"
    )
    assert answer.exit_code == 0, answer.output
    assert "Links are not measured but assumed" in words(answer)
    assert "cnn, ddp on 4 hosts × 2 ranks, 1gbit links, nccl" in words(answer)
    result = read_json(tmp_path / "r.json", PredictResult)
    assert not result.measured_network
    profile = load_profile("cnn-cpu")
    direct = predict(profile, assumed_network(4, 2, 10**9), Schedule.of(profile))
    assert result.rows[0].iteration_ms == pytest.approx(direct.iteration_s * 1e3)


def test_one_rank_has_no_scaling(tmp_path: Path) -> None:
    answer = run("--profile", "cnn-cpu", "--rate", "1gbit", "--hosts", "1", "--json", tmp_path / "r.json")
    assert answer.exit_code == 0, answer.output
    assert "One rank exchanges nothing" in words(answer)
    (row,) = read_json(tmp_path / "r.json", PredictResult).rows
    assert (row.ranks, row.sent_bytes, row.scaling) == (1, 0, pytest.approx(1.0))


def test_a_step_without_time_or_bytes_has_an_answer(tmp_path: Path) -> None:
    made_up.profile([0], forward_s=0.0, backward_s=0.0).save(tmp_path / "profile.json")
    answer = run("--profile", tmp_path / "profile.json", "--rate", "1gbit", "--hosts", "1,2")
    assert answer.exit_code == 0, answer.output


def test_the_profile_can_be_scaled(files: tuple[str, ...], tmp_path: Path) -> None:
    assert run(*files, "--scale", "10,1", "--hosts", "3", "--json", tmp_path / "r.json").exit_code == 0
    (row,) = read_json(tmp_path / "r.json", PredictResult).rows
    assert row.compute_ms == pytest.approx(10 * 60.0)


def test_the_racks_links_can_be_faster(files: tuple[str, ...], tmp_path: Path) -> None:
    steps_ms = []
    for rate in ("1mbit", "10gbit"):
        assert run(*files, "--trunk-rate", rate, "--hosts", "3", "--json", tmp_path / "r.json").exit_code == 0
        steps_ms.append(read_json(tmp_path / "r.json", PredictResult).rows[0].iteration_ms)
    assert steps_ms[0] > steps_ms[1]


def test_a_network_of_one_host_predicts_only_that_host(tmp_path: Path) -> None:
    inside = msgspec.structs.replace(made_up.network((0, 0)), links=(made_up.link("local", 9000.0),))
    inside.save(tmp_path / "network.json")
    arguments = ("--profile", "cnn-cpu", "--network", tmp_path / "network.json")
    answer = run(*arguments, "--json", tmp_path / "r.json")
    assert answer.exit_code == 0, answer.output
    assert [row.hosts for row in read_json(tmp_path / "r.json", PredictResult).rows] == [1]
    assert_refused(run(*arguments, "--hosts", "2"), "nothing is known of links between hosts: probe at least two")
    assert_refused(run(*arguments, "--rate", "1gbit"), "the network has no host links: it has local")


def assert_refused(answer: Result, *says: str) -> None:
    assert answer.exit_code == 2, answer.output
    assert answer.stdout == ""
    assert len(answer.stderr.strip().splitlines()) == 1
    for word in says:
        assert word in answer.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--hosts", "2,x"], "--hosts '2,x': must be whole numbers, as in 2,4,8,16"),
        (["--hosts", ""], "--hosts '': must be whole numbers"),
        (["--hosts", "0"], "--hosts 0: must be 1 to 65536"),
        (["--hosts", "-1"], "--hosts -1: must be 1 to 65536"),
        (["--hosts", "99999999"], "--hosts 99999999: must be 1 to 65536"),
        (["--hosts", "9" * 5000], "must be whole numbers, as in 2,4,8,16"),
        (["--rate", "fast"], "rate 'fast' is not a rate"),
        (["--rate", "1gbit,"], "rate '' is not a rate"),
        (["--rate", "10"], "rate '10' has no unit: add one, as in 10gbit"),
        (["--rate", "1bit"], "under 100kbit, the slowest link that can be predicted"),
        (["--trunk-rate", "fast"], "rate 'fast' is not a rate"),
        (["--plan", "foo"], "no exchange is called 'foo'; known: ddp, dense"),
        (["--plan", "dense,lanes=99"], "lanes is 99: there may be 1 to 16"),
        (["--plan", "ddp,lanes=2"], "plain DDP has one lane"),
        (["--plan", "dense,bucket_mb=0"], "bucket_mb is 0: a bucket needs a positive size"),
        (["--plan", "ddp", "--plan", "dense;lanes=2"], "no exchange is called 'dense;lanes=2'"),
        (["--scale", "0,1"], "write two positive numbers"),
        (["--per-host", "2"], "--per-host cannot be combined with --network, which has its own ranks per host"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--profile", "nope"], "nope: is neither a file nor a shipped profile"),
        (["--profile", "nope.json"], "nope.json: cannot be read: No such file"),
        (["--network", "nope.json"], "nope.json: cannot be read: No such file"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_2(files: tuple[str, ...], options: list[str], says: str) -> None:
    assert_refused(run(*files, *options), says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "without --network, the rate of the hosts' links is needed: add --rate"),
        (["--rate", "1gbit", "--trunk-rate", "1gbit"], "--trunk-rate needs a --network that has racks"),
        (
            ["--rate", "1gbit", "--per-host", "1000000"],
            "--per-host 1000000: with 1024 hosts, that is more than 1048576 ranks",
        ),
    ],
)
def test_a_mistake_without_a_network_gets_one_line_and_exit_2(options: list[str], says: str) -> None:
    assert_refused(run("--profile", "cnn-cpu", *options), says)


def test_a_trunk_rate_is_refused_without_racks(tmp_path: Path) -> None:
    made_up.network().save(tmp_path / "network.json")
    answer = run("--profile", "cnn-cpu", "--network", tmp_path / "network.json", "--trunk-rate", "1gbit")
    assert_refused(answer, "the network has no rack links: it has host")


def test_a_network_without_measurements_is_refused(files: tuple[str, ...]) -> None:
    msgspec.structs.replace(RICH_NETWORK, collectives=()).save(files[3])
    assert_refused(run(*files), f"{files[3]}: has no measured collectives: probe again")


bad_files = [
    ("", "is not JSON (the file is empty)"),
    ("{", "is not complete JSON"),
    ("[]", "expected object, got array"),
    ('{"schema": 2}', "schema: is 2, and this release reads up to 1"),
    ('{"schema": 1, "schema": 1}', "schema: appears more than once"),
    ('{"schema": 1, "colour": "red"}', ": is"),
    ('{"schema": 1, "x": NaN}', "x: must be a finite number"),
    ("[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("text", "says"), bad_files)
@pytest.mark.parametrize("place", [1, 3], ids=["profile", "network"])
def test_a_bad_file_gets_one_line_that_names_it(files: tuple[str, ...], place: int, text: str, says: str) -> None:
    Path(files[place]).write_text(text)
    assert_refused(run(*files), f"syncline predict: {files[place]}: ", says)


@given(place=st.sampled_from([1, 3]), start=st.integers(0, 10**6), length=st.integers(0, 6), put=st.binary(max_size=6))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_to_a_file_is_an_answer_or_one_line(
    files: tuple[str, ...], place: int, start: int, length: int, put: bytes
) -> None:
    SMALL.save(files[1])
    RICH_NETWORK.save(files[3])
    path = Path(files[place])
    data = path.read_bytes()
    start %= len(data)
    path.write_bytes(data[:start] + put + data[start + length :])
    answer = run(*files, "--hosts", "3")
    assert answer.exception is None or isinstance(answer.exception, SystemExit), answer.exception
    if answer.exit_code != 0:
        assert_refused(answer, str(path))


def edited(path: str, value: Any, *keys: str | int) -> None:
    tree = json.loads(Path(path).read_text())
    place = tree
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    Path(path).write_text(json.dumps(tree))


def test_links_that_carry_next_to_nothing_have_an_answer(files: tuple[str, ...]) -> None:
    for field in ("bytes_per_s", "low_bytes_per_s", "high_bytes_per_s"):
        edited(files[3], 1e-3, "links", 1, field)
    answer = run(*files, "--hosts", "3")
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize("value", [0, 1, 10**15, 1e250])
@pytest.mark.parametrize(
    "keys", [("links", 1, "burst_bytes"), ("collectives", 0, "startup_high_s"), ("collectives", 0, "serial_s"),
             ("collectives", 0, "own_s_per_byte"), ("collectives", 0, "load"), ("in_flight",)]
)  # fmt: skip
def test_extreme_figures_come_to_an_answer_or_one_line(
    files: tuple[str, ...], keys: tuple[str | int, ...], value: float
) -> None:
    edited(files[3], value, *keys)
    answer = run(*files, "--hosts", "3")
    if answer.exit_code != 0:
        assert_refused(answer, files[3], str(keys[-1]))
