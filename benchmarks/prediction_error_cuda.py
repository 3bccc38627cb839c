"""How far predictions are from measurements for real models on real NCCL ranks that share one GPU.

On each emulated cluster: probe the links, profile every model on all ranks at once without communication, predict, and
only then measure. The second prediction of each row is made from the network that was probed on the *other* cluster.

    python benchmarks/prediction_error_cuda.py --json F
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from record_profiles import PUBLISHED, of_the_zoo
from syncline._version import __version__
from syncline.bench.methods import Wrapping
from syncline.bench.rounds import Contender, combine, take_turns, training_step
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.ddp.attach import attach
from syncline.files import write_text
from syncline.measure.backward import measure_backward
from syncline.measure.overhead import measure_overheads
from syncline.measure.probe import probe
from syncline.predict import Schedule, predict
from syncline.records.network import Network
from syncline.records.profile import Profile

CLUSTERS = {"cuda": [(4, 1000), (8, 10000)], "cpu": [(2, 200), (3, 100)]}
MODELS = {"cuda": ["resnet50-224px", "bert-base"], "cpu": ["cnn", "mlp"]}
SCHEDULES = ["ddp", "dense,lanes=2"]


def loss_of(name: str, device: torch.device) -> tuple[Callable[[], torch.nn.Module], Callable[[torch.nn.Module], Any]]:
    task = PUBLISHED[name](device.type) if name in PUBLISHED else of_the_zoo(name, device.type, 8)

    def loss(model: torch.nn.Module) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return task.loss(model)

    return task.build, loss


def on_cluster(rank: Rank, models: list[str], budget_s: float, rounds: int) -> dict[str, Any]:
    device = rank.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank.init_process_group(timeout_s=300)
    network = probe(budget_s=budget_s).with_nominal_rates(rank.spec.rate_bps)
    overheads = measure_overheads(device, topology=rank.world_size, group=dist.group.WORLD)
    answer: dict[str, Any] = {"network": msgspec.to_builtins(network), "profiles": {}, "predictions": {}, "record": {}}
    for name in models:
        torch.manual_seed(0)
        build, loss = loss_of(name, device)
        net = build().to(device).train()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        profile = measure_backward(net, loss, steps=10, warmup=5, optimizer=optimizer, model_name=name)
        profile = msgspec.structs.replace(profile, overheads=overheads)
        del net, optimizer
        contenders = []
        for text in SCHEDULES:
            schedule = Schedule.parse(profile, text)
            answer["predictions"][f"{name} {text}"] = predict(profile, network, schedule).iteration_s
            model = Wrapping(device, schedule.bucket_mb).ddp(build().to(device).train())
            if schedule.name != "ddp":
                attach(model, schedule.exchange, lanes=schedule.lanes)
            contenders.append(Contender(f"{name} {text}", training_step(model, functools.partial(loss, model))))
        answer["profiles"][name] = msgspec.to_builtins(profile)
        answer["record"] |= take_turns(rank, contenders, warmup=3, rounds=rounds)
        del contenders, model
    return answer if rank.rank == 0 else {"record": answer["record"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=40.0)
    args = parser.parse_args()
    runs = []
    for hosts, mbit in CLUSTERS[args.device]:
        began = time.monotonic()
        spec = ClusterSpec(hosts=hosts, rate_bps=mbit * 10**6, device=args.device)
        models = MODELS[args.device]
        answers = launch(
            spec, lambda rank, models=models: on_cluster(rank, models, args.budget, args.rounds), deadline_s=500
        )
        print(f"{spec.describe()}: {time.monotonic() - began:.0f} s", flush=True)
        runs.append((spec, answers[0], combine([answer["record"] for answer in answers])))
    rows = [row for index in range(len(runs)) for row in rows_of(runs, index)]
    if args.json:
        about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "syncline": __version__}
        about |= {"torch": str(torch.__version__), "rounds": args.rounds}
        networks = [answer["network"] for _, answer, _ in runs]
        profiles = [answer["profiles"] for _, answer, _ in runs]
        write_text(args.json, json.dumps({**about, "rows": rows, "networks": networks, "profiles": profiles}) + "\n")


def rows_of(runs: list[Any], index: int) -> list[dict[str, Any]]:
    spec, answer, turns = runs[index]
    other = msgspec.convert(runs[1 - index][1]["network"], Network)
    moved = other.with_hosts(spec.hosts, same_machine=True).with_rate(spec.rate_bps)
    rows = []
    for name, expected_s in answer["predictions"].items():
        model, text = name.split(" ")
        profile = msgspec.convert(answer["profiles"][model], Profile)
        from_other_s = predict(profile, moved, Schedule.parse(profile, text)).iteration_s
        times = turns[name].quartiles
        row = {
            "hosts": spec.hosts,
            "rate_bps": spec.rate_bps,
            "model": model,
            "schedule": text,
            "compute_ms": (profile.forward_s + profile.backward_s + profile.update_s) * 1e3,
            "measured_ms": times.median * 1e3,
            "measured_low_ms": times.low * 1e3,
            "measured_high_ms": times.high * 1e3,
            "predicted_ms": expected_s * 1e3,
            "error": expected_s / times.median - 1,
            "predicted_from_other_cluster_ms": from_other_s * 1e3,
            "error_from_other_cluster": from_other_s / times.median - 1,
        }
        rows.append(row)
        print(
            " ".join(
                f"{key}={value:.3f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
            )
        )
    return rows


if __name__ == "__main__":
    main()
