"""Training scripts of others, adapted to run on CPUs, under `syncline run`: when do they end, compared with plain DDP?

Each script trains for the same number of steps on emulated hosts, with `torchrun` and with `torchrun -m syncline.run`,
in turns. The clock is that of the whole command, its start and all tuning included. The two kinds of clusters have one
and two ranks per host.

    python benchmarks/third_party.py FOLDER --json F [--scripts nanogpt,mingpt] [--clusters 1,2]
    python benchmarks/third_party.py FOLDER --report F

FOLDER has two folders with files of others, which are not part of this repository:

- `nanogpt`: train.py, model.py and configurator.py of https://github.com/karpathy/nanoGPT
- `mingpt`: all files of https://github.com/pytorch/examples/tree/main/distributed/minGPT-ddp/mingpt

Both are written for CUDA. They run in a copy that is adapted (`TO_CPU`): devices are replaced by the CPU, and NCCL by
gloo; `torch.cuda.set_device`, the `device_ids` of DDP and minGPT's check for enough GPUs are left out, and its
`ddp_setup` is replaced. Options make the models small and turn mixed precision off. No line for Syncline is added. The
other two are `plain_trainer.py` and `plain_accelerate.py` beside this file, written after the quick starts of
Transformers and Accelerate. All train on text of Python's standard library. minGPT-ddp needs hydra-core, boto3 and
fsspec.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import syncline
from syncline.files import write_json
from training import text

HERE = Path(__file__).parent
STEPS, LIMIT_S = 300, 200
MBIT = 300
TO_CPU = (  # pattern and replacement
    (r"f(['\"])cuda:\{\w+\}\1", "'cpu'"),
    (r"torch\.cuda\.set_device\(\w+\)", "pass"),
    (r",\s*device_ids=\[[^]]*\]", ""),
    (r"\.to\(self\.local_rank\)", ".to('cpu')"),
    (r"(?ms)^def ddp_setup\(\):.*?(?=^def )", "def ddp_setup():\n    init_process_group(backend='gloo')\n\n"),
    (r"if not verify_min_gpu_count\([^)]*\):", "if False:"),
)
NANOGPT = (
    "train.py --device=cpu --backend=gloo --dtype=float32 --dataset=text --n_layer=4 --n_head=4 --n_embd=128 "
    "--block_size=64 --batch_size=4 --gradient_accumulation_steps={ranks} --max_iters={last} --eval_iters=1 "
    "--eval_interval=100000 --log_interval=50 --warmup_iters=20 --lr_decay_iters={steps} --compile={compile}"
)
MINGPT = (
    "main.py data_config.path={folder}/part.txt data_config.truncate=1.0 data_config.block_size=64 "
    "gpt_config.n_layer=4 gpt_config.n_head=4 gpt_config.n_embd=128 trainer_config.max_epochs=1 "
    "trainer_config.batch_size=4 trainer_config.data_loader_workers=0 trainer_config.use_amp=False "
    "trainer_config.save_every=100"
)
SCRIPTS = {  # the folder of the script, and its command line
    "nanogpt": ("nanogpt", NANOGPT.replace("{compile}", "False")),
    "nanogpt, compiled": ("nanogpt", NANOGPT.replace("{compile}", "True")),
    "mingpt-ddp": ("mingpt", MINGPT),
    "trainer": ("", f"{HERE}/plain_trainer.py {{folder}}/text.txt {{steps}}"),
    "accelerate": ("", f"{HERE}/plain_accelerate.py {{folder}}/text.txt {{steps}}"),
}


def prepare(source: Path, folder: Path, ranks: int, steps: int) -> None:
    """Copy the scripts into a folder, for the CPU, and write the texts in the formats that they expect."""
    train = bytes(text()[0][: 1 << 20].tolist())
    (folder / "text.txt").write_bytes(train)
    for name in ("nanogpt", "mingpt"):
        if not (source / name).is_dir():
            raise SystemExit(
                f"{source / name}: there is no such folder; the docstring of this script says where to get it"
            )
        shutil.copytree(source / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        for path in (folder / name).glob("*.py"):
            code = path.read_text()
            for pattern, replacement in TO_CPU:
                code = re.sub(pattern, replacement, code)
            path.write_text(code)
    data = folder / "nanogpt" / "data" / "text"
    data.mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        np.frombuffer(train, np.uint8).astype(np.uint16).tofile(data / f"{part}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))  # the format that nanoGPT reads
    letters = train.decode("ascii", "ignore")
    (folder / "part.txt").write_text(letters[: int(steps * 4 * ranks / 0.9) + 66])


def run_once(name: str, folder: Path, per_host: int, steps: int, synced: bool) -> dict[str, Any]:
    """Run a script once, and return its time and what it printed about losses and tuning."""
    where, options = SCRIPTS[name]
    values = {"ranks": 2 * per_host, "last": steps - 1, "steps": steps, "folder": folder}
    script = [part.format(**values) for part in options.split()]
    out = Path(tempfile.mkdtemp(dir=folder))
    inner = ["-m", "syncline.run", "--out", str(out)] if synced else []
    # As torchrun starts it by default, but with one thread per rank.
    cluster = [sys.executable, "-m", "syncline", "cluster", "run", "--hosts", "2", "--per-host", str(per_host)]
    argv = [*cluster, "--rate", f"{MBIT}mbit", "--", "torchrun", *inner, *script]
    folders = [str(Path(syncline.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    began_s = time.monotonic()
    done = subprocess.run(
        argv, cwd=folder / where, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    seconds = time.monotonic() - began_s
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    # Only rank 0 of the scripts prints losses, except minGPT's.
    lines = [line for line in done.stdout.splitlines() if "host0" in line and "GPU1" not in line]
    losses = [float(found[1]) for line in lines if (found := re.search(r"[Ll]oss'?:? '?(\d+\.\d+)", line))]
    said = [found[0] for line in done.stderr.splitlines() if (found := re.search(r"syncline( run)?: .*", line))]
    tuning_s = None
    for path in out.glob("rank-0.json"):
        tuning_s = json.loads(path.read_text())["tuning_s"]
    return {"seconds": seconds, "losses": losses, "said": said, "tuning_s": tuning_s}


def measured(source: Path, name: str, per_host: int, steps: int, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(source, folder, 2 * per_host, steps)
        runs: dict[str, list[dict[str, Any]]] = {"plain": [], "syncline": []}
        for pair in range(pairs):
            order = ("plain", "syncline") if pair % 2 == 0 else ("syncline", "plain")
            for which in order:
                runs[which].append(run_once(name, folder, per_host, steps, which == "syncline"))
    plain, ours = (statistics.median(run["seconds"] for run in runs[which]) for which in ("plain", "syncline"))
    pairwise = zip(runs["plain"], runs["syncline"], strict=True)
    difference = max(
        (abs(a - b) / abs(a) for one, two in pairwise for a, b in zip(one["losses"], two["losses"], strict=True)),
        default=None,
    )
    return {
        "script": name,
        "per_host": per_host,
        "mbit": MBIT,
        "steps": steps,
        "plain_s": plain,
        "syncline_s": ours,
    } | {
        "ratio": ours / plain,
        "loss_difference": difference,
        "runs": runs,
    }


def report(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        difference = row["loss_difference"]
        print(
            f"{row['script']}, 2 × {row['per_host']}: {row['plain_s']:.1f} → {row['syncline_s']:.1f} s, "
            f"{row['ratio'] - 1:+.1%}, losses differ by {'?' if difference is None else f'{difference:.1e}'}"
        )
        for line in row["runs"]["syncline"][0]["said"]:
            print(f"    {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--scripts", default="nanogpt;nanogpt, compiled;mingpt-ddp;trainer;accelerate", help="A;B;…")
    parser.add_argument("--clusters", default="1,2", help="ranks per host")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pairs", type=int, default=1)
    args = parser.parse_args()
    if args.report:
        report(json.loads(args.report.read_text())["rows"])
        return
    rows = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    known = {(row["script"], row["per_host"]) for row in rows}
    for per_host in map(int, args.clusters.split(",")):
        for name in args.scripts.split(";"):
            if (name, per_host) in known:
                continue
            rows.append(measured(args.folder.resolve(), name, per_host, args.steps, args.pairs))
            report(rows[-1:])
            sys.stdout.flush()
            if args.json:
                about = {"schema": 1, "torch": str(torch.__version__), "syncline": syncline.__version__}
                about |= {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
                write_json(args.json, {**about, "rows": rows})


if __name__ == "__main__":
    main()
