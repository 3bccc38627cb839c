"""Whether `tune` chooses the right rung: its choice for every quality, measured beside all rungs of the ladder.

In each cell, which is a model at a rate of the links between emulated hosts, `tune` chooses for all three qualities as
a user would let it. Then every rung with the settings that are predicted to suit it best, plain DDP, and the three
tuned models take turns in the same processes. Computation is real, on the cores that also communicate.

    python benchmarks/choice.py --json F [--rates 50,150] [--models cnn,gpt]     # cells that F has are not repeated
    python benchmarks/choice.py --report F

A choice is right if it is within 5 % of the fastest rung that its quality permits, and no gentler rung is within 5 % of
that one. Two rungs whose quartiles overlap, round by round against plain DDP, count as equally fast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import syncline
from syncline.bench.methods import slow_sgd
from syncline.bench.rounds import Contender, Turns, combine, take_turns, training_step
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.ddp.handle import Handle
from syncline.exchange import EXCHANGES, Dense, settings
from syncline.files import write_json
from syncline.models import zoo
from syncline.models.gpt import GPT
from syncline.plan.ladder import Attachment, Choice, rung_choices
from syncline.plan.rungs import QUALITIES, RUNGS
from syncline.predict.schedule import UPDATES
from syncline.tuning.apply import apply_choice, without_warmup
from training import small_resnet

RATES = (50, 150, 400, 1000)  # Mbit/s
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], str, int]] = {  # how to build it, its batches, their size
    "cnn": (zoo.cnn, "cnn", 128),
    "gpt": (lambda: GPT(width=128, layers=4, heads=4), "gpt-small", 8),
    "resnet": (small_resnet, "cnn", 64),
}
LOSSY = {16: "bf16", 8: "int8", 4: "int4"}
FORCED = {
    "overlap": Attachment(exchange=settings(Dense()), overlap=True),
    **{f"{bits} bits": Attachment(exchange=settings(EXCHANGES[name]())) for bits, name in LOSSY.items()},
    "sparse updates": Attachment(exchange=settings(UPDATES["oktopk-updates"].exchange), updates=True),
    "local steps": Attachment(exchange=settings(UPDATES["local-15"].exchange), updates=True, every=15),
}
"""How to attach a rung whose best settings are predicted to be no faster than plain DDP."""
PLAIN = "plain DDP"
TOLERANCE = 0.05
ROUNDS, WARMUP = (5, 11), 2
MEASURE_S = 25.0
_OVERLAPPING_STEPS = 4


def measured_cell(rank: Rank, model: str) -> dict[str, Any]:
    """Tune for each quality, and measure what was chosen beside all rungs."""
    rank.init_process_group()
    build, kind, batch = MODELS[model]
    inputs, targets = zoo.make_batch(kind, batch, torch.Generator().manual_seed(rank.rank))

    def built() -> DDP:
        torch.manual_seed(0)
        return DDP(build())

    contenders: list[Contender] = []
    tuned: dict[str, syncline.Tuned] = {}
    for quality in reversed(QUALITIES):  # the probe of "close" includes what the others need
        ddp = built()
        optimizer = slow_sgd(ddp.parameters())
        links = tuned["close"].network if tuned else None
        tuned[quality] = syncline.tune(
            ddp,
            lambda net: zoo.loss(net(inputs), targets).backward(),
            optimizer=optimizer,
            quality=quality,
            network=links,
            warmup=0 if quality == "close" else None,
            cache=False,
            quiet=True,
        )
        choice = tuned[quality].choice if tuned[quality].handle is not None else None
        contenders.append(_contender(f"tune {quality}", ddp, optimizer, choice, tuned[quality].handle, inputs, targets))
    network, profile = tuned["close"].network, tuned["close"].profile
    choices: dict[str, Choice | None] = {PLAIN: None}
    if network is not None:
        choices |= {choice.rung: choice for choice in rung_choices(profile, network)}
    for name, choice in choices.items():
        ddp = built()
        optimizer, handle = slow_sgd(ddp.parameters()), None
        if choice is not None and choice.nothing and name in FORCED:  # measured all the same
            choice = choices[name] = msgspec.structs.replace(choice, attachment=FORCED[name])
        if choice is not None and not choice.nothing:
            stepped = optimizer if choice.needs_optimizer else None
            if choice.attachment is None:
                choice = msgspec.structs.replace(choice, plan=without_warmup(choice.plan))
            handle = apply_choice(
                ddp, choice, network=network, timeout_s=None, scaler=None, optimizer=stepped, warmup=0
            )
        contenders.append(_contender(name, ddp, optimizer, choice, handle, inputs, targets))
    round_s = (3 + len(choices)) * tuned["close"].choice.plain_s + 20 * profile.step_s
    rounds = max(ROUNDS[0], min(ROUNDS[1], round(MEASURE_S / round_s) - WARMUP))
    record = take_turns(rank, contenders, warmup=WARMUP, rounds=rounds)
    return {
        "record": record,
        "steps": {contender.name: contender.steps for contender in contenders},
        "tuned": {quality: _about(tuned[quality]) for quality in QUALITIES},
        "predicted_ms": {name: choice.iteration_s * 1e3 for name, choice in choices.items() if choice is not None},
        "calls": {name: _call(choice) for name, choice in choices.items()},
        "compute_ms": profile.step_s * 1e3,
        "plain_predicted_ms": tuned["close"].choice.plain_s * 1e3,
    }


def _contender(
    name: str,
    ddp: DDP,
    optimizer: Optimizer,
    choice: Choice | None,
    handle: Handle | None,
    inputs: Tensor,
    targets: Tensor,
) -> Contender:
    step = training_step(ddp, lambda: zoo.loss(ddp(inputs), targets), optimizer)
    attachment = None if choice is None else choice.attachment
    if handle is None or attachment is None or not (attachment.updates or attachment.overlap):
        return Contender(name, step)
    period = _OVERLAPPING_STEPS if attachment.overlap else attachment.every

    def steps() -> None:
        for _ in range(period):
            step()
        if not attachment.overlap:
            handle.wait()

    if attachment.overlap:
        return Contender(name, steps, period, lead=step, lead_steps=1, settle=handle.wait)
    return Contender(name, steps, period)


def _call(choice: Choice | None) -> str:
    if choice is None or choice.nothing:
        return PLAIN
    if choice.attachment is not None:
        return choice.attachment.code()
    names = sorted({repr(exchange) for exchange in choice.plan.exchanges})
    return f"{len(choice.plan.buckets)} buckets, {choice.plan.lanes} lanes: {', '.join(names)}"


def _about(tuned: syncline.Tuned) -> dict[str, Any]:
    return {
        "chosen": tuned.choice.rung if not tuned.choice.nothing else PLAIN,
        "taken": PLAIN if tuned.handle is None else tuned.choice.rung,
        "call": _call(tuned.choice),
        "seconds": tuned.seconds,
        "said": tuned.describe(),
        "rungs": msgspec.to_builtins(tuned.choice.rungs),
    }


# --- verdicts ---------------------------------------------------------------------------------------------------------


def cell_of(hosts: int, per_host: int, mbit: int, model: str) -> dict[str, Any]:
    spec = ClusterSpec(hosts=hosts, per_host=(per_host,) * hosts, rate_bps=mbit * 10**6)
    answers = launch(spec, partial(measured_cell, model=model), deadline_s=240)
    turns = combine([answer["record"] for answer in answers], answers[0]["steps"])
    kept = {name: value for name, value in answers[0].items() if name not in ("record", "steps")}
    seconds = {name: turn.seconds for name, turn in turns.items()}
    return {"hosts": hosts, "per_host": per_host, "mbit": mbit, "model": model, **kept, "seconds": seconds}


def verdicts(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each quality what was taken, what was best, and whether a gentler rung would have been as fast."""
    turns = {name: Turns(seconds, 0.0) for name, seconds in cell["seconds"].items()}
    quality_of = {rung.name: rung.quality for rung in RUNGS}
    order = [PLAIN, *[rung.name for rung in RUNGS if rung.name in turns]]
    found = []
    for quality in QUALITIES:
        allowed = QUALITIES[: QUALITIES.index(quality) + 1]
        names = [name for name in order if name == PLAIN or quality_of[name] in allowed]
        taken = cell["tuned"][quality]["taken"]
        # The tuned model itself was measured, too; its rung may have been measured with other settings.
        own = turns[f"tune {quality}"]
        best = min(names, key=lambda name: turns[name].quartiles.median)
        ratio = own.ratio_to(turns[best])
        as_good = ratio.median <= 1 + TOLERANCE or ratio.low <= 1
        gentler = [name for name in names[: names.index(taken)] if turns[name].ratio_to(own).low <= 1]
        found.append(
            {
                "quality": quality,
                "taken": taken,
                "chosen": cell["tuned"][quality]["chosen"],
                "best": best,
                "taken_ms": own.quartiles.median * 1e3,
                "best_ms": turns[best].quartiles.median * 1e3,
                "ratio": ratio.median,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
                "fast_enough": as_good,
                "gentler": gentler,
                "right": as_good and not gentler,
            }
        )
    return found


def report(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = []
    for cell in cells:
        where = f"{cell['hosts']} × {cell['per_host']}, {cell['mbit']} Mbit/s, {cell['model']}"
        print(f"{where}: computes {cell['compute_ms']:.1f} ms")
        for name, seconds in cell["seconds"].items():
            spread = Turns(seconds, 0.0).quartiles
            predicted = cell["predicted_ms"].get(name, cell["plain_predicted_ms"] if name == PLAIN else None)
            said = "" if predicted is None else f"predicted {predicted:7.1f} {predicted / spread.median / 1e3 - 1:+.1%}"
            call = cell["calls"].get(name, "")
            times = f"{spread.median * 1e3:7.1f} ({spread.low * 1e3:.1f}–{spread.high * 1e3:.1f})"
            print(f"    {name:15s} {times} {said} {call}")
        for verdict in verdicts(cell):
            rows.append({"mbit": cell["mbit"], "model": cell["model"], **verdict})
            mark = "right" if verdict["right"] else "WRONG"
            ratios = f"{verdict['ratio']:.3f} ({verdict['ratio_low']:.3f}–{verdict['ratio_high']:.3f})"
            gentler = f", gentler and as fast: {', '.join(verdict['gentler'])}" if verdict["gentler"] else ""
            taken = f"{verdict['taken']} (chosen before the trial: {verdict['chosen']})"
            print(f"  {verdict['quality']:6s} {mark}: took {taken}, best {verdict['best']}, {ratios}{gentler}")
    right = sum(row["right"] for row in rows)
    print(f"{right} of {len(rows)} choices are right")
    ratios = [row["ratio"] for row in rows]
    return {"right": right, "choices": len(rows), "median_ratio": statistics.median(ratios), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1)
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="in Mbit/s")
    parser.add_argument("--models", default=",".join(MODELS))
    args = parser.parse_args()
    if args.report:
        report(json.loads(args.report.read_text())["cells"])
        return
    cells = json.loads(args.json.read_text())["cells"] if args.json and args.json.exists() else []
    known = {(cell["hosts"], cell["per_host"], cell["mbit"], cell["model"]) for cell in cells}
    for mbit in map(int, args.rates.split(",")):
        for model in args.models.split(","):
            if (args.hosts, args.per_host, mbit, model) in known:
                continue
            began_s = time.monotonic()
            cells.append(cell_of(args.hosts, args.per_host, mbit, model))
            print(f"{mbit} Mbit/s, {model}: {time.monotonic() - began_s:.0f} s", flush=True)
            if args.json:
                about = {"schema": 1, "torch": str(torch.__version__), "syncline": syncline.__version__}
                about |= {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
                write_json(args.json, {**about, "cells": cells})
    summary = report(cells)
    if args.json:
        stored = json.loads(args.json.read_text())
        write_json(args.json, {**stored, "summary": summary})


if __name__ == "__main__":
    main()
