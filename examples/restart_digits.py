"""Continue a training from its last checkpoint when a rank dies: DDP with a sparse exchange, on 5,000 real digits.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/restart_digits.py --checkpoint-dir run
torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/restart_digits.py --checkpoint-dir run2 --die-at 70
torchrun --standalone --nproc-per-node 3 examples/restart_digits.py --checkpoint-dir run --steps 200 \
    --on-world-size redistribute

A checkpoint is a folder such as `step-000060`: rank 0 writes `training.pt`, with the state that all ranks share, and
every rank writes its part of `exchange/`. A checkpoint is valid once the file `latest` names it, which is replaced
atomically after everything else has been written.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from syncline.models.data import digits
from syncline.models.zoo import build_model, loss


def main(options: argparse.Namespace) -> None:
    refuse_stale_store()
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    rank, first_attempt = dist.get_rank(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = digits()
    model = DDP(build_model("cnn"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = syncline.attach(model, syncline.OkTopk(density=options.density))
    torch.manual_seed(1 + rank)  # each rank shifts its digits differently

    step, seen = resume(options, model, optimizer, handle)
    while step < options.steps:
        if first_attempt and (step, rank) == (options.die_at, options.die_rank):
            print(f"rank {rank} kills itself before step {step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        chosen, seen = next_batch(len(data.train_labels), seen, options.batch)
        shift = torch.randint(-2, 3, (2,)).tolist()
        optimizer.zero_grad()
        value = loss(model(data.train_images[chosen].roll(shift, (2, 3))), data.train_labels[chosen])
        value.backward()
        optimizer.step()
        step += 1
        if rank == 0 and options.losses:
            with options.losses.open("a") as file:
                print(json.dumps({"step": step, "loss": value.item().hex()}), file=file)
        if step % options.every == 0 or step == options.steps:
            save(options, step, seen, model, optimizer, handle)

    if rank == 0:
        model.eval()
        with torch.no_grad():
            right = model.module(data.held_out_images).argmax(-1) == data.held_out_labels
        weights = b"".join(tensor.numpy().tobytes() for tensor in model.module.state_dict().values())
        print(f"{step} steps: {right.float().mean():.1%} of held-out digits right")
        print(f"weights: {hashlib.sha256(weights).hexdigest()[:16]}")
    dist.destroy_process_group()


def refuse_stale_store() -> None:
    """Refuse a store that outlives the ranks: after a restart, ranks would find the addresses of dead ranks in it."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise syncline.UsageError(
            "torchrun --max-restarts needs a store of its own for each attempt: export "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and use --standalone or --rdzv-backend c10d"
        )


def next_batch(images: int, seen: int, batch: int) -> tuple[torch.Tensor, int]:
    """Return this rank's images for the next step, and how many images all ranks will have seen after it.

    The order depends on nothing else, so a checkpoint needs only the number of images seen.
    """
    global_batch = batch * dist.get_world_size()
    if seen % images + global_batch > images:  # too few are left in this epoch
        seen += images - seen % images
    epoch, start = divmod(seen, images)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(epoch))
    start += batch * dist.get_rank()
    return order[start : start + batch], seen + global_batch


def save(
    options: argparse.Namespace,
    step: int,
    seen: int,
    model: DDP,
    optimizer: torch.optim.Optimizer,
    handle: syncline.Handle,
) -> None:
    """Write a checkpoint; call it on all ranks, between steps."""
    folder = options.checkpoint_dir / f"step-{step:06d}"
    mine = torch.get_rng_state()
    random = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(random, mine)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        training = {
            "step": step,
            "seen": seen,
            "random": random,
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        torch.save(training, folder / "training.pt")
        flush(folder / "training.pt")
        flush(folder)
    handle.save(folder / "exchange")  # returns when every rank has written its part
    if dist.get_rank() == 0:
        draft = options.checkpoint_dir / "latest.new"
        draft.write_text(folder.name)
        flush(draft)
        draft.replace(options.checkpoint_dir / "latest")
        flush(options.checkpoint_dir)
        for other in options.checkpoint_dir.glob("step-*"):
            if other != folder:
                shutil.rmtree(other)


def resume(
    options: argparse.Namespace, model: DDP, optimizer: torch.optim.Optimizer, handle: syncline.Handle
) -> tuple[int, int]:
    """Load the newest checkpoint, and return its numbers of steps and of images seen."""
    latest = options.checkpoint_dir / "latest"
    if not latest.exists():
        return 0, 0
    folder = options.checkpoint_dir / latest.read_text()
    training = torch.load(folder / "training.pt", weights_only=True)
    model.module.load_state_dict(training["model"])
    optimizer.load_state_dict(training["optimizer"])
    handle.load(folder / "exchange", on_world_size=options.on_world_size)
    if len(training["random"]) == dist.get_world_size():
        torch.set_rng_state(training["random"][dist.get_rank()])
    if dist.get_rank() == 0:
        print(f"continuing after step {training['step']}, from {folder}", flush=True)
    return training["step"], training["seen"]


def flush(path: Path) -> None:
    """Write a file, or the list of files of a folder, to the disk, in case the machine loses power."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--checkpoint-dir", type=Path, required=True, help="folder for checkpoints, shared by all ranks"
    )
    parser.add_argument("--every", type=int, default=20, metavar="STEPS", help="steps between checkpoints")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=32, help="images per rank")
    parser.add_argument("--density", type=float, default=0.01, help="fraction of the gradients to send in a step")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="timeout of collectives")
    parser.add_argument(
        "--on-world-size", default="refuse", help="if the number of ranks has changed: refuse, redistribute or reset"
    )
    parser.add_argument("--losses", type=Path, metavar="FILE", help="file to which rank 0 appends a line for each step")
    parser.add_argument("--die-at", type=int, metavar="STEP", help="kill a rank before this step, in the first attempt")
    parser.add_argument("--die-rank", type=int, default=1)
    options = parser.parse_args(arguments)
    for name in ("every", "steps", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be 1 or more")
    if options.checkpoint_dir.exists() and not options.checkpoint_dir.is_dir():
        parser.error(f"--checkpoint-dir {options.checkpoint_dir}: is not a folder")
    return options


if __name__ == "__main__":
    try:
        main(options_of())
    except syncline.SynclineError as error:
        print(f"restart_digits: {error}", file=sys.stderr)
        sys.exit(2)
