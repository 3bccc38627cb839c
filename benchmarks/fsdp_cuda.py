"""HSDP on real NCCL ranks that share one GPU: PyTorch's own, and Syncline's exchanges between replicas.

Two emulated hosts of two ranks each, with a link of 1 Gbit/s between hosts. A model is sharded inside each host, so
each host has a replica of it. Methods:

- `nosync`: no communication between replicas. This is FSDP inside each host, and the floor for all others.
- `hsdp`: PyTorch's own HSDP, `fully_shard` on a 2-D mesh.
- `fsdp`: PyTorch's own FSDP among all ranks, without replicas.
- `dense`, `int4`: `syncline.attach(model, exchange, replicate=…)` with `Dense()` or `Quantized(bits=4)`.
- `updates`: `ChunkedTopk(density=0.03)` for the updates of AdamW, of each part of the weights every 15 steps. A round
  is one period of 15 steps.

In each process group, the floor takes turns with the methods of a cell, and multiples are of the floor in the same
round. Computation is in bf16, and gradients are reduced in fp32. Cells stop when the budget is used up, and the file is
written after each cell. The times contain the traffic inside a host, which NCCL sends through sockets here.

All methods are predicted, from two profiles of the same model, which are measured before the methods:

- `one`: the model sharded among one rank, so without any collective. `predicted_ms` adds all of them.
- `host`: the floor, so with the collectives inside a host. `predicted_from_floor_ms` adds those between replicas.

The network is probed in the first cell. Profiles and network are in the file, and `--again` predicts from them anew.

    python benchmarks/fsdp_cuda.py --json F                                  # on a GPU, about 200 seconds
    python benchmarks/fsdp_cuda.py --after F --json F                        # the cells for which there was no time
    python benchmarks/fsdp_cuda.py --again F                                 # predict from its measurements, anywhere
    python benchmarks/fsdp_cuda.py --device cpu --budget 120 --json F        # a tiny model, to see that it runs
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import syncline
from syncline.bench.rounds import Contender, combine, take_turns
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.dist.comm import gather_bytes
from syncline.exchange import Topology, for_updates
from syncline.files import write_text
from syncline.fsdp.profile import profile_sharded
from syncline.measure.beside import measure_beside
from syncline.measure.overhead import measure_overheads
from syncline.measure.probe import probe
from syncline.models.gpt import Block
from syncline.predict.sharded import FLOOR, predict_sharded
from syncline.records.network import Network
from syncline.records.profile import Profile
from syncline.runtime.checkpoint import digest_of_bits
from syncline.runtime.local_tensors import local_part

EVERY = 15
HOSTS, PER_HOST = 2, 2
RATE_BPS = {"cuda": 1_000_000_000, "cpu": 40_000_000}


@dataclass(frozen=True)
class Size:
    """A model, and the number of rounds of each method."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    rounds: dict[str, int]  # where they differ from `ROUNDS`
    least_s: float  # no cell takes less

    def build(self) -> nn.Module:
        return Gpt(self)


MODELS = {
    "cuda": {
        "gpt2-small": Size(768, 12, 12, 50257, 512, 8, {"fsdp": 2}, 20),
        "gpt2-medium": Size(
            1024, 24, 16, 50257, 512, 4, {"hsdp": 2, "int4": 2, "updates": 1, "dense": 2, "fsdp": 1}, 35
        ),
    },
    "cpu": {"tiny": Size(64, 2, 2, 256, 32, 2, {"updates": 2}, 10)},
}
ROUNDS = 3  # unless a model has another number
CELLS = (("hsdp", "int4"), ("updates",), ("fsdp",), ("dense",))
"""Methods that take turns in the same processes. The cells that answer most come first, for all models."""
PREDICTED = {
    "nosync": FLOOR,
    "hsdp": "hsdp",
    "fsdp": "fsdp",
    "dense": "hsdp+dense",
    "int4": "hsdp+int4",
    "updates": "hsdp+local-15",
}
"""The names of the methods in predictions."""
PROBED = {
    "cuda": ("all_reduce", "all_to_all", "all_gather", "reduce_scatter"),
    "cpu": ("all_reduce", "all_to_all", "all_gather"),
}
PROBE_S = {"cuda": 24.0, "cpu": 15.0}


class Gpt(nn.Module):
    """GPT-2 without dropout, with the sizes of OpenAI's models."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.ModuleList([Block(size.width, size.heads) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Training:
    """A model that trains with one method."""

    def __init__(self, rank: Rank, size: Size, mesh: DeviceMesh, method: str, dtype: torch.dtype | None = None) -> None:
        torch.manual_seed(0)
        with rank.device:
            net = size.build().to(dtype)
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = half if rank.device.type == "cuda" else MixedPrecisionPolicy()
        shard: Any = functools.partial(fully_shard, mesh=mesh if method == "hsdp" else mesh["shard"], mp_policy=policy)
        for block in net.blocks:
            shard(block)
        self.model = shard(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        options: dict[str, Any] = {"replicate": mesh["replicate"]}
        exchange: syncline.Exchange = syncline.Dense()
        if method == "int4":
            exchange = syncline.Quantized(bits=4)
        elif method == "updates":
            exchange = syncline.ChunkedTopk(density=0.03)
            options |= {"optimizer": self.optimizer, "every": EVERY, "warmup": 0}
        attaches = method in ("dense", "int4", "updates")
        self.handle = syncline.attach(self.model, exchange, **options) if attaches else None
        generator = torch.Generator().manual_seed(rank.rank)
        drawn = torch.randint(size.vocabulary, (size.batch, size.sequence), generator=generator)
        self.tokens = drawn.to(rank.device)
        self.steps_per_round = EVERY if method == "updates" else 1

    def round(self) -> None:
        for _ in range(self.steps_per_round):
            self.optimizer.zero_grad()
            self.model(self.tokens).backward()
            self.optimizer.step()

    def profile(self, name: str) -> Profile:
        options: dict[str, Any] = {"steps": 6, "warmup": 2, "optimizer": self.optimizer, "model_name": name}
        return profile_sharded(self.model, lambda model: model(self.tokens), batch=len(self.tokens), **options)

    def about(self, mesh: DeviceMesh) -> dict[str, Any]:
        """Return the bytes that this rank's shards sent per step, and whether replicas agree at the end."""
        if self.handle is None:
            return {}
        stats = self.handle.stats()
        with self.handle.synced():
            weights = {name: local_part(p) for name, p in self.model.named_parameters()}
            finite = all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
            agree = len(set(gather_bytes(mesh["replicate"].get_group(), digest_of_bits(weights).encode()))) == 1
        return {
            "sent_bytes": sum(stats.total_sent_bytes.values()) // max(1, stats.steps),
            "predicted_sent_bytes": sum(self.handle.predicted_sent_bytes().values()),
            "replicas_agree": agree,
            "finite": finite,
        }


def profiled_alone(rank: Rank, name: str, size: Size) -> Profile:
    """Profile the model sharded among one rank, and the exchanges' own work."""
    backend = "nccl" if rank.device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"topology": Topology.flat(HOSTS, backend), "group": dist.group.WORLD}
    exchanges = {
        "dense": syncline.Dense,
        "int4": lambda: syncline.Quantized(bits=4),
        "topk-chunks": lambda: for_updates(syncline.ChunkedTopk(density=0.03), EVERY),
    }
    overheads = measure_overheads(rank.device, exchanges, **options)
    mesh = init_device_mesh(rank.device.type, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    # Among one rank, torch 2.11 does not cast parameters to the type in which they are gathered.
    training = Training(rank, size, mesh, "nosync", torch.bfloat16 if rank.device.type == "cuda" else None)
    profile = in_full(training.profile(name))
    del training
    gc.collect()
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()
    return msgspec.structs.replace(profile, overheads=overheads)


def in_full(profile: Profile) -> Profile:
    """Return the profile of a model whose parameters are in fp32, from one in bf16."""
    replace = msgspec.structs.replace
    full = [replace(gradient, dtype="float32", bytes=4 * math.prod(gradient.shape)) for gradient in profile.gradients]
    return replace(profile, gradients=tuple(full))


def on_cluster(
    rank: Rank, name: str, size: Size, methods: tuple[str, ...], probes: bool, alone: Profile | None
) -> dict[str, Any]:
    """Measure a cell on one rank. `alone` is the profile of the model sharded among one rank, if there is one."""
    rank.init_process_group(timeout_s=100)
    began_s = time.monotonic()
    network = probe(budget_s=PROBE_S[rank.device.type], kinds=PROBED[rank.device.type]) if probes else None
    mesh = init_device_mesh(rank.device.type, (HOSTS, PER_HOST), mesh_dim_names=("replicate", "shard"))
    if network is not None and rank.device.type == "cuda":
        groups = mesh["shard"].get_group(), mesh["replicate"].get_group()
        try:
            network = msgspec.structs.replace(network, beside=measure_beside(*groups, rank.device))
        except Exception as error:  # noqa: BLE001 - the steps are worth having without it
            print(f"rank {rank.rank}: not measured side by side: {error}", flush=True)
    probed_s = time.monotonic()
    alone = alone or profiled_alone(rank, name, size)
    trainings = {"nosync": Training(rank, size, mesh, "nosync")}
    floor = msgspec.structs.replace(trainings["nosync"].profile(name), overheads=alone.overheads)
    profiles = {"one": alone, "host": floor}
    profiled_s = time.monotonic()
    for method in methods:
        among = mesh
        if method == "fsdp":
            shape = 1, HOSTS * PER_HOST
            among = init_device_mesh(rank.device.type, shape, mesh_dim_names=("replicate", "shard"))
        trainings[method] = Training(rank, size, among, method)
    contenders = [Contender(name, training.round, training.steps_per_round) for name, training in trainings.items()]
    rounds = min(size.rounds.get(method, ROUNDS) for method in methods)
    record = take_turns(rank, contenders, warmup=1, rounds=rounds)
    about = {name: training.about(mesh) for name, training in trainings.items()}
    peak = torch.cuda.max_memory_allocated() if rank.device.type == "cuda" else None
    seconds = {"probe": probed_s - began_s, "profile": profiled_s - probed_s, "steps": time.monotonic() - profiled_s}
    inputs = msgspec.to_builtins({"profiles": profiles, "network": network}) if rank.rank == 0 else {}
    return {"record": record, "about": about, "peak_bytes": peak, "seconds": seconds, **inputs}


def measured(
    spec: ClusterSpec,
    name: str,
    size: Size,
    methods: tuple[str, ...],
    deadline_s: float,
    probes: bool,
    alone: Profile | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row for each method and the floor, and the first rank's answer."""
    answers = launch(spec, lambda rank: on_cluster(rank, name, size, methods, probes, alone), deadline_s=deadline_s)
    periods = {method: EVERY if method == "updates" else 1 for method in methods}
    turns = combine([answer["record"] for answer in answers], periods)
    floor, rows = turns["nosync"], []
    for method in ("nosync", *methods):
        times, ratio = turns[method].quartiles, turns[method].ratio_to(floor)
        row = {
            "method": method,
            "rounds": len(turns[method].seconds),
            **times.fields("step_ms", 1e3),
            **floor.quartiles.fields("floor_ms", 1e3),
            **ratio.fields("times_floor"),
            "wire_bytes": turns[method].wire_bytes,
            **answers[0]["about"][method],
        }
        if method not in ("nosync", "hsdp") and "hsdp" in turns:
            row |= turns["hsdp"].ratio_to(turns[method]).fields("faster_than_hsdp")
        rows.append(row)
    return rows, answers[0]


def predicted(method: str, profiles: dict[str, Any], network: Any) -> dict[str, float | None]:
    """Return the predicted times of a method, from both profiles."""
    cluster = msgspec.convert(network, Network)
    times = {}
    for key, field in (("one", "predicted_ms"), ("host", "predicted_from_floor_ms")):
        profile = msgspec.convert(profiles[key], Profile)
        alone = method == "fsdp" and key == "host"  # other collectives than those of the profile
        times[field] = None if alone else predict_sharded(profile, cluster, PREDICTED[method]).iteration_s * 1e3
    return times


def line(row: dict[str, Any]) -> str:
    text = (
        f"{row['model']} {row['method']}: {row['step_ms']:.1f} ms ({row['step_ms_low']:.1f}–{row['step_ms_high']:.1f})"
    )
    text += f", floor {row['floor_ms']:.1f}, × {row['times_floor']:.2f}"
    for field, name in (("predicted_ms", "predicted"), ("predicted_from_floor_ms", "from the floor")):
        if row.get(field) is not None:
            text += f", {name} {row[field]:.1f} ms ({row[field] / row['step_ms'] - 1:+.1%})"
    if "faster_than_hsdp" in row:
        text += f", {row['faster_than_hsdp']:.2f} times faster than hsdp"
    if "sent_bytes" in row:
        text += f", {row['sent_bytes']} bytes per rank and step, predicted {row['predicted_sent_bytes']}"
        text += "" if row["replicas_agree"] and row["finite"] else ", BUT REPLICAS DIFFER OR ARE NOT FINITE"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", type=float, default=200.0, help="seconds in all")
    parser.add_argument("--only", help="methods whose names begin so")
    parser.add_argument("--model", help="this model only")
    parser.add_argument("--again", type=Path, help="predict from the measurements in this file, and print both")
    parser.add_argument("--after", type=Path, help="continue this file: with its network, and without its cells")
    args = parser.parse_args()
    if args.again is not None:
        predict_again(args.again, args.json)
        return
    began_s = time.monotonic()
    spec = ClusterSpec(hosts=HOSTS, per_host=(PER_HOST,) * HOSTS, rate_bps=RATE_BPS[args.device], device=args.device)
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "syncline": syncline.__version__,
        "torch": str(torch.__version__),
        "cluster": {"hosts": HOSTS, "per_host": PER_HOST, "rate_bps": spec.rate_bps, "device": args.device},
        "rows": [],
        "failed": [],
        "network": None,
        "cells": [],
    }
    if args.after is not None:
        result |= json.loads(args.after.read_text()) | {"failed": []}
    sizes = {name: size for name, size in MODELS[args.device].items() if args.model in (None, name)}
    for methods in CELLS:
        for name, size in sizes.items():
            chosen = tuple(method for method in methods if method.startswith(args.only or ""))
            left_s = args.budget - (time.monotonic() - began_s)
            if not chosen:
                continue
            if any((cell["model"], tuple(cell["methods"])) == (name, chosen) for cell in result["cells"]):
                continue
            if left_s < size.least_s:
                result["failed"].append({"model": name, "methods": chosen, "error": "no time was left"})
                continue
            print(f"{name}: {', '.join(chosen)} ({left_s:.0f} s left)", flush=True)
            began_cell_s = time.monotonic()
            try:
                known = next((cell["profiles"]["one"] for cell in result["cells"] if cell["model"] == name), None)
                alone = msgspec.convert(known, Profile | None)
                rows, answer = measured(spec, name, size, chosen, left_s, result["network"] is None, alone)
                result["network"] = result["network"] or answer["network"]
                profiles, first = answer["profiles"], len(result["rows"])
                result["cells"].append({"model": name, "methods": chosen, "profiles": profiles} | answer["seconds"])
                result["rows"] += [{"model": name, "cell": len(result["cells"]) - 1, **row} for row in rows]
                for row in result["rows"][first:]:
                    row |= predicted(row["method"], profiles, result["network"])
                    print(line(row), flush=True)
                if answer["network"] is not None:
                    print(f"  beside: {answer['network']['beside']}", flush=True)
            except Exception as error:  # noqa: BLE001 - the other cells are worth having
                result["failed"].append({"model": name, "methods": chosen, "error": str(error)[:2000]})
                print(f"FAILED {name} {chosen}: {str(error)[:2000]}", flush=True)
            print(f"  {time.monotonic() - began_cell_s:.0f} s", flush=True)
            if args.json:
                write_text(args.json, json.dumps(result, indent=1) + "\n")


def predict_again(path: Path, out: Path | None) -> None:
    """Predict the rows of a file from its profiles and its network."""
    result = json.loads(path.read_text())
    for row in result["rows"]:
        row |= predicted(row["method"], result["cells"][row["cell"]]["profiles"], result["network"])
        print(line(row))
    if out is not None:
        write_text(out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
