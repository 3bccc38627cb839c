"""A rank of three, in a collective that one does not come to, because it is gone.

Its arguments: address and port of a store, its rank, who serves the store: `test`, which outlives all of them, or
`rank 0`; then rank 2 is late, and asks when rank 0 knows already. And how it ends: it `falls` with a collective of its
own, or `catches` what is raised of an exchange, says it, and exits; or it does neither, and the one that does not come
`raises`, while the others have several buckets under way.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline

address, port, rank, server, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
serves = server == "rank 0" and rank == 0
store = dist.TCPStore(address, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=30))
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=30))
if end == "raises":
    model = DDP(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), bucket_cap_mb=0.2)
    syncline.attach(model, syncline.Dense(wire="bf16"))
else:
    model = DDP(nn.Linear(256, 256))
    syncline.attach(model)
for _ in range(3):
    model(torch.ones(2, 256)).sum().backward()
if rank == 1 and end == "raises":
    raise ValueError("no such file")
if rank == 1:
    heartbeat, until_s = b"", time.monotonic() + 30
    while not heartbeat.startswith(b"{") and time.monotonic() < until_s:  # its first one
        heartbeat = dist.distributed_c10d._get_default_store().get("syncline/heartbeat/0/1")
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
if server == "rank 0" and rank == 2:
    time.sleep(1.5)
if end == "falls":
    dist.all_reduce(torch.ones(1))
try:
    model(torch.ones(2, 256)).sum().backward()
except RuntimeError as error:
    if end == "raises":
        raise
    print(error, file=sys.stderr)
    sys.exit(1)
