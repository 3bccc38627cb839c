"""The commands that reproduce what a page shows."""

from __future__ import annotations

import shlex

from syncline.cluster import format_rate
from syncline.records.bench_result import BenchResult, Cluster, DemoResult
from syncline.report.inputs import Inputs, ModelData
from syncline.report.layout import Commands


def for_prediction(inputs: Inputs) -> Commands:
    command = "syncline predict --profile {profile} --network {network}"
    return _with_files(inputs, "Predict again", command) or for_everything(inputs)


def for_step(inputs: Inputs, model: ModelData) -> Commands:
    run = for_run(inputs) if model.records else ()
    return tuple(dict.fromkeys((*run, *(for_prediction(inputs) if model.forecast is not None else ()))))


def for_plan(inputs: Inputs) -> Commands:
    command = "syncline plan --profile {profile} --network {network}"
    example = command.format(profile="profile.json", network="network.json")
    example += f" --out {shlex.quote(inputs.file('plan') or 'plan.json')}"
    made = _with_files(inputs, "Plan again", command) or for_everything(inputs)
    return made or (("Plan again, from a profile and a network", example),)


def for_network(inputs: Inputs) -> Commands:
    command, purpose = "torchrun … -m syncline probe --output {network}", "Probe again, on the cluster"
    made = _with_files(inputs, purpose, command) or for_everything(inputs)
    return made or ((purpose, command.format(network="network.json")),)


def for_profile(inputs: Inputs) -> Commands:
    command = "syncline profile MODEL --output {profile}"
    return _with_files(inputs, "Profile again", command) or for_everything(inputs)


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
    return (("Measure again", shlex.join(["syncline", "bench", *_cluster_options(result.cluster), *model, *methods])),)


def for_demo(result: DemoResult) -> Commands:
    options = [*_cluster_options(result.cluster)[:6], "--steps", str(result.steps)]
    return (("Train again", result.command or shlex.join(["syncline", "demo", *options])),)


def for_everything(inputs: Inputs) -> Commands:
    if inputs.command:
        return (("Make this page again", inputs.command),)
    if inputs.runs:
        return for_run(inputs)
    if inputs.demo is not None:
        return for_demo(inputs.demo)
    return for_bench(inputs.benches[0]) if inputs.benches else ()


def _with_files(inputs: Inputs, purpose: str, command: str) -> Commands:
    """Put the names of files into a command; return nothing if one of them was not read."""
    try:
        files = {kind: shlex.quote(paths[0]) for kind, paths in inputs.files.items() if paths}
        return ((purpose, command.format_map(files)),)
    except KeyError:
        return ()


def _cluster_options(cluster: Cluster) -> list[str]:
    per_host = str(cluster.per_host) if isinstance(cluster.per_host, int) else ",".join(map(str, cluster.per_host))
    words = ["--hosts", str(cluster.hosts), "--per-host", per_host, "--rate", format_rate(cluster.rate_bps)]
    if cluster.racks > 1 and cluster.trunk_rate_bps is not None:
        words += ["--racks", str(cluster.racks), "--trunk-rate", format_rate(cluster.trunk_rate_bps)]
    if cluster.rank_order != "host":
        words += ["--rank-order", cluster.rank_order]
    return words + (["--device", cluster.device] if cluster.device != "cpu" else [])
