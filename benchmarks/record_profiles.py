"""Records the profiles that ship with Syncline.

    python benchmarks/record_profiles.py                       # cnn and gpt-small on this machine's CPU
    python benchmarks/record_profiles.py --device cuda --models resnet50 --batch 64
    python benchmarks/record_profiles.py --device cuda --published --autocast bf16

The published models are those that papers on gradient exchange measure. timm and transformers build them, with random
weights, so those two must be installed. Run it on a quiet machine: medians forgive a few disturbed steps, not a
neighbour that never rests.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from syncline.measure.backward import measure_backward
from syncline.measure.overhead import measure_overheads
from syncline.models import zoo
from syncline.records.profile import Profile

SHIPPED = Path(__file__).parents[1] / "src" / "syncline" / "profiles"
# What one training step on a small CPU can bear; a GPU would idle on it.
BATCH = {"cpu": {"mlp": 64, "cnn": 64, "resnet50": 8, "gpt-small": 8}, "cuda": dict.fromkeys(zoo.MODELS, 64)}


@dataclass(frozen=True)
class Task:
    """What to train, and on what."""

    build: Callable[[], nn.Module]
    batch: int
    loss: Callable[[nn.Module], Tensor]


def of_the_zoo(name: str, device: str, batch: int) -> Task:
    inputs, targets = (part.to(device) for part in zoo.make_batch(name, batch))
    return Task(lambda: zoo.build_model(name), batch, lambda model: zoo.loss(model(inputs), targets))


def images(name: str, side: int, batch: int, device: str) -> Task:
    import timm

    pixels = torch.randn(batch, 3, side, side, device=device)
    labels = torch.randint(1000, (batch,), device=device)
    return Task(
        lambda: timm.create_model(name, num_classes=1000),
        batch,
        lambda model: nn.functional.cross_entropy(model(pixels), labels),
    )


def tokens(architecture: str, sequence: int, batch: int, device: str) -> Task:
    import transformers

    config = transformers.AutoConfig.for_model(architecture)
    heads = {"bert": transformers.BertForMaskedLM, "gpt2": transformers.GPT2LMHeadModel}
    drawn = torch.randint(config.vocab_size, (batch, sequence), device=device)
    return Task(lambda: heads[architecture](config), batch, lambda model: model(drawn, labels=drawn).loss)


PUBLISHED: dict[str, Callable[[str], Task]] = {
    "resnet50-224px": lambda device: images("resnet50", 224, 32, device),
    "resnet152": lambda device: images("resnet152", 224, 32, device),
    "densenet201": lambda device: images("densenet201", 224, 32, device),
    "inception-v4": lambda device: images("inception_v4", 299, 32, device),
    "vgg16": lambda device: images("vgg16", 224, 32, device),
    "vit-b16": lambda device: images("vit_base_patch16_224", 224, 32, device),
    "bert-base": lambda device: tokens("bert", 128, 16, device),
    "gpt2-small": lambda device: tokens("gpt2", 512, 8, device),
}


def record(name: str, task: Task, device: str, autocast: str | None, steps: int, warmup: int) -> Profile:
    torch.manual_seed(0)
    model = task.build().to(device).train()
    types = {None: torch.float32, "bf16": torch.bfloat16}

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast(device, types[autocast], enabled=autocast is not None):
            return task.loss(model)

    profile = measure_backward(
        model,
        loss,
        steps=steps,
        warmup=warmup,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model_name=name,
        batch=task.batch,
    )
    return msgspec.structs.replace(
        profile,
        how=f"{profile.how}, {autocast} autocast" if autocast else profile.how,
        overheads=measure_overheads(device),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Records the profiles that ship with Syncline.")
    parser.add_argument("--models", nargs="+", choices=list(zoo.MODELS), default=["cnn", "gpt-small"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--published", action="store_true", help=f"instead: {', '.join(PUBLISHED)}")
    parser.add_argument("--autocast", choices=["bf16"])
    parser.add_argument("--batch", type=int, help="examples per step; by default what suits model and device")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of the CPU; by default torch's own choice")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder to write to")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in PUBLISHED if options.published else options.models:
        if options.published:
            task = PUBLISHED[name](options.device)
        else:
            task = of_the_zoo(name, options.device, options.batch or BATCH[options.device][name])
        profile = record(name, task, options.device, options.autocast, options.steps, options.warmup)
        path = options.out / f"{name}-{options.device}.json"
        profile.save(path)
        print(f"{path}: {summary(profile)}", flush=True)


def summary(profile: Profile) -> str:
    times = ("forward", profile.forward_s), ("backward", profile.backward_s), ("update", profile.update_s)
    sizes = f"{len(profile.gradients)} gradients, {profile.gradient_bytes / 1e6:.1f} MB, batch {profile.batch}"
    buffers = f"buffers {sum(entry.bytes for entry in profile.buffers) / 1e3:.1f} kB"
    return ", ".join([sizes, buffers, *(f"{what} {seconds * 1e3:.2f} ms" for what, seconds in times)])


if __name__ == "__main__":
    main()
