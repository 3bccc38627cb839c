"""A rank of three, in a collective of its own that one does not come to, because it is gone.

Its arguments: address and port of a store that outlives all of them, its rank.
"""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline

address, port, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=30))
model = DDP(nn.Linear(4, 4))
syncline.attach(model)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
