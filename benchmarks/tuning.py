"""`tune` on real models over emulated hosts: how long it takes, what it chooses, and that training goes on as before.

A CNN on digits and a small GPT on text, over slow links, over links with many ranks per host, and on one machine's
loopback interface where nothing helps. A model that was tuned and one that was not then train on the same batches.

    python benchmarks/tuning.py --json F
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from syncline.bench.rounds import Contender, combine, take_turns
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.files import write_text
from syncline.models import zoo
from training import TASKS, digits, text

CLUSTERS = {
    "4 hosts × 100 Mbit/s": (ClusterSpec(hosts=4, rate_bps=100_000_000), True),
    "2 hosts × 2 ranks, 100 Mbit/s": (ClusterSpec(hosts=2, per_host=(2, 2), rate_bps=100_000_000), True),
    "4 ranks, loopback": (ClusterSpec(hosts=4), False),
}
CASES = [
    (task, cluster, allow)
    for cluster in CLUSTERS
    for task in ("cnn", "gpt")
    for allow in ((), ("bf16",))
    if not (allow and cluster != "4 hosts × 100 Mbit/s")
]
STEPS = 12


def on_cluster(rank: Rank, name: str, allow: tuple[str, ...]) -> dict[str, Any]:
    rank.init_process_group()
    task = TASKS[name]
    generator = torch.Generator().manual_seed(1)
    inputs, targets = task.draw(rank.rank, generator)
    models, tuned = {}, None
    for which in ("plain", "tuned"):
        torch.manual_seed(0)
        model = DDP(task.build())
        if which == "tuned":
            tuned = syncline.tune(model, lambda one: zoo.loss(one(inputs), targets).backward(), allow=allow, quiet=True)
            assert tuned.model is model
        models[which] = model
    assert tuned is not None
    losses: dict[str, list[float]] = {which: [] for which in models}
    contenders = [Contender(which, _training(rank, name, model, losses[which])) for which, model in models.items()]
    record = take_turns(rank, contenders, warmup=0, rounds=STEPS)
    weights = {which: torch.cat([p.detach().flatten() for p in model.parameters()]) for which, model in models.items()}
    return {
        "record": record,
        "said": tuned.describe(),
        "seconds": tuned.seconds,
        "kept": "plain DDP" if tuned.handle is None else "the plan",
        "predicted_plain_ms": tuned.plan.plain_s * 1e3,
        "predicted_plan_ms": tuned.plan.iteration_s * 1e3,
        "loss_difference": max(abs(a - b) / abs(a) for a, b in zip(losses["plain"], losses["tuned"], strict=True)),
        "weight_difference": float((weights["plain"] - weights["tuned"]).abs().max()),
        "losses": losses,
        "mismatch": tuned.handle.mismatch if tuned.handle is not None else None,
    }


def _training(rank: Rank, name: str, model: DDP, losses: list[float]) -> Any:
    task = TASKS[name]
    optimizer = task.optimize(model.parameters(), task.lr, 0.9)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        inputs, targets = task.draw(rank.rank, generator)
        optimizer.zero_grad()
        loss = zoo.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    digits(), text()  # once, before ranks are forked
    rows = []
    for name, cluster, allow in CASES:
        spec, shaped = CLUSTERS[cluster]
        answers = launch(spec, partial(on_cluster, name=name, allow=allow), deadline_s=300, shaped=shaped)
        turns = combine([answer.pop("record") for answer in answers])
        answer = answers[0]
        plain, tuned = turns["plain"].quartiles, turns["tuned"].quartiles
        row = {"task": name, "cluster": cluster, "allow": list(allow), **answer, "ranks": spec.world_size}
        row |= {"plain_ms": plain.median * 1e3, "tuned_ms": tuned.median * 1e3}
        row |= {"tuned_vs_plain": turns["tuned"].ratio_to(turns["plain"]).median}
        rows.append(row)
        print(
            f"{name}, {cluster}, allow {allow or 'nothing'}: {answer['seconds']:.0f} s, {answer['kept']}; training "
            f"{plain.median * 1e3:.0f} → {tuned.median * 1e3:.0f} ms, losses differ by "
            f"{answer['loss_difference']:.1e}\n  {answer['said']}",
            flush=True,
        )
    if args.json:
        about = {"schema": 1, "torch": str(torch.__version__), "syncline": syncline.__version__}
        about |= {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        write_text(args.json, json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
