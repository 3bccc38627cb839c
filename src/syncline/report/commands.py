"""The commands that give a page's figures again."""

from __future__ import annotations

import shlex

from syncline.cluster import format_rate
from syncline.records.bench_result import BenchResult, Cluster, DemoResult
from syncline.report.story import Story

How = tuple[tuple[str, str], ...]


def of_prediction(story: Story) -> How:
    """What predicts: from the two files if they are there, otherwise whatever made the page's figures."""
    profile, network = (next(iter(story.files.get(kind, ())), None) for kind in ("profile", "network"))
    if profile is not None and network is not None:
        return (("Predict again", _line("syncline", "predict", "--profile", profile, "--network", network)),)
    return whole(story)


def of_plan(story: Story) -> How:
    profile, network = (next(iter(story.files.get(kind, ())), None) for kind in ("profile", "network"))
    if profile is not None and network is not None:
        return (("Plan again", _line("syncline", "plan", "--profile", profile, "--network", network)),)
    if story.command or story.runs or story.demo or story.benches:
        return whole(story)
    plan = next(iter(story.files.get("plan", ())), "plan.json")
    made = _line("syncline", "plan", "--profile", "profile.json", "--network", "network.json", "--out", plan)
    return (("Plan again, from a profile and a network", made),)


def of_network(story: Story) -> How:
    found = next(iter(story.files.get("network", ())), None)
    if found is None and (story.command or story.benches or story.demo or story.runs):
        return whole(story)
    path = found or "network.json"
    return (("Probe again, on the cluster", _line("torchrun", "…", "-m", "syncline", "probe", "--output", path)),)


def of_profile(story: Story) -> How:
    found = next(iter(story.files.get("profile", ())), None)
    if found is None:
        return whole(story)
    return (("Profile again", _line("syncline", "profile", "MODEL", "--output", found)),)


def of_run(story: Story) -> How:
    command = next((run.command for run in story.runs if run.command), "")
    return (("Run again", command),) if command else ()


def of_bench(result: BenchResult, story: Story) -> How:
    """As it was typed; from a file that does not say, as far as the result does."""
    if result.command:
        return (("Measure again", result.command),)
    what = ["--model", result.model.name, "--batch", str(result.batch)]
    if result.batch is None:
        what = ["--replay", "PROFILE"]
    methods = ",".join(row.method for row in result.rows)
    line = ["syncline", "bench", *_cluster(result.cluster), *what, "--methods", methods, "--steps", str(result.rounds)]
    return (("Measure again", _line(*line)),)


def of_demo(result: DemoResult, story: Story) -> How:
    line = result.command or _line("syncline", "demo", *_cluster(result.cluster)[:6], "--steps", str(result.steps))
    return (("Train again", line),)


def whole(story: Story) -> How:
    """What makes everything again."""
    if story.command:
        return (("Everything again", story.command),)
    if story.runs:
        return of_run(story)
    if story.demo is not None:
        return of_demo(story.demo, story)
    return of_bench(story.benches[0], story) if story.benches else ()


def _cluster(one: Cluster) -> list[str]:
    each = str(one.per_host) if isinstance(one.per_host, int) else ",".join(map(str, one.per_host))
    words = ["--hosts", str(one.hosts), "--per-host", each, "--rate", format_rate(one.rate_bps)]
    if one.racks > 1 and one.trunk_rate_bps is not None:
        words += ["--racks", str(one.racks), "--trunk-rate", format_rate(one.trunk_rate_bps)]
    if one.rank_order != "host":
        words += ["--rank-order", one.rank_order]
    return words + (["--device", one.device] if one.device != "cpu" else [])


def _line(*words: str) -> str:
    return " ".join(word if word == "…" else shlex.quote(word) for word in words)
