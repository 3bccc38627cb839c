"""Train a small GPT on the bytes of Python's standard library, layer by layer: in little memory, over slow links.

torchrun --nproc-per-node 2 examples/train_layerwise.py
torchrun --nproc-per-node 2 examples/train_layerwise.py --memory-budget 200MiB
syncline cluster run --hosts 2 --rate 50mbit -- torchrun examples/train_layerwise.py --density 0.05 --steps 40
"""

import argparse
import time

import torch
import torch.distributed as dist

import syncline
from syncline.models.data import library_text
from syncline.models.gpt import CONTEXT, GPT
from syncline.models.zoo import loss

parser = argparse.ArgumentParser()
parser.add_argument("--memory-budget", metavar="SIZE", help="memory for tensors, for example 200MiB")
parser.add_argument("--density", type=float, default=0.0, help="fraction of the gradients to send; 0: all of them")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=8)
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
text = torch.frombuffer(bytearray(library_text().train), dtype=torch.uint8).long()
draw = torch.Generator().manual_seed(dist.get_rank())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (options.batch,), generator=draw)
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


inputs, targets = batch()
trainer = syncline.Layerwise(
    GPT(width=192, layers=6, heads=6),
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    syncline.OkTopk(density=options.density) if options.density else syncline.Dense(),
    memory_budget=options.memory_budget,
    step=lambda model: loss(model(inputs), targets),
)
if dist.get_rank() == 0:
    print(trainer.describe())

start = time.monotonic()
for step in range(options.steps):
    inputs, targets = batch()
    value = loss(trainer(inputs), targets)
    value.backward()  # exchanges, applies and frees gradients, layer by layer
    if dist.get_rank() == 0 and (step + 1) % max(1, options.steps // 4) == 0:
        per_step = (time.monotonic() - start) / (step + 1)
        print(f"step {step + 1}: {value.item() / 0.6931:.2f} bits per byte, {per_step * 1000:.0f} ms per step")
if dist.get_rank() == 0:
    print("sent in the last step:", trainer.stats().sent_bytes)
trainer.close()
dist.destroy_process_group()
