"""The commands that reproduce what a page shows."""

from __future__ import annotations

import shlex

from syncline.bench.result import BenchResult, Cluster, DemoResult
from syncline.cluster import format_rate
from syncline.report.inputs import Inputs, ModelData
from syncline.report.layout import Commands


def for_prediction(inputs: Inputs) -> Commands:
    """Return what predicts again from the two files, or whatever made the page."""
    return _from_files(inputs, "Predict again", "predict") or for_everything(inputs)


def for_step(inputs: Inputs, model: ModelData) -> Commands:
    run = for_run(inputs) if model.records else ()
    return tuple(dict.fromkeys((*run, *(for_prediction(inputs) if model.forecast is not None else ()))))


def for_plan(inputs: Inputs) -> Commands:
    if found := _from_files(inputs, "Plan again", "plan") or for_everything(inputs):
        return found
    files = ["--profile", "profile.json", "--network", "network.json", "--out", inputs.file("plan") or "plan.json"]
    return (("Plan again, from a profile and a network", _join("syncline", "plan", *files)),)


def for_network(inputs: Inputs) -> Commands:
    file = inputs.file("network")
    if file is None and (found := for_everything(inputs)):
        return found
    output = file or "network.json"
    return (("Probe again, on the cluster", _join("torchrun", "…", "-m", "syncline", "probe", "--output", output)),)


def for_profile(inputs: Inputs) -> Commands:
    file = inputs.file("profile")
    if file is None:
        return for_everything(inputs)
    return (("Profile again", _join("syncline", "profile", "MODEL", "--output", file)),)


def for_run(inputs: Inputs) -> Commands:
    command = next((run.command for run in inputs.runs if run.command), "")
    return (("Run again", command),) if command else ()


def for_bench(result: BenchResult) -> Commands:
    """Return the command as it was typed, or, for older files without it, one with the same settings."""
    if result.command:
        return (("Measure again", result.command),)
    model = ["--replay", "PROFILE"]
    if result.batch is not None:
        model = ["--model", result.model.name, "--batch", str(result.batch)]
    methods = ["--methods", ",".join(row.method for row in result.rows), "--steps", str(result.rounds)]
    return (("Measure again", _join("syncline", "bench", *_cluster_options(result.cluster), *model, *methods)),)


def for_demo(result: DemoResult) -> Commands:
    options = [*_cluster_options(result.cluster)[:6], "--steps", str(result.steps)]
    return (("Train again", result.command or _join("syncline", "demo", *options)),)


def for_everything(inputs: Inputs) -> Commands:
    if inputs.command:
        return (("Make this page again", inputs.command),)
    if inputs.runs:
        return for_run(inputs)
    if inputs.demo is not None:
        return for_demo(inputs.demo)
    return for_bench(inputs.benches[0]) if inputs.benches else ()


def _from_files(inputs: Inputs, purpose: str, command: str) -> Commands:
    profile, network = inputs.file("profile"), inputs.file("network")
    if profile is None or network is None:
        return ()
    return ((purpose, _join("syncline", command, "--profile", profile, "--network", network)),)


def _cluster_options(cluster: Cluster) -> list[str]:
    per_host = str(cluster.per_host) if isinstance(cluster.per_host, int) else ",".join(map(str, cluster.per_host))
    words = ["--hosts", str(cluster.hosts), "--per-host", per_host, "--rate", format_rate(cluster.rate_bps)]
    if cluster.racks > 1 and cluster.trunk_rate_bps is not None:
        words += ["--racks", str(cluster.racks), "--trunk-rate", format_rate(cluster.trunk_rate_bps)]
    if cluster.rank_order != "host":
        words += ["--rank-order", cluster.rank_order]
    return words + (["--device", cluster.device] if cluster.device != "cpu" else [])


def _join(*words: str) -> str:
    return " ".join(word if word == "…" else shlex.quote(word) for word in words)
