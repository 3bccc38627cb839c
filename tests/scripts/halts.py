"""A rank of three that trains plain DDP. Rank `halted` sends itself a signal, and goes on if it is continued.

Its arguments: the signal's name, the rank, where that happens (a step's number, `tune` for inside of `syncline.tune`,
or `tuned` for after it), a network's file, which only those two read, and a file at whose appearance it ends.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline

name, halted, where, network, over = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DDP(nn.Linear(64, 64))
calls = 0


def halt() -> None:
    if dist.get_rank() == int(halted):
        os.kill(os.getpid(), getattr(signal, name))


def step(of: nn.Module) -> None:
    global calls
    of(torch.ones(4, 64)).sum().backward()
    calls += 1
    if where == "tune" and calls == 4:
        halt()


if where in ("tune", "tuned"):
    syncline.tune(model, step, network=network, budget_s=5.0)
for number in range(60):
    if number == (30 if where == "tuned" else int(where) if where.isdigit() else -1):
        halt()
    step(model)
ends = torch.zeros(1)
while not ends:
    time.sleep(0.02)  # the others' share of the processor
    step(model)
    ends = torch.tensor([float(Path(over).exists())])
    dist.broadcast(ends, 0)
