"""Train a small GPT on Python's standard library with Ray Train, and survive the loss of a worker.

python examples/ray_text.py --storage /tmp/text
python examples/ray_text.py --storage /tmp/text-2 --die-at 70
python examples/ray_text.py --storage /tmp/text-3 --tune

Workers exchange the updates of AdamW, or with `--tune` gradients in the way that `syncline.tune` finds. A checkpoint is
a folder that Ray collects from all workers: rank 0 writes `training.pt`, with the state that all ranks share, and every
rank its part of `exchange/`. When a worker dies, Ray starts all workers again, and they load the last checkpoint. So
does a second call with the same storage and more steps.
"""

import argparse
import hashlib
import math
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from syncline.models.data import library_text
from syncline.models.gpt import GPT

CONTEXT = 64


def train(options: dict[str, Any]) -> None:
    """Train on one worker. Ray has created the process group."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ["SYNCLINE_FAILURES"] = options["failures"]  # each of Ray's workers has a working folder of its own
    rank = ray.train.get_context().get_world_rank()
    text = library_text()
    model = DDP(GPT(width=options["width"], layers=2, heads=2, context=CONTEXT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options["tune"]:
        inputs, targets = batch(text.train, options["batch"], seed=rank)
        syncline.tune(model, lambda model: loss(model(inputs), targets).backward())
        handle = None  # tuning was lossless, so there is no residual to save
    else:
        exchange = syncline.ChunkedTopk(density=0.03)
        handle = syncline.attach(model, exchange, optimizer=optimizer, every=4, warmup=options["warmup"])

    checkpoint = ray.train.get_checkpoint()
    first = 0 if checkpoint is None else load(checkpoint, model, optimizer, handle)
    if first and rank == 0:
        print(f"continuing after step {first}")
    for step in range(first + 1, options["steps"] + 1):
        if checkpoint is None and (step, rank) == (options["die_at"], 1):
            ray.train.get_all_reported_checkpoints()  # wait until Ray has registered the last one
            print(f"rank {rank} kills itself before step {step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = batch(text.train, options["batch"], seed=step * 1000 + rank)
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        if step % options["every"] == 0 or step == options["steps"]:
            save(step, model, optimizer, handle, {"step": step, "loss": value.item(), "continued_after": first})

    if handle is not None:
        handle.detach()  # averages what the last steps have not exchanged
    inputs, targets = batch(text.held_out, 256, seed=0)
    with torch.no_grad():
        bits = loss(model.module(inputs), targets).item() / math.log(2)
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.module.state_dict().values())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"rank {rank}: {options['steps']} steps, {bits:.2f} bits per held-out byte, weights {digest}")


def batch(text: bytes, size: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return windows of the text, and the byte that follows each of their bytes. A seed always gives the same."""
    starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = torch.tensor([list(text[start : start + CONTEXT + 1]) for start in starts])
    return rows[:, :-1], rows[:, 1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def save(
    step: int, model: DDP, optimizer: torch.optim.Optimizer, handle: syncline.Handle | None, metrics: dict[str, Any]
) -> None:
    """Report a checkpoint; call it on all workers, between steps. Ray puts the files of all of them in one folder."""
    with tempfile.TemporaryDirectory() as folder:
        if ray.train.get_context().get_world_rank() == 0:
            training = {"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(training, Path(folder) / "training.pt")
        if handle is not None:
            handle.save(Path(folder) / "exchange")
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def load(checkpoint: Checkpoint, model: DDP, optimizer: torch.optim.Optimizer, handle: syncline.Handle | None) -> int:
    """Load a checkpoint, and return its step."""
    with checkpoint.as_directory() as folder:
        training = torch.load(Path(folder) / "training.pt", weights_only=True)
        model.module.load_state_dict(training["model"])
        optimizer.load_state_dict(training["optimizer"])
        if handle is not None:
            handle.load(Path(folder) / "exchange")  # this rank's weights, residual and optimizer state
    return int(training["step"])


def fit(options: argparse.Namespace) -> ray.train.Result:
    storage = options.storage.absolute()
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(options), "failures": str(storage / "syncline-failure")},
        torch_config=TorchConfig(backend="gloo", timeout_s=60),
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(
            name=storage.name,
            storage_path=str(storage.parent),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    return trainer.fit()


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", type=Path, required=True, help="folder for checkpoints, shared by all hosts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, metavar="STEPS", help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=16, help="windows of text per worker")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--warmup", type=int, default=20, metavar="STEPS", help="steps before updates are exchanged")
    parser.add_argument("--tune", action="store_true", help="tune the exchange of gradients, lossless")
    parser.add_argument("--die-at", type=int, metavar="STEP", help="kill worker 1 before this step, once")
    options = parser.parse_args(arguments)
    if options.die_at is not None and options.die_at <= options.every:
        parser.error(f"--die-at {options.die_at}: must come after the first checkpoint, which is that of --every")
    return options


if __name__ == "__main__":
    options = options_of()
    ray.init(num_cpus=options.workers, include_dashboard=False)  # in a cluster: ray.init()
    print(fit(options).metrics)
