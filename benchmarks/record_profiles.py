"""Records the profiles that ship with Syncline.

    python benchmarks/record_profiles.py                       # cnn and gpt-small on this machine's CPU
    python benchmarks/record_profiles.py --device cuda --models resnet50 --batch 64

Run it on a quiet machine: medians forgive a few disturbed steps, not a neighbour that never rests.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from syncline.measure.backward import measure_backward
from syncline.measure.profile import Profile
from syncline.models import zoo

SHIPPED = Path(__file__).parents[1] / "src" / "syncline" / "profiles"
# What one training step on a small CPU can bear; a GPU would idle on it.
BATCH = {"cpu": {"mlp": 64, "cnn": 64, "resnet50": 8, "gpt-small": 8}, "cuda": dict.fromkeys(zoo.MODELS, 64)}


def record(name: str, device: str, batch: int, steps: int, warmup: int) -> Profile:
    torch.manual_seed(0)
    model = zoo.build_model(name).to(device)
    inputs, targets = (part.to(device) for part in zoo.make_batch(name, batch))
    return measure_backward(
        model,
        lambda model: zoo.loss(model(inputs), targets),
        steps=steps,
        warmup=warmup,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model_name=name,
        batch=batch,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Records the profiles that ship with Syncline.")
    parser.add_argument("--models", nargs="+", choices=list(zoo.MODELS), default=["cnn", "gpt-small"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, help="examples per step; by default what suits model and device")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of the CPU; by default torch's own choice")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder to write to")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        batch = options.batch or BATCH[options.device][name]
        profile = record(name, options.device, batch, options.steps, options.warmup)
        path = options.out / f"{name}-{options.device}.json"
        profile.save(path)
        print(f"{path}: {summary(profile)}")


def summary(profile: Profile) -> str:
    times = ("forward", profile.forward_s), ("backward", profile.backward_s), ("update", profile.update_s)
    sizes = f"{len(profile.gradients)} gradients, {profile.gradient_bytes / 1e6:.1f} MB, batch {profile.batch}"
    return ", ".join([sizes, *(f"{what} {seconds * 1e3:.2f} ms" for what, seconds in times)])


if __name__ == "__main__":
    main()
