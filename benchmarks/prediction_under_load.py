"""How far predictions are from measurements if models compute on the processors that also carry the communication.

The links are probed on two emulated clusters, one with a rank and one with two ranks per host. On other clusters, with
other rates and mostly other numbers of hosts, `syncline bench` profiles each model without communication, predicts
every method, and only then measures all of them in turns. Computation is real, on the cores that all ranks share.

    python benchmarks/prediction_under_load.py --json F
    python benchmarks/prediction_under_load.py --again F …   # predict again, from the profiles and networks in files
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

import syncline
from prediction_error import moved
from syncline.bench.run import Workload, probe_emulated, run_bench
from syncline.cluster import ClusterSpec, Rank
from syncline.exchange import default_lanes
from syncline.files import write_text
from syncline.models import zoo
from syncline.models.gpt import GPT
from syncline.predict import Schedule, predict
from syncline.predict.schedule import UPDATES
from syncline.records.bench_result import BenchResult
from syncline.records.network import Network
from syncline.records.profile import Profile
from training import small_resnet

FITTED = ((4, 1, 200), (3, 2, 150))  # hosts, ranks per host, Mbit/s
CLUSTERS = (
    *((2, 1, 60), (2, 1, 100), (2, 1, 300), (3, 1, 80), (3, 1, 150), (3, 1, 250), (4, 1, 100)),
    *((2, 2, 100), (2, 2, 300), (2, 2, 60), (3, 2, 80)),
)
STEADY = 0.1
"""Largest relative difference between a cell's profile and the same steps while methods were measured."""
METHODS = ("ddp", "bf16", "int4", "oktopk", "hierarchical", "oktopk-updates", "local-15")
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {  # how to build it, and the batch
    "cnn": (zoo.cnn, 64),
    "gpt": (lambda: GPT(width=128, layers=4, heads=4), 4),
    "resnet": (small_resnet, 32),
}


@dataclass(frozen=True)
class SmallModel(Workload):
    """A model whose steps suit two cores."""

    def build(self, rank: Rank) -> torch.nn.Module:
        torch.manual_seed(0)
        return MODELS[self.name][0]()

    def loss_of(self, model: Callable[..., torch.Tensor], rank: Rank) -> Callable[[], torch.Tensor]:
        generator = torch.Generator().manual_seed(rank.rank)
        inputs, targets = zoo.make_batch("gpt-small" if self.name == "gpt" else "cnn", self.batch, generator)
        return lambda: zoo.loss(model(inputs), targets)


def spec_of(cluster: Sequence[int]) -> ClusterSpec:
    hosts, per_host, mbit = cluster
    return ClusterSpec(hosts=hosts, per_host=(per_host,) * hosts, rate_bps=mbit * 10**6)


def measured(cluster: Sequence[int], model: str, network: Network, rounds: int, methods: str) -> dict[str, Any]:
    """Return the result of one bench, with the inputs of its predictions."""
    spec = spec_of(cluster)
    names = [name for name in methods.split(",") if name != "hierarchical" or cluster[1] > 1]
    workload = SmallModel(model, MODELS[model][1])
    return cell_of(cluster, model, run_bench(spec, workload, ["nosync", *names], rounds=rounds, network=network))


def cell_of(cluster: Sequence[int], model: str, result: BenchResult) -> dict[str, Any]:
    """Return the rows of a bench, and the profile that they were predicted from."""
    return {
        "cluster": list(cluster),
        "model": model,
        "gradient_bytes": result.model.gradient_bytes,
        "rows": [msgspec.to_builtins(row) for row in result.rows],
        "profile": msgspec.to_builtins(result.profile),
    }


def again(cell: dict[str, Any], network: Network) -> None:
    """Predict the rows of a cell again."""
    profile = msgspec.convert(cell["profile"], Profile)
    for row in cell["rows"][1:]:
        schedule = schedule_of(profile, row["method"], network.backend)
        row["predicted_ms"] = predict(profile, network, schedule).iteration_s * 1e3


def schedule_of(profile: Profile, method: str, backend: str) -> Schedule:
    if method not in UPDATES:
        return Schedule.of(profile, method, backend=backend)
    updates = dataclasses.replace(UPDATES[method], exchange_name=method)
    return Schedule.of_updates(profile, method, updates, default_lanes(updates.exchange, backend))


def network_for(cluster: Sequence[int], networks: dict[str, Network]) -> Network:
    hosts, per_host, _ = cluster
    chosen = [network for network in networks.values() if network.ranks == network.hosts * per_host]
    nearest = min(chosen, key=lambda network: abs(math.log(network.hosts / hosts)))
    return moved(nearest, spec_of(cluster))


def report(cells: Sequence[dict[str, Any]]) -> None:
    """Print every prediction beside its measurement, and a summary by method."""
    for cell in cells:
        hosts, per_host, mbit = cell["cluster"]
        floor = cell["rows"][0]
        where = f"{hosts} × {per_host} at {mbit:>3} Mbit/s  {cell['model']:7s}"
        print(f"{where} computes {floor['step_ms']:6.1f} ms, profile {floor['predicted_ms']:6.1f}")
        for row in cell["rows"][1:]:
            print(
                f"    {row['method']:15s} measured {row['step_ms']:7.1f} "
                f"({row['step_ms_low']:.0f}–{row['step_ms_high']:.0f}), "
                f"predicted {row['predicted_ms']:7.1f}  {error_of(row):+.1%}"
            )
    for what, some in {"all": cells, "steady": steady(cells)}.items():
        print(f"{what}: {len(some)} of {len(cells)} cells")
        for name, row in summary_of(some).items():
            print(
                f"{name:15s} {row['count']:3d}  median {row['median']:.1%}  p90 {row['p90']:.1%}  "
                f"worst {row['worst']:.1%}  mean {row['mean']:+.1%}",
                flush=True,
            )


def steady(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells in which computing alone took about as long as when it was profiled, a minute before: a shared
    machine changes its speed, and no prediction from a profile can know that."""
    return [cell for cell in cells if abs(error_of(cell["rows"][0])) <= STEADY]


def write(path: Path, about: dict[str, Any], cells: Sequence[dict[str, Any]]) -> None:
    summaries = {
        "summary": summary_of(cells),
        "steady": len(steady(cells)),
        "steady_summary": summary_of(steady(cells)),
    }
    write_text(path, json.dumps({**about, **summaries, "cells": cells}, indent=1) + "\n")


def error_of(row: dict[str, Any]) -> float:
    return float(row["predicted_ms"] / row["step_ms"] - 1)


def summary_of(cells: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Summarise the errors by method; `mean` has the sign, the others are of absolute errors."""
    errors: dict[str, list[float]] = {}
    for row in [row for cell in cells for row in cell["rows"][1:]]:
        for name in (row["method"], "all"):
            errors.setdefault(name, []).append(error_of(row))
    return {name: _summary(errors[name]) for name in sorted(errors, key=lambda name: name == "all")}


def _summary(errors: list[float]) -> dict[str, float]:
    ordered = sorted(map(abs, errors))
    tenth = ordered[math.ceil(0.9 * len(ordered)) - 1]
    return {
        "count": len(ordered),
        "median": statistics.median(ordered),
        "p90": tenth,
        "worst": ordered[-1],
        "mean": statistics.mean(errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--probe", type=float, default=45.0, help="seconds for each probe")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", help="hosts x ranks per host x Mbit/s, such as 2x1x100,2x2x300")
    parser.add_argument("--networks", type=Path, help="a file of an earlier run, whose probed networks are used")
    parser.add_argument("--again", type=Path, nargs="+", help="files of one probe, whose rows are predicted again")
    args = parser.parse_args()
    if args.again:
        files = [json.loads(path.read_text()) for path in args.again]
        networks = msgspec.convert(files[0]["networks"], dict[str, Network])
        cells = [cell for stored in files for cell in stored["cells"]]
        for cell in cells:
            again(cell, network_for(cell["cluster"], networks))
        report(cells)
        if args.json:
            write(args.json, files[0], cells)
        return
    if args.networks:
        networks = msgspec.convert(json.loads(args.networks.read_text())["networks"], dict[str, Network])
    else:
        networks = {"x".join(map(str, each)): probe_emulated(spec_of(each), args.probe) for each in FITTED}
    clusters = [tuple(map(int, text.split("x"))) for text in args.clusters.split(",")] if args.clusters else CLUSTERS
    about: dict[str, Any] = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "rounds": args.rounds}
    about |= {"syncline": syncline.__version__, "torch": str(torch.__version__)}
    about["networks"] = msgspec.to_builtins(networks)
    cells = []
    for cluster in clusters:
        for model in args.models.split(","):
            began_s = time.monotonic()
            cells.append(measured(cluster, model, network_for(cluster, networks), args.rounds, args.methods))
            print(f"{cluster} {model}: {time.monotonic() - began_s:.0f} s", flush=True)
            if args.json:
                write(args.json, about, cells)
    report(cells)


if __name__ == "__main__":
    main()
