"""The bench: its counted and predicted bytes, its times, its result file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from syncline.bench import demo
from syncline.bench.methods import HOOKS, METHODS, Wrapping, check_methods
from syncline.bench.rounds import Quartiles, combine
from syncline.bench.run import Workload, run_bench
from syncline.bench.sharded import SHARDED
from syncline.cluster import ClusterSpec, Rank, launch, why_not_shaped
from syncline.errors import UsageError
from syncline.files import read_json, write_json
from syncline.measure.assumed_network import assumed_network
from syncline.models.data import library_text
from syncline.records.bench_result import BenchResult, HeldOut
from syncline.records.profile import load_profile

needs_links = pytest.mark.skipif(why_not_shaped() is not None, reason=str(why_not_shaped()))


@pytest.fixture(scope="module")
def result() -> BenchResult:
    spec = ClusterSpec(hosts=3, rate_bps=1_000_000_000)
    return run_bench(spec, Workload("mlp", 4), list(METHODS), rounds=2, probe_s=2.0)


def test_there_is_a_row_for_every_method_in_the_order_asked(result: BenchResult) -> None:
    assert [row.method for row in result.rows] == list(METHODS)
    for row in result.rows:
        assert 0 < row.step_ms_low <= row.step_ms <= row.step_ms_high


def test_counted_bytes_are_predicted_bytes(result: BenchResult) -> None:
    for row in result.rows:
        assert row.sent_bytes == row.predicted_sent_bytes, row.method


def test_all_but_hooks_are_predicted_and_none_below_its_computation(result: BenchResult) -> None:
    predicted = {row.method: row.predicted_ms for row in result.rows}
    assert all(predicted.pop(method) is None for method in HOOKS)
    floor = predicted.pop("nosync")
    assert floor is not None and floor > 0
    assert result.sharded_profile is not None and result.sharded_profile.sharding is not None
    for method in SHARDED:
        milliseconds = predicted.pop(method)
        assert milliseconds is not None and milliseconds > 0.9e3 * result.sharded_profile.forward_s, method
    for method, milliseconds in predicted.items():
        assert milliseconds is not None and milliseconds > 0.9 * floor, method


def test_a_network_of_another_size_is_refused_before_anything_runs() -> None:
    network = assumed_network(4, 1, 1_000_000_000, "gloo")
    with pytest.raises(UsageError, match="the network has 4 ranks, but the bench has 2"):
        run_bench(ClusterSpec(hosts=2), Workload("mlp", 4), ["ddp"], rounds=1, network=network)


def test_sharded_models_need_a_real_model_and_equal_hosts() -> None:
    spec, recorded = ClusterSpec(hosts=2), Workload("cnn", 1, load_profile("cnn-cpu"))
    with pytest.raises(UsageError, match="hsdp shards a real model"):
        run_bench(spec, recorded, ["hsdp"], rounds=1)
    for other in (ClusterSpec(hosts=2, per_host=(1, 2)), ClusterSpec(hosts=2, per_host=(2, 2), rank_order="scrambled")):
        with pytest.raises(UsageError, match=r"fsdp\+int4 needs"):
            run_bench(other, Workload("mlp", 4), ["fsdp+int4"], rounds=1)


@needs_links
def test_replicas_send_between_hosts_what_is_predicted() -> None:
    spec = ClusterSpec(hosts=2, per_host=(2, 2), rate_bps=1_000_000_000)
    result = run_bench(spec, Workload("mlp", 4), ["hsdp", "hsdp+int4", "hsdp+local-15"], rounds=2, probe_s=0)
    rows = {row.method: row for row in result.rows}
    for row in result.rows:
        assert row.sent_bytes == row.predicted_sent_bytes, row.method
        assert row.wire_bytes is not None and row.sent_bytes is not None
        assert 2 * row.sent_bytes <= row.wire_bytes < 2 * row.sent_bytes * 1.1 + 5000, row.method  # two ranks per host
    dense = rows["hsdp"].sent_bytes or 0
    assert dense > 7.5 * (rows["hsdp+int4"].sent_bytes or 0)
    assert dense > 50 * (rows["hsdp+local-15"].sent_bytes or 0)


def test_a_network_with_other_links_is_refused_before_anything_runs() -> None:
    network = assumed_network(2, 1, 1_000_000_000, "gloo")
    with pytest.raises(UsageError, match="the network's links are 1gbit, but the bench's are 50mbit"):
        run_bench(ClusterSpec(hosts=2, rate_bps=50_000_000), Workload("mlp", 4), ["ddp"], rounds=1, network=network)


@needs_links
def test_counted_bytes_are_what_the_interfaces_saw(result: BenchResult) -> None:
    counted = [row for row in result.rows if row.sent_bytes]
    assert {"dense", "bf16", "fp16"} <= {row.method for row in counted}
    for row in counted:
        # The model has no buffers, so only gradients are sent, with headers, acknowledgements and a barrier.
        # Sparse exchanges send many small messages, each with its own headers.
        others = 10_000 if row.sent_bytes > 200_000 else 25_000
        assert row.sent_bytes <= row.wire_bytes <= 1.05 * row.sent_bytes + others, row


def test_powersgd_reports_the_rank_that_won(result: BenchResult) -> None:
    row = next(row for row in result.rows if row.method == "powersgd")
    assert row.setting.removesuffix(" batched") in ("rank 1", "rank 2", "rank 4")


def test_the_file_has_the_documented_keys_and_is_read_back(result: BenchResult, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    write_json(path, result)
    tree = json.loads(path.read_text())
    assert tree["schema"] == 1
    assert {"hosts", "per_host", "rate_bps", "device", "emulated"} <= set(tree["cluster"])
    assert {"name", "parameters", "gradient_bytes"} <= set(tree["model"])
    documented = {"method", "step_ms", "step_ms_low", "step_ms_high"}
    documented |= {"sent_bytes", "predicted_ms", "predicted_sent_bytes"}
    assert all(documented <= set(row) for row in tree["rows"])
    assert read_json(path, BenchResult) == result


def test_a_replayed_profile_takes_at_least_its_recorded_time() -> None:
    profile = load_profile("cnn-cpu")
    result = run_bench(ClusterSpec(hosts=2), Workload("cnn", 1, profile), ["nosync", "dense"], rounds=2, probe_s=0)
    assert [row.predicted_ms for row in result.rows] == [None, None]
    assert result.model.gradient_bytes == profile.gradient_bytes
    for row in result.rows:
        assert row.step_ms >= (profile.forward_s + profile.backward_s) * 1000


def test_ratios_are_paired_round_by_round() -> None:
    # Round 2 is slow for both: medians of times alone would call b 1.5 times slower.
    a = [[0.0, 1.0, 0, 0], [0.0, 10.0, 0, 0], [0.0, 2.0, 0, 0]]
    b = [[0.0, 1.1, 0, 0], [0.0, 11.0, 0, 0], [0.0, 2.2, 0, 0]]
    turns = combine([{"a": a, "b": b}])
    assert turns["b"].ratio_to(turns["a"]).median == pytest.approx(1.1)


def test_a_round_lasts_from_the_last_start_to_the_last_end() -> None:
    turns = combine([{"a": [[0.0, 2.0, 5, 10]]}, {"a": [[1.0, 4.0, 5, 30]]}])
    assert turns["a"].seconds == [3.0]
    assert turns["a"].wire_bytes == 25


def test_quartiles_of_one_value_are_that_value() -> None:
    assert Quartiles.of([2.0]) == Quartiles(2.0, 2.0, 2.0)


def test_unknown_and_repeated_methods_are_refused() -> None:
    with pytest.raises(UsageError, match="no method is called magic; known: nosync"):
        check_methods(["ddp", "magic"])
    with pytest.raises(UsageError, match="twice"):
        check_methods(["ddp", "ddp"])


@needs_links
def test_real_training_through_levels_follows_plain_ddp_to_summation_order() -> None:
    task, text = demo.Task(width=64, layers=1, heads=2, context=32, held_out=8, learning_rate=0.3), library_text()
    task.optimizer(task.model())  # imports what ranks would otherwise import one by one

    def main(rank: Rank) -> dict[str, list[float]]:
        rank.init_process_group()
        windows, losses = demo.Windows(rank, task, text), {}
        for method in ("ddp", "hierarchical"):
            prepare = METHODS[method][1][0]
            model = prepare(method, task.model(), Wrapping(rank.device)).model
            # Not AdamW, whose first steps depend on the signs of gradients, and so on the order of summation.
            training = demo.Training(model, torch.optim.SGD(model.parameters(), lr=0.3), windows, task)
            training.run(12)
            losses[method] = training.losses
        return losses

    for losses in launch(ClusterSpec(hosts=2, per_host=(2, 2), rate_bps=1_000_000_000), main, deadline_s=60):
        assert losses["hierarchical"] == pytest.approx(losses["ddp"], rel=1e-4)
        assert losses["ddp"][-1] < 0.9 * losses["ddp"][0]


def test_the_time_to_a_loss_lies_between_two_evaluations() -> None:
    curve = [HeldOut(0, 0.0, 8.0), HeldOut(5, 2.0, 6.0), HeldOut(10, 4.0, 6.5), HeldOut(15, 6.0, 5.0)]
    assert demo.time_to(7.0, curve) == 1.0
    assert demo.time_to(6.2, curve) == pytest.approx(1.8)  # the first time counts
    assert demo.time_to(5.75, curve) == 5.0
    assert demo.time_to(4.9, curve) is None


@needs_links
def test_kill_9_on_a_running_bench_leaves_no_process_and_no_namespace(tmp_path: Path) -> None:
    marker = f"--json={tmp_path / 'marker.json'}"
    command = [sys.executable, "-m", "syncline", "bench", "--hosts=3", "--model=mlp", "--steps=100000", marker]
    ours = _network_namespaces([os.getpid()])
    bench = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _until(lambda: len(_marked(marker)) >= 1 + 2 + 3 + 3, "the bench to start its ranks", 60)
        _until(lambda: len(_network_namespaces(_marked(marker)) - ours) >= 4, "its namespaces", 60)
        theirs = _network_namespaces(_marked(marker)) - ours
    finally:
        os.kill(bench.pid, signal.SIGKILL)
        bench.wait(10)
    _until(lambda: not _marked(marker), "its processes to end", 5)
    _until(lambda: not theirs & _network_namespaces(psutil.pids()), "its namespaces to end", 5)


def _marked(marker: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if marker in process.cmdline():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def _network_namespaces(processes: list[int]) -> set[str]:
    """Return the network namespaces of all processes: a namespace exists as long as its last process."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            found.add(str(Path(f"/proc/{process}/ns/net").readlink()))
    return found


def _until(condition, what: str, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.05)
