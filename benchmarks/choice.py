"""Whether `tune` chooses the right rung: its choice for every quality, measured beside all rungs of the ladder.

In each cell, which is a model at a rate of the links between emulated hosts, `tune` chooses for all three qualities, in
new processes each. Then every rung with the settings that are predicted to suit it best, plain DDP, and the three
choices take turns in the same processes. Computation is real, on the cores that also communicate.

    python benchmarks/choice.py --json F [--rates 50,150] [--models cnn,gpt]     # cells that F has are not repeated
    python benchmarks/choice.py --report F

A choice is right if it is within 5 % of the fastest rung that its quality permits, and no gentler rung is within 5 % of
that one. Two rungs whose quartiles overlap, round by round against plain DDP, count as equally fast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from syncline.bench.methods import slow_sgd
from syncline.bench.rounds import Contender, Turns, combine, take_turns, training_step
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.exchange import EXCHANGES, Dense, settings
from syncline.files import write_json
from syncline.models import zoo
from syncline.models.gpt import GPT
from syncline.plan.choice import Attachment, Choice
from syncline.plan.ladder import rung_choices
from syncline.plan.rungs import QUALITIES, RUNGS
from syncline.predict.schedule import UPDATES
from syncline.records.network import Network
from syncline.records.profile import Profile
from syncline.tuning.apply import apply_choice, without_warmup
from syncline.tuning.choose import plain_choice
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
KEPT_MEMORY = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(1 << 32))
"""Settings of the C library: memory stays with the process. Otherwise a step of the CNN takes 52 to 72 ms, depending on
how much of its memory the process happens to return."""
PLAIN = "plain DDP"
TOLERANCE = 0.05
STEPS, ROUNDS, WARMUP = 3, 6, 3


def tuned_choice(rank: Rank, model: str, quality: str, network: Network | None) -> dict[str, Any]:
    """Let `tune` choose, in new processes, as a script would."""
    rank.init_process_group()
    ddp, loss_of = _built(rank, model)
    optimizer = slow_sgd(ddp.parameters())
    warmup = 0 if quality == "close" else None
    options: dict[str, Any] = {"quality": quality, "network": network, "warmup": warmup, "cache": False, "quiet": True}
    tuned = syncline.tune(ddp, lambda net: loss_of(net).backward(), optimizer=optimizer, **options)
    taken = tuned.handle is not None
    about = {"taken": tuned.choice.rung if taken else PLAIN, "seconds": tuned.seconds, "said": tuned.describe()}
    stored = {"choice": tuned.choice if taken else None, "network": tuned.network, "profile": tuned.profile}
    plain = plain_choice(tuned.profile, ddp.process_group, tuned.profile.step_s, "")
    return {**about, "plain": msgspec.to_builtins(plain), **msgspec.to_builtins(stored)}


def measured(
    rank: Rank, model: str, choices: dict[str, Choice | None], network: Network | None, profiles: dict[str, Profile]
) -> dict[str, Any]:
    """Let training steps with these choices, or plain DDP, take turns."""
    rank.init_process_group()
    contenders = [
        _contender(rank, model, name, choice, network, profiles.get(name, profiles["close"]))
        for name, choice in choices.items()
    ]
    record = take_turns(rank, contenders, warmup=WARMUP, rounds=ROUNDS)
    return {"record": record, "steps": {contender.name: contender.steps for contender in contenders}}


def _built(rank: Rank, model: str) -> tuple[DDP, Callable[[nn.Module], Tensor]]:
    build, kind, batch = MODELS[model]
    inputs, targets = zoo.make_batch(kind, batch, torch.Generator().manual_seed(rank.rank))
    torch.manual_seed(0)
    return DDP(build()), lambda net: zoo.loss(net(inputs), targets)


def _contender(
    rank: Rank, model: str, name: str, choice: Choice | None, network: Network | None, profile: Profile
) -> Contender:
    """Return several steps in a row, because a link carries a single one faster, in a burst."""
    ddp, loss_of = _built(rank, model)
    optimizer, handle = slow_sgd(ddp.parameters()), None
    if choice is not None:
        stepped = optimizer if choice.needs_optimizer else None
        plan = choice.plan if choice.attachment is not None else without_warmup(choice.plan)
        applied = msgspec.structs.replace(choice, plan=plan)
        options: dict[str, Any] = {"network": network, "timeout_s": None, "scaler": None, "profile": profile}
        handle = apply_choice(ddp, applied, optimizer=stepped, warmup=0, **options)
    step = training_step(ddp, lambda: loss_of(ddp), optimizer)
    count = max(STEPS, 1 if choice is None else choice.period)
    attachment = None if choice is None else choice.attachment

    def steps() -> None:
        for _ in range(count):
            step()
        if handle is not None and attachment is not None and attachment.updates:
            handle.wait()

    settle = handle.wait if handle is not None and attachment is not None and attachment.overlap else lambda: None
    return Contender(name, steps, count, lead=step, lead_steps=1, settle=settle)


def _call(choice: Choice | None) -> str:
    if choice is None or choice.nothing:
        return PLAIN
    if choice.attachment is not None:
        return choice.attachment.code()
    names = sorted({repr(exchange) for exchange in choice.plan.exchanges})
    return f"{len(choice.plan.buckets)} buckets, {choice.plan.lanes} lanes: {', '.join(names)}"


# --- cells and verdicts -----------------------------------------------------------------------------------------------


def cell_of(hosts: int, per_host: int, mbit: int, model: str) -> dict[str, Any]:
    spec = ClusterSpec(hosts=hosts, per_host=(per_host,) * hosts, rate_bps=mbit * 10**6)
    network: Network | None = None
    tuned: dict[str, dict[str, Any]] = {}
    for quality in reversed(QUALITIES):  # the probe of "close" includes what the others need
        main = partial(tuned_choice, model=model, quality=quality, network=network)
        tuned[quality] = launch(spec, main, deadline_s=120)[0]
        probed = tuned[quality].pop("network")
        network = network or msgspec.convert(probed, Network | None)
    profiles = {quality: msgspec.convert(answer["profile"], Profile) for quality, answer in tuned.items()}
    profile = profiles["close"]
    choices: dict[str, Choice | None] = {PLAIN: None}
    if network is not None:
        choices |= {choice.rung: choice for choice in rung_choices(profile, network)}
    predicted_ms = {name: choice.iteration_s * 1e3 for name, choice in choices.items() if choice is not None}
    for name, attachment in FORCED.items():  # rungs that are predicted to be no faster are measured all the same
        choice = choices.get(name)
        if choice is None or choice.nothing:
            base = choice or msgspec.convert(tuned["close"]["plain"], Choice)
            choices[name] = msgspec.structs.replace(base, rung=name, attachment=attachment)
    for quality, answer in tuned.items():
        choices[f"tune {quality}"] = msgspec.convert(answer.pop("choice"), Choice | None)
        del answer["profile"], answer["plain"]
    same_as = _duplicates(choices)
    unique = {name: choice for name, choice in choices.items() if same_as[name] == name}
    profiles |= {f"tune {quality}": profiles[quality] for quality in QUALITIES}
    main = partial(measured, model=model, choices=unique, network=network, profiles=profiles)
    answers = launch(spec, main, deadline_s=240)
    turns = combine([answer["record"] for answer in answers], answers[0]["steps"])
    return {
        "hosts": hosts,
        "per_host": per_host,
        "mbit": mbit,
        "model": model,
        "tuned": tuned,
        "compute_ms": profile.step_s * 1e3,
        "predicted_ms": predicted_ms,
        "calls": {name: _call(choice) for name, choice in choices.items()},
        "seconds": {name: turns[same].seconds for name, same in same_as.items()},
    }


def _duplicates(choices: dict[str, Choice | None]) -> dict[str, str]:
    """Return for each choice the first one that exchanges in the same way, which is measured once."""
    firsts: dict[bytes, str] = {}
    same_as = {}
    for name, choice in choices.items():
        nothing = choice is None or choice.nothing
        content = b"" if nothing else msgspec.json.encode([choice.plan.buckets, choice.plan.lanes, choice.attachment])
        same_as[name] = firsts.setdefault(content, name)
    return same_as


def verdicts(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each quality what was taken, what was best, and whether a gentler rung would have been as fast."""
    turns = {name: Turns(seconds, 0.0) for name, seconds in cell["seconds"].items()}
    quality_of = {PLAIN: "exact", **{rung.name: rung.quality for rung in RUNGS}}
    order = [PLAIN, *[rung.name for rung in RUNGS if rung.name in turns]]
    found = []
    for quality in QUALITIES:
        allowed = QUALITIES[: QUALITIES.index(quality) + 1]
        names = [name for name in order if quality_of[name] in allowed]
        taken, own = cell["tuned"][quality]["taken"], turns[f"tune {quality}"]
        best = min(names, key=lambda name: turns[name].quartiles.median)
        ratio = own.ratio_to(turns[best])
        as_good = ratio.median <= 1 + TOLERANCE or ratio.low <= 1
        # Plain DDP and other buckets give up nothing, so neither is gentler than the other.
        first = 0 if taken in (PLAIN, "lossless") else names.index(taken)
        gentler = [name for name in names[:first] if turns[name].ratio_to(own).low <= 1]
        found.append(
            {
                "quality": quality,
                "taken": taken,
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
            predicted = cell["predicted_ms"].get(name)
            said = "" if predicted is None else f"predicted {predicted:7.1f} {predicted / spread.median / 1e3 - 1:+.1%}"
            call = cell["calls"].get(name, "")
            times = f"{spread.median * 1e3:7.1f} ({spread.low * 1e3:.1f}–{spread.high * 1e3:.1f})"
            print(f"    {name:15s} {times} {said} {call}")
        for verdict in verdicts(cell):
            rows.append({"mbit": cell["mbit"], "model": cell["model"], **verdict})
            mark = "right" if verdict["right"] else "WRONG"
            ratios = f"{verdict['ratio']:.3f} ({verdict['ratio_low']:.3f}–{verdict['ratio_high']:.3f})"
            gentler = f", gentler and as fast: {', '.join(verdict['gentler'])}" if verdict["gentler"] else ""
            print(
                f"  {verdict['quality']:6s} {mark}: took {verdict['taken']}, best {verdict['best']}, {ratios}{gentler}"
            )
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
    if not set(KEPT_MEMORY) <= set(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEPT_MEMORY})  # noqa: S606
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
