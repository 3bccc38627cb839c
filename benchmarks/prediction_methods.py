"""How far predictions of all kinds of exchanges are from measurements, for real models on NCCL ranks that share a GPU.

A cluster is probed once. For each model, `syncline bench` profiles the computation and the passes of each exchange
without communication, predicts every method, and only then measures them in turns.

    python benchmarks/prediction_methods.py --json F                               # on a GPU, about three minutes
    python benchmarks/prediction_methods.py --again F                          # predict again, from what is in the file
    python benchmarks/prediction_methods.py --device cpu --models mlp --json F     # to see that it runs
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

import syncline
from prediction_error_cuda import loss_of
from prediction_under_load import again, cell_of, report, summary_of
from syncline.bench.run import Workload, probe_emulated, run_bench
from syncline.cluster import ClusterSpec, Rank
from syncline.cluster.spec import parse_rate
from syncline.files import write_text
from syncline.records.network import Network

MODELS = {"cuda": "resnet50-224px,bert-base,gpt2-small", "cpu": "mlp"}


@dataclass(frozen=True)
class PublishedModel(Workload):
    """A model that papers on gradient exchange measure, with bf16 autocast on CUDA."""

    def build(self, rank: Rank) -> torch.nn.Module:
        torch.manual_seed(0)
        build, _ = loss_of(self.name, rank.device)
        net = build().to(rank.device).train()
        if hasattr(net, "config"):
            net.config.use_cache = False  # of keys and values, which training does not need
        return net

    def loss_of(self, model: Callable[..., torch.Tensor], rank: Rank) -> Callable[[], torch.Tensor]:
        _, loss = loss_of(self.name, rank.device)
        return functools.partial(loss, model)


def again_all(path: Path) -> None:
    """Predict the rows of a file again, and report them."""
    stored = json.loads(path.read_text())
    network = msgspec.convert(stored["network"], Network)
    for cell in stored["cells"]:
        again(cell, network)
    report(stored["cells"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="3gbit")
    parser.add_argument("--models")
    parser.add_argument("--methods", default="ddp,int4,local-15-late")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--probe", type=float, default=15.0, help="seconds")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds; no model is begun after that")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", type=Path, help="a file whose rows are predicted again")
    args = parser.parse_args()
    if args.again:
        again_all(args.again)
        return
    end_s = time.monotonic() + args.budget
    spec = ClusterSpec(hosts=args.hosts, rate_bps=parse_rate(args.rate), device=args.device)
    network = probe_emulated(spec, args.probe)
    cells: list[dict[str, Any]] = []
    methods = ["nosync", *args.methods.split(",")]
    for model in (args.models or MODELS[args.device]).split(","):
        left_s = end_s - time.monotonic()
        if left_s < 30:
            print(f"{model}: no time was left", flush=True)
            continue
        try:
            workload = PublishedModel(model, 8)
            result = run_bench(spec, workload, methods, rounds=args.rounds, network=network, timeout_s=left_s + 30)
        except Exception as error:  # noqa: BLE001 - the other models are worth having
            print(f"{model} failed: {str(error)[-1500:]}", flush=True)
            continue
        cells.append(cell_of((spec.hosts, 1, spec.rate_bps // 10**6), model, result))
        if args.json:
            about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "syncline": syncline.__version__}
            about |= {"torch": str(torch.__version__), "rounds": str(args.rounds)}
            stored = {**about, "network": msgspec.to_builtins(network), "summary": summary_of(cells), "cells": cells}
            write_text(args.json, json.dumps(stored, indent=1) + "\n")
        report(cells[-1:])
    report(cells)


if __name__ == "__main__":
    main()
