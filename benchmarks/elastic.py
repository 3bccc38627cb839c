"""Kill replicas of a training at random moments: how long do the others stop, and how good is the model at the end?

Four replicas train a small GPT on the text of Python's standard library, and exchange their updates every few steps. A
supervisor kills one of them at a time with SIGKILL and starts it again, as soon as the former victim takes part again.
Moments are drawn with a seed: while the victim computes, exchanges, writes a checkpoint, or joins. What it did when the
signal struck is in the table. The same training without kills is the baseline of the loss. Every replica logs a digest
of the agreed weights after each exchange.

    python benchmarks/elastic.py --kills 10 --seed 1 --json benchmarks/results/elastic-$(date +%F).json  # five minutes
    python benchmarks/elastic.py --kills 10 --seed 2 --json …
    python benchmarks/elastic.py --undisturbed --json …
    python benchmarks/elastic.py --cut 30 --json …                       # a link is cut for 30 s; needs namespaces

The learning rate is constant, and falls to zero in the last exchanges, so that a training can end when all kills are
done.

Exit 1 if a replica raises, stops for over 15 s, does not come back within 60 s, or differs from the others.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import math
import mmap
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPLICAS, EVERY, BATCH, CONTEXT = 4, 10, 8, 64
WARM_UP, DECAY = 20, 80  # exchanges
STOP_S, BACK_S, LOSS = 15.0, 60.0, 0.01
_PHASE_BYTES = 32
_PHASES = {  # of the engine, by the method that runs it
    "_exchange": "quorum",
    "_connected": "connecting",
    "_computed": "exchange",
    "_votes": "vote",
    "_commit": "commit",
    "_heal": "sending state",
}


# --- a replica --------------------------------------------------------------------------------------------------


class Phase:
    """What a process does, in memory that outlives it."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(b"\0" * _PHASE_BYTES)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _PHASE_BYTES)

    def set(self, name: str) -> None:
        self._memory[:] = name.encode().ljust(_PHASE_BYTES, b"\0")

    def get(self) -> str:
        return self._memory[:].rstrip(b"\0").decode()


def watch_engine(phase: Phase) -> None:
    """Record the phases of an exchange."""
    from syncline.elastic.engine import Engine

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any) -> Any:
            before = phase.get()
            phase.set(name if before != "join" else "join")
            try:
                return method(*arguments)
            finally:
                phase.set(before)

        return call

    for method, name in _PHASES.items():
        setattr(Engine, method, watched(name, getattr(Engine, method)))


def replica(lighthouse: str, name: str, incarnation: int, folder: Path, cut: Any = None) -> None:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from safetensors.torch import save_file
    from torch import Tensor

    import syncline
    from syncline.elastic import Manager
    from syncline.exchange import EXCHANGES
    from syncline.models.gpt import GPT

    torch.set_num_threads(1)
    phase = Phase(folder / f"phase-{name}")
    phase.set("start")
    watch_engine(phase)
    train, held_out = (torch.from_numpy(np.fromfile(folder / f"{part}.bin", np.uint8)) for part in ("train", "held"))
    torch.manual_seed(0)
    net = GPT(width=64, layers=2, heads=4, context=CONTEXT)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1000 * int(name) + incarnation)

    def batch(text: Tensor, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=draw)
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]

    def loss_of(rows: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(net(rows[0]).flatten(0, 1), rows[1].flatten())

    exchange = EXCHANGES[(folder / "exchange").read_text()]()
    log = (folder / f"log-{name}-{incarnation}.jsonl").open("w")

    def write(**fields: Any) -> None:
        log.write(json.dumps({"time_s": time.monotonic(), **fields}) + "\n")
        log.flush()

    manager = Manager(lighthouse, name=name)
    phase.set("join")
    handle = syncline.attach(net, exchange, optimizer=optimizer, every=EVERY, manager=manager)
    phase.set("computation")
    stats = handle.stats()
    write(joined=stats.exchanges)
    if cut is not None:
        cut()
    before_s, gap_s, before = time.monotonic(), 0.0, stats.exchanges
    end = math.inf
    while before < end:
        if end == math.inf and (folder / "end").exists():
            end = int((folder / "end").read_text())
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, before / WARM_UP, (end - before) / DECAY)
        optimizer.zero_grad()
        loss_of(batch(train, BATCH, generator)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        now_s = time.monotonic()
        gap_s, before_s = max(gap_s, now_s - before_s), now_s
        stats = handle.stats()
        if stats.exchanges != before:
            before = stats.exchanges
            with handle.synced():
                bits = b"".join(tensor.numpy().tobytes() for tensor in net.state_dict().values())
                if stats.exchanges % 4 == 0:
                    phase.set("checkpoint")
                    draft = folder / f"checkpoint-{name}.draft"
                    save_file(dict(net.state_dict()), str(draft))
                    draft.replace(draft.with_suffix(".safetensors"))
                    phase.set("computation")
            digest = hashlib.sha256(bits).hexdigest()[:16]
            write(exchange=before, digest=digest, replicas=stats.replicas, gap_s=gap_s, steps=stats.steps)
            gap_s, before_s = 0.0, time.monotonic()
    draw = torch.Generator().manual_seed(7)
    with handle.synced(), torch.no_grad():
        held_out_loss = sum(float(loss_of(batch(held_out, 64, draw))) for _ in range(32)) / 32
    write(held_out_loss=held_out_loss, stats={**vars(stats), "buckets": []})
    phase.set("end")
    manager.shutdown()


def write_task(folder: Path, exchange: str) -> None:
    from syncline.models.data import library_text

    text = library_text()
    (folder / "train.bin").write_bytes(text.train)
    (folder / "held.bin").write_bytes(text.held_out)
    (folder / "exchange").write_text(exchange)


def end_after(folder: Path, exchanges: int) -> None:
    (folder / "end.draft").write_text(str(exchanges))
    (folder / "end.draft").rename(folder / "end")


# --- the supervisor ---------------------------------------------------------------------------------------------


class Training:
    """Replicas, and what they have logged."""

    def __init__(self, folder: Path, exchange: str) -> None:
        from torchft.coordination import LighthouseServer

        self.folder = folder
        write_task(folder, exchange)
        options = {"min_replicas": 1, "join_timeout_ms": 10_000, "heartbeat_timeout_ms": 5_000}
        self.lighthouse = LighthouseServer(bind="127.0.0.1:0", **options)
        self._address = f"http://127.0.0.1:{self.lighthouse.address().rpartition(':')[2]}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.incarnations: dict[str, int] = {}
        self.raised: list[str] = []
        for number in range(REPLICAS):
            self.start(str(number))

    def start(self, name: str) -> None:
        number = self.incarnations[name] = self.incarnations.get(name, -1) + 1
        command = [sys.executable, __file__, "--replica", name, "--incarnation", str(number)]
        command += ["--lighthouse", self._address, "--folder", str(self.folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        with (self.folder / f"output-{name}-{number}").open("wb") as output:
            streams = {"stdout": output, "stderr": output}
            self.processes[name] = subprocess.Popen(command, env=environment, **streams)  # type: ignore[call-overload]

    def log(self, name: str, incarnation: int | None = None) -> list[dict[str, Any]]:
        number = self.incarnations[name] if incarnation is None else incarnation
        path = self.folder / f"log-{name}-{number}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        entries = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a victim may be incomplete
                entries.append(json.loads(line))
        return entries

    def back_s(self, name: str) -> float | None:
        """When this process of a replica first took part in an exchange, or None."""
        return next((entry["time_s"] for entry in self.log(name) if "exchange" in entry), None)

    def latest(self) -> int:
        return max((e["exchange"] for n in self.processes for e in self.log(n)[-1:] if "exchange" in e), default=0)

    def phase(self, name: str) -> Phase:
        return Phase(self.folder / f"phase-{name}")

    def check(self) -> None:
        for name, process in self.processes.items():
            if process.poll() not in (None, 0):
                output = (self.folder / f"output-{name}-{self.incarnations[name]}").read_text()
                raise SystemExit(f"replica {name} ended with {process.returncode}:\n{output[-3000:]}")

    def wait(self, what: str, condition: Callable[[], Any], limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while not condition():
            self.check()
            if time.monotonic() > end_s:
                raise SystemExit(f"{what}: not within {limit_s:g} s")
            time.sleep(0.02)

    def wait_until_back(self, name: str) -> None:
        self.wait(f"replica {name} back", lambda: self.back_s(name), 90)

    def wait_for_phase(self, name: str, wanted: str, limit_s: float) -> None:
        phase = self.phase(name)
        self.wait(wanted, lambda: phase.get() == wanted, limit_s)

    def kill(self, name: str) -> tuple[float, str]:
        """Kill a replica and start it again. Return when, and in which phase."""
        self.processes[name].kill()
        now_s = time.monotonic()
        self.processes[name].wait()
        phase = self.phase(name).get()
        self.start(name)
        return now_s, phase

    def end(self, exchanges: int, limit_s: float) -> None:
        """Let all replicas train until this number of exchanges, and wait for them."""
        end_after(self.folder, exchanges)
        self.wait("the end", lambda: all(p.poll() is not None for p in self.processes.values()), limit_s)
        self.check()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.lighthouse.shutdown()

    def entries(self) -> list[dict[str, Any]]:
        """Everything that all processes have logged, with the replica."""
        every = [(n, i) for n, last in self.incarnations.items() for i in range(last + 1)]
        return [{**entry, "replica": n, "incarnation": i} for n, i in every for entry in self.log(n, i)]


def kill_all(training: Training, kills: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    aims = [("computation", "exchange", "checkpoint", "exchange", "join")[number % 5] for number in range(kills)]
    draw.shuffle(aims)
    rows: list[dict[str, Any]] = []
    victim = ""
    training.wait("the start", lambda: all(training.back_s(name) for name in training.processes), 180)
    for number, aim in enumerate(aims):
        if aim == "join" and victim:  # the last victim again, while it joins
            training.wait_for_phase(victim, "join", 90)
            time.sleep(draw.uniform(0.0, 1.0))
        else:
            if victim:
                training.wait_until_back(victim)
            time.sleep(draw.uniform(0.5, 3.0))
            victim = draw.choice(sorted(training.processes))
            await_phase(training, victim, aim, draw)
        exchange = training.latest()
        at_s, phase = training.kill(victim)
        rows.append({"kill": number + 1, "replica": victim, "aim": aim, "phase": phase, "exchange": exchange})
        rows[-1] |= {"at_s": at_s, "next_incarnation": training.incarnations[victim]}
        print(f"kill {number + 1}: replica {victim} in {phase} after exchange {exchange}", flush=True)
    if victim:
        training.wait_until_back(victim)
    return rows


def await_phase(training: Training, victim: str, aim: str, draw: random.Random) -> None:
    phase, end_s = training.phase(victim), time.monotonic() + 20
    wanted = set(_PHASES.values()) if aim == "exchange" else {aim}
    late_s = draw.uniform(0.0, {"exchange": 0.05, "checkpoint": 0.01}.get(aim, 0.5))
    while aim != "computation" and phase.get() not in wanted and time.monotonic() < end_s:
        time.sleep(0.0005)
    time.sleep(late_s)


def finish(training: Training, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Add to the rows how long the others stopped and how long the victim was away, and compare all digests."""
    entries = training.entries()
    gaps = [e for e in entries if "gap_s" in e]
    for row in rows:
        began_s, until_s = row["at_s"] - 1.0, row["at_s"] + 30.0
        others = [e["gap_s"] for e in gaps if e["replica"] != row["replica"] and began_s < e["time_s"] < until_s]
        row["others_stopped_s"] = round(max(others, default=0.0), 2)
        mine = [e for e in entries if e["replica"] == row["replica"] and e["incarnation"] >= row["next_incarnation"]]
        back = min((e["time_s"] for e in mine if "exchange" in e), default=math.inf)
        row["back_after_s"] = round(back - row.pop("at_s"), 1)
        del row["next_incarnation"]
    by_exchange: dict[int, set[str]] = {}
    for entry in gaps:
        by_exchange.setdefault(entry["exchange"], set()).add(entry["digest"])
    ends = [entry for entry in entries if "held_out_loss" in entry]
    return {
        "exchanges": max(by_exchange),
        "compared_digests": len(gaps),
        "differing_exchanges": sum(len(digests) > 1 for digests in by_exchange.values()),
        "held_out_loss": {entry["replica"]: entry["held_out_loss"] for entry in ends},
        "longest_stop_s": round(max(entry["gap_s"] for entry in gaps), 2),
        "replicas_at_end": len(ends),
        "failed_exchanges": sum(entry["stats"]["failed"] for entry in ends),
        "skipped_exchanges": sum(entry["stats"]["skipped"] for entry in ends),
        "seconds": round(max(e["time_s"] for e in entries) - min(e["time_s"] for e in entries), 1),
    }


def run(exchange: str, exchanges: int, kills: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        training = Training(Path(name), exchange)
        try:
            rows = kill_all(training, kills, seed)
            print(f"all kills done at exchange {training.latest()}", flush=True)
            training.end(max(exchanges, training.latest() + DECAY), 420)
            return {**finish(training, rows), "kills": rows}
        finally:
            training.close()


# --- a link that is cut -----------------------------------------------------------------------------------------


def run_cut(exchange: str, exchanges: int, cut_s: float) -> dict[str, Any]:
    """Cut the link of one of four emulated hosts. A fifth host has the lighthouse."""
    from syncline.cluster import ClusterSpec, Rank, launch, links

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def main(rank: Rank) -> Any:
            address = f"{links.host_address(0)}:29510"
            if rank.rank == 0:
                from torchft.coordination import LighthouseServer

                options = {"min_replicas": 1, "join_timeout_ms": 10_000, "heartbeat_timeout_ms": 5_000}
                server = LighthouseServer(bind=address, **options)
                while sum((folder / f"done-{number}").exists() for number in range(REPLICAS)) < REPLICAS:
                    time.sleep(0.2)
                server.shutdown()
                return None
            moments: dict[str, float] = {}

            def cut() -> None:
                def later() -> None:
                    time.sleep(5.0)
                    moments["cut_s"] = time.monotonic()
                    links.cut()
                    time.sleep(cut_s)
                    links.mend()
                    moments["mended_s"] = time.monotonic()

                threading.Thread(target=later, daemon=True).start()

            time.sleep(1.0)
            victim = rank.rank == REPLICAS
            replica(f"http://{address}", str(rank.rank - 1), 0, folder, cut if victim else None)
            (folder / f"done-{rank.rank - 1}").touch()
            return moments

        write_task(folder, exchange)
        end_after(folder, exchanges)
        os.environ["RUST_LOG"] = "error"
        moments = launch(ClusterSpec(hosts=REPLICAS + 1, rate_bps=200_000_000), main, deadline_s=400, shaped=True)
        logs = {n: [json.loads(x) for x in (folder / f"log-{n}-0.jsonl").read_text().splitlines()] for n in range(4)}
    victim, when = REPLICAS - 1, moments[-1]
    exchanged = {n: [e for e in log if "exchange" in e] for n, log in logs.items()}
    without = [e for e in exchanged[0] if str(victim) not in e["replicas"]]
    back_s = min(e["time_s"] for e in exchanged[victim] if e["time_s"] > when["mended_s"])
    digests: dict[int, set[str]] = {}
    for entry in (e for entries in exchanged.values() for e in entries):
        digests.setdefault(entry["exchange"], set()).add(entry["digest"])
    return {
        "cut_s": cut_s,
        "exchange": exchange,
        "exchanges_without_it": len(without),
        "others_stopped_s": round(max(e["gap_s"] for n in range(REPLICAS - 1) for e in exchanged[n]), 2),
        "back_after_mending_s": round(back_s - when["mended_s"], 1),
        "differing_exchanges": sum(len(found) > 1 for found in digests.values()),
        "compared_digests": sum(map(len, exchanged.values())),
        "held_out_loss": {str(n): log[-1]["held_out_loss"] for n, log in logs.items()},
    }


# --- results ----------------------------------------------------------------------------------------------------


def problems_of(result: dict[str, Any]) -> list[str]:
    problems = []
    runs = list(result.get("disturbed", {}).values())
    undisturbed = result.get("undisturbed", {})  # by the number of exchanges
    for part in [*runs, *undisturbed.values(), *([result["cut"]] if "cut" in result else [])]:
        if part["differing_exchanges"]:
            problems.append("replicas differ")
    if (cut := result.get("cut")) and (cut["others_stopped_s"] > STOP_S or cut["back_after_mending_s"] > BACK_S):
        problems.append("the cut link stopped the others, or its host did not come back in time")
    for run_ in runs:
        if any(row["others_stopped_s"] > STOP_S for row in run_["kills"]):
            problems.append(f"a replica stopped for over {STOP_S:g} s")
        if any(row["back_after_s"] > BACK_S for row in run_["kills"]):
            problems.append(f"a replica was away for over {BACK_S:g} s")
        if (same := undisturbed.get(str(run_["exchanges"]))) is not None:
            losses = [max(part["held_out_loss"].values()) for part in (run_, same)]
            run_["loss_ratio"] = round(losses[0] / losses[1], 5)
            if run_["loss_ratio"] > 1 + LOSS:
                problems.append("the loss is worse")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchange", default="dense")
    parser.add_argument("--exchanges", type=int, default=600, help="fewest exchanges")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--undisturbed", action="store_true")
    parser.add_argument("--cut", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    for name in ("--replica", "--lighthouse"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--incarnation", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.replica is not None:
        replica(given.lighthouse, given.replica, given.incarnation, given.folder)
        return
    result: dict[str, Any] = json.loads(given.json.read_text()) if given.json and given.json.exists() else {"schema": 1}
    result["training"] = {"replicas": REPLICAS, "every": EVERY, "batch": BATCH}
    if given.kills:
        done = run(given.exchange, given.exchanges, given.kills, given.seed)
        result.setdefault("disturbed", {})[f"{given.exchange}, seed {given.seed}"] = done
    if given.undisturbed:
        done = run(given.exchange, given.exchanges, 0, given.seed)
        result.setdefault("undisturbed", {})[str(done["exchanges"])] = done
    if given.cut:
        result["cut"] = run_cut(given.exchange, given.exchanges, given.cut)
    problems = result["problems"] = problems_of(result)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
