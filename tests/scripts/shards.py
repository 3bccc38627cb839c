"""A training script with a model that is sharded among all ranks, which knows nothing of Syncline."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
fully_shard(net[0])
model = fully_shard(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())
losses = []
for _ in range(8):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 64, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(float(loss))
Path(f"{sys.argv[1]}-{dist.get_rank()}").write_text("\n".join(map(str, losses)))
