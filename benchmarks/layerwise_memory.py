"""What training takes of memory and time, layer by layer and not, on ranks that share one GPU and talk over NCCL.

    python benchmarks/layerwise_memory.py --json F                 peaks and step times, at the same batch
    python benchmarks/layerwise_memory.py --cap 12GiB --json F     samples per second, at the best batches under a cap

Methods, all with SGD with momentum and bf16 autocast:

- ddp: plain DistributedDataParallel, gradients as views of its buckets.
- sparse-only: the same with the usual sparse hook: each rank's largest 1 %, gathered by everyone, one residual.
- memory-only: the optimizer in backward, dense gradients, all blocks recomputed (`Layerwise` with `Dense`).
- layerwise: `Layerwise` with `Dense`, everything kept.
- layerwise+oktopk: the 1 % of the sums, all blocks recomputed, what waits on the device.
- layerwise+oktopk, host: what waits in the host's memory.
- layerwise+oktopk, parked: and blocks' inputs there too.

Peaks are the allocator's, of the busiest rank, after warm-up; states are what is allocated between steps. What NCCL and
the CUDA context take is apart: what the device has given away, less what the allocators hold, by rank.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from syncline._version import __version__
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.dist.comm import gather_into
from syncline.files import write_text
from syncline.layerwise.memory_budget import measure_activations, training_of
from syncline.memory_meter import metered
from syncline.models import gpt, zoo
from syncline.predict.memory import peak_bytes
from syncline.units import parse_bytes

Loss = Callable[[nn.Module], Tensor]
METHODS = (
    "ddp",
    "sparse-only",
    "memory-only",
    "layerwise",
    "layerwise+oktopk",
    "layerwise+oktopk, host",
    "layerwise+oktopk, parked",
)
WAYS = {
    "memory-only": "recompute",
    "layerwise": "keep",
    "layerwise+oktopk": "recompute",
    "host": "recompute",
    "parked": "park",
}
WARM_UP, STEPS = 4, 3


def _resnet152() -> nn.Module:
    import timm

    return timm.create_model("resnet152", num_classes=1000)


def _gpt2(**sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**sizes, use_cache=False)
    return GPT2LMHeadModel(config)


def _byte_gpt() -> nn.Module:
    return gpt.GPT(width=1024, layers=24, heads=16, context=8192)


def _vit() -> nn.Module:
    import timm

    return timm.create_model("vit_large_patch16_224", num_classes=1000)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig())


def _images(batch: int, device: torch.device) -> Loss:
    inputs, labels = torch.randn(batch, 3, 224, 224, device=device), torch.randint(1000, (batch,), device=device)
    return lambda model: F.cross_entropy(model(inputs), labels)


def _tokens(length: int, vocabulary: int) -> Callable[[int, torch.device], Loss]:
    def make(batch: int, device: torch.device) -> Loss:
        tokens = torch.randint(vocabulary, (batch, length), device=device)
        return lambda model: model(input_ids=tokens, labels=tokens).loss

    return make


def _bytes(length: int) -> Callable[[int, torch.device], Loss]:
    def make(batch: int, device: torch.device) -> Loss:
        tokens = torch.randint(256, (batch, length + 1), device=device)
        return lambda model: zoo.loss(model(tokens[:, :-1]), tokens[:, 1:])

    return make


def _zoo(name: str) -> Callable[[int, torch.device], Loss]:
    def make(batch: int, device: torch.device) -> Loss:
        inputs, targets = (part.to(device) for part in zoo.make_batch(name, batch))
        return lambda model: zoo.loss(model(inputs), targets)

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.device], Loss], int]] = {
    "resnet152": (_resnet152, _images, 32),
    "gpt2-medium": (functools.partial(_gpt2, n_embd=1024, n_layer=24, n_head=16), _tokens(1024, 50257), 8),
    "gpt2-large": (functools.partial(_gpt2, n_embd=1280, n_layer=36, n_head=20), _tokens(1024, 50257), 2),
    "byte-gpt-medium, 8192 bytes": (_byte_gpt, _bytes(8192), 4),
    "vit-large": (_vit, _images, 32),
    "bert-base": (_bert, _tokens(512, 30522), 16),
    "gpt-small": (functools.partial(zoo.build_model, "gpt-small"), _zoo("gpt-small"), 4),
    "resnet50": (functools.partial(zoo.build_model, "resnet50"), _zoo("resnet50"), 8),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=parameters[0].is_cuda)


@dataclass
class SparseState:
    residuals: dict[int, Tensor] = field(default_factory=dict)
    """By bucket."""
    steps: int = 0


def sparse_hook(state, bucket):  # type: ignore[no-untyped-def] # torch rejects annotations that are strings
    """Gather the largest 1 % of each rank on all ranks, with one residual and no other memory."""
    flat, ranks = bucket.buffer(), dist.get_world_size()
    dense = state.steps < 2  # DDP still changes its buckets
    state.steps += bucket.is_last()
    if dense:
        work = dist.all_reduce(flat.div_(ranks), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])
    if bucket.index() not in state.residuals:
        state.residuals[bucket.index()] = torch.zeros_like(flat)
    residual, count = state.residuals[bucket.index()], max(1, int(0.01 * flat.numel()))
    residual.add_(flat, alpha=1 / ranks)
    positions = torch.topk(residual.abs(), count, sorted=False).indices
    values, sent = residual[positions], positions.to(torch.int32)
    all_positions, all_values = sent.new_empty(ranks * count), values.new_empty(ranks * count)
    gather_into(all_positions, sent)
    gather_into(all_values, values)
    residual[positions] = 0
    flat.zero_().index_add_(0, all_positions, all_values)
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    done.set_result(flat)
    return done


def stepping(method: str, net: nn.Module, loss: Loss, device: torch.device) -> tuple[Callable[[], None], Any]:
    """One step of a method, and what it is to be closed with."""

    def autocast() -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    if method in ("ddp", "sparse-only"):
        model = DDP(net, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True)
        if method == "sparse-only":
            model.register_comm_hook(SparseState(), sparse_hook)
        optimizer = sgd(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            with autocast():
                value = loss(model)
            value.backward()
            optimizer.step()

        return step, None
    exchange = syncline.OkTopk() if "oktopk" in method else syncline.Dense()
    last = method.rpartition(", ")[2]
    trainer = syncline.Layerwise(
        net, sgd, exchange, activations=WAYS[last], residual="host" if last in ("host", "parked") else "device"
    )

    def layer_by_layer() -> None:
        with autocast():
            value = loss(trainer)  # type: ignore[arg-type]
        value.backward()

    return layer_by_layer, trainer


def clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seconds_of(step: Callable[[], None], count: int, device: torch.device) -> list[float]:
    took = []
    for _ in range(count):
        dist.barrier(device_ids=[0] if device.type == "cuda" else None)
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(device_ids=[0] if device.type == "cuda" else None)
        took.append(time.perf_counter() - start)
    return took


def other_bytes(device: torch.device) -> int:
    """Of the whole device, what no allocator holds, by rank."""
    if device.type != "cuda":
        return 0
    clean(device)
    dist.barrier(device_ids=[0])
    free, total = torch.cuda.mem_get_info()
    held = torch.tensor([torch.cuda.memory_reserved()], device=device)
    dist.all_reduce(held)
    return int((total - free - int(held)) / dist.get_world_size())


def joined(rank: Rank, name: str) -> tuple[torch.device, nn.Module]:
    """This rank's device, and the model as every method begins with it, in the host's memory."""
    device = rank.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank.init_process_group(timeout_s=300)
    torch.manual_seed(0)
    with torch.device(device):
        plain = MODELS[name][0]()
    return device, plain.cpu()


def measure(rank: Rank, name: str, batch: int, methods: list[str], rounds: int) -> Any:
    device, plain = joined(rank, name)
    loss = MODELS[name][1](batch, device)
    rows: dict[str, Any] = {method: {"seconds": []} for method in methods}
    for number in range(rounds):
        for method in methods if number % 2 == 0 else methods[::-1]:
            clean(device)
            net = copy.deepcopy(plain).to(device).train()
            with metered(device, [*net.parameters(), *net.buffers()]) as meter:
                step, trainer = stepping(method, net, loss, device)
                for _ in range(WARM_UP):
                    step()
                meter.restart()
                states = meter.now()
                step()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                row = rows[method]
                row["peak"], row["states"] = meter.peak(), states
                row["activations"] = row["peak"] - states
                if trainer is not None:
                    training = training_of(net, trainer._pipeline)
                    row["waiting"] = training.waiting_bytes
                    residual = "host" if method.endswith(("host", "parked")) else "device"
                    row["foreseen states"] = training.states_bytes(residual)
            row["seconds"] += seconds_of(step, STEPS, device)
            row["other"] = other_bytes(device)
            if device.type == "cuda":
                row["reserved"] = torch.cuda.max_memory_reserved()
            if trainer is not None:
                trainer.close()
            del step, trainer, net
            if rank.rank == 0:
                rank.say(f"{method}: peak {row['peak'] / 2**30:.2f} GiB, {min(row['seconds']) * 1e3:.0f} ms")
    foreseen = {}
    clean(device)
    net = plain.to(device).train()

    def in_autocast(model: nn.Module) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return loss(model)

    found = measure_activations(net, {1: in_autocast})
    waiting = max(row.get("waiting", 0) for row in rows.values())
    for way in ("keep", "recompute", "park"):
        foreseen[way] = peak_bytes(found, [way] * len(found.blocks), 1, waiting)
    return {"rows": rows, "foreseen": foreseen, "to_host_bps": found.to_host_bps, "blocks": len(found.blocks)}


def table(name: str, batch: int, answers: list[Any]) -> dict[str, Any]:
    rows = {}
    for method in answers[0]["rows"]:
        ranks = [answer["rows"][method] for answer in answers]
        seconds = [max(times) for times in zip(*(row["seconds"] for row in ranks), strict=True)]
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        rows[method] = {
            key: max(row.get(key, 0) for row in ranks)
            for key in ("peak", "states", "activations", "reserved", "other", "foreseen states")
        } | {"step_ms": middle * 1e3, "step_ms_low": low * 1e3, "step_ms_high": high * 1e3}
        last = method.rpartition(", ")[2]
        if last in WAYS and rows[method]["foreseen states"]:
            rows[method]["foreseen"] = rows[method]["foreseen states"] + answers[0]["foreseen"][WAYS[last]]
    return {
        "model": name,
        "batch": batch,
        "rows": rows,
        "blocks": answers[0]["blocks"],
        "to_host_bps": answers[0]["to_host_bps"],
    }


def show(one: dict[str, Any]) -> None:
    print(f"{one['model']}, batch {one['batch']}, {one['blocks']} blocks", flush=True)
    base = one["rows"].get("sparse-only")
    for method, row in one["rows"].items():
        less = f"{1 - row['peak'] / base['peak']:6.1%}" if base else ""
        foreseen = (
            f", foreseen {row['foreseen'] / 2**30:6.2f} ({row['foreseen'] / row['peak']:.3f})"
            if "foreseen" in row
            else ""
        )
        print(
            f"  {method:26} peak {row['peak'] / 2**30:6.2f} GiB {less}, states {row['states'] / 2**30:6.2f}, "
            f"activations {row['activations'] / 2**30:6.2f}, other {row['other'] / 2**30:5.2f}, "
            f"step {row['step_ms']:8.1f} ms ({row['step_ms_low']:.1f}–{row['step_ms_high']:.1f}){foreseen}",
            flush=True,
        )


CAPPED = {
    "gpt2-medium": {
        "sparse-only": [3, 2, 1],
        "memory-only": [14, 13, 12, 11, 10],
        "layerwise+oktopk, host": [14, 13, 12, 11, 10],
        "layerwise+oktopk, parked": [16, 15, 14, 13, 12],
    },
    "gpt2-large": {"sparse-only": [1], "memory-only": [5, 4, 3, 2], "layerwise+oktopk, parked": [8, 6, 4, 2]},
    "gpt-small": {"sparse-only": [2], "memory-only": [4], "layerwise+oktopk": [8]},
}
"""Batches per rank to try, the largest first."""
SLOW_S = 5.0
"""Of steps that take longer, fewer are made."""


def throughput(rank: Rank, name: str, method: str, batch: int, cap_bytes: int) -> Any:
    device, plain = joined(rank, name)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(cap_bytes / torch.cuda.mem_get_info()[1])
    clean(device)
    step, trainer = stepping(method, plain.to(device).train(), MODELS[name][1](batch, device), device)
    warm = seconds_of(step, 3, device)  # buckets are settled, kernels compiled, and all that is kept is there
    slow = torch.tensor(float(min(warm) > SLOW_S), device=device)
    dist.all_reduce(slow, op=dist.ReduceOp.MAX)
    if not slow:
        seconds_of(step, 3, device)
    seconds = seconds_of(step, 3 if slow else 12, device)
    low, took, high = statistics.quantiles(seconds, n=4, method="inclusive")
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    rate = rank.world_size * batch / took
    rank.say(f"{name}, {method}, batch {batch}: {took * 1e3:.0f} ms, {rate:.2f} samples/s, {peak / 2**30:.2f} GiB")
    if trainer is not None:
        trainer.close()
    return {
        "batch": batch,
        "samples_per_s": rate,
        "step_ms": took * 1e3,
        "step_ms_low": low * 1e3,
        "step_ms_high": high * 1e3,
        "steps": len(seconds),
        "peak": peak,
    }


def best_batch(args: argparse.Namespace, spec: ClusterSpec, name: str, method: str) -> dict[str, Any]:
    """The largest that fits, each tried by ranks of its own: nothing is left of one that did not fit."""
    refused: dict[int, str] = {}
    for batch in [args.batch] if args.batch else CAPPED[name][method]:
        start = time.perf_counter()
        try:
            answers = launch(
                spec,
                lambda rank, batch=batch: throughput(rank, name, method, batch, parse_bytes(args.cap)),
                deadline_s=args.deadline,
                on_event=lambda number, event: print(f"    {event}", flush=True) if number == 0 else None,
            )
        except syncline.SynclineError as error:
            found = [line.strip() for line in str(error).splitlines() if "out of memory" in line]
            refused[batch] = (found or str(error).splitlines())[0][:200]
            took = time.perf_counter() - start
            print(f"    {name}, {method}, batch {batch}: {refused[batch]} ({took:.0f} s)", flush=True)
            if not found:
                return {"batch": 0, "refused": refused, "error": str(error)[:400]}
        else:
            return {**answers[0], "refused": refused}
    return {"batch": 0, "refused": refused}


def capped(args: argparse.Namespace) -> None:
    rows = []
    spec = ClusterSpec(hosts=args.ranks, device=args.device, rate_bps=int(args.rate * 1e9))
    for name in args.models.split(";"):
        for method in [method for method in CAPPED[name] if method in args.methods.split(";")]:
            rows.append({"model": name, "method": method, **best_batch(args, spec, name, method)})
            if args.json:
                save(args, {"cap": args.cap, "rows": rows})


def save(args: argparse.Namespace, found: dict[str, Any]) -> None:
    about = {"ranks": args.ranks, "rate_gbps": args.rate, "device": args.device, "torch": str(torch.__version__)}
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    write_text(args.json, json.dumps({**about, "syncline": __version__, "date": date, **found}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--models", help=f"of {'; '.join(MODELS)}; under a cap of {'; '.join(CAPPED)}")
    parser.add_argument("--methods", default=";".join(METHODS))
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, help="2, or 4 under a cap")
    parser.add_argument("--rate", type=float, help="Gbit/s; 0: as fast as loopback is, and 1 under a cap")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cap", help="what the allocator may take, like 12GiB")
    parser.add_argument("--deadline", type=float, default=200)
    args = parser.parse_args()
    if args.cap:
        args.models, args.ranks, args.rate = args.models or "gpt2-medium;gpt2-large", args.ranks or 4, args.rate or 1.0
        capped(args)
        return
    args.models, args.ranks = args.models or "resnet152;gpt2-medium;byte-gpt-medium, 8192 bytes", args.ranks or 2
    found = []
    for name in args.models.split(";"):
        batch = args.batch or MODELS[name][2]
        rate = {"rate_bps": int(args.rate * 1e9)} if args.rate else {}
        spec = ClusterSpec(hosts=args.ranks, device=args.device, **rate)
        answers = launch(
            spec,
            lambda rank, name=name, batch=batch: measure(rank, name, batch, args.methods.split(";"), args.rounds),
            deadline_s=560,
            on_event=lambda _, event: print(f"    {event}", flush=True),
            shaped=bool(args.rate),
        )
        found.append(table(name, batch, answers))
        show(found[-1])
        if args.json:
            save(args, {"models": found})


if __name__ == "__main__":
    main()
