"""How far predictions of all kinds of exchanges are from measurements, for real models on NCCL ranks that share a GPU.

A cluster is probed once. For each model, `syncline bench` profiles the computation and the passes of each exchange
without communication, predicts every method, and only then measures them in turns.

    python benchmarks/prediction_methods.py --json F                               # on a GPU, about three minutes
    python benchmarks/prediction_methods.py --device cpu --models mlp --json F     # to see that it runs
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import syncline
from prediction_error_cuda import loss_of
from syncline.bench.run import Workload, probe_emulated, run_bench
from syncline.cluster import ClusterSpec, Rank
from syncline.cluster.spec import parse_rate
from syncline.files import write_text

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
    args = parser.parse_args()
    end_s = time.monotonic() + args.budget
    spec = ClusterSpec(hosts=args.hosts, rate_bps=parse_rate(args.rate), device=args.device)
    network = probe_emulated(spec, args.probe)
    rows: list[dict[str, Any]] = []
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
        for row in result.rows:
            if row.predicted_ms is None or row.method == "nosync":
                continue
            rows.append(
                {
                    "hosts": spec.hosts,
                    "rate_bps": spec.rate_bps,
                    "model": model,
                    "method": row.method,
                    "measured_ms": row.step_ms,
                    "measured_low_ms": row.step_ms_low,
                    "measured_high_ms": row.step_ms_high,
                    "predicted_ms": row.predicted_ms,
                    "error": row.predicted_ms / row.step_ms - 1,
                    "no_communication_ms": result.rows[0].step_ms,
                }
            )
            shown = rows[-1]
            print(
                f"{model} {row.method}: measured {row.step_ms:.1f} ms ({row.step_ms_low:.1f}–{row.step_ms_high:.1f}), "
                f"predicted {row.predicted_ms:.1f} ({shown['error']:+.1%}), "
                f"without communication {result.rows[0].step_ms:.1f}",
                flush=True,
            )
        if args.json:
            about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "syncline": syncline.__version__}
            about |= {"torch": str(torch.__version__), "rounds": str(args.rounds)}
            write_text(args.json, json.dumps({**about, "rows": rows}, indent=1) + "\n")
    errors = sorted(abs(row["error"]) for row in rows)
    if errors:
        print(f"{len(errors)} predictions: median error {statistics.median(errors):.1%}, largest {errors[-1]:.1%}")


if __name__ == "__main__":
    main()
