"""Train a CNN on 5,000 real digits with ordinary DDP, and one line for Syncline.

torchrun --nproc-per-node 2 examples/train_digits.py
syncline cluster run --hosts 2 --per-host 2 --rate 100mbit -- torchrun examples/train_digits.py --tune
syncline cluster run --hosts 4 --rate 100mbit -- torchrun examples/train_digits.py
syncline cluster run --hosts 4 --rate 100mbit -- torchrun examples/train_digits.py --wire bf16
syncline cluster run --hosts 2 --per-host 2 --rate 100mbit -- torchrun examples/train_digits.py --hierarchical
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import syncline
from syncline.models.data import digits
from syncline.models.zoo import build_model, loss

parser = argparse.ArgumentParser()
parser.add_argument("--tune", action="store_true", help="measure, make a plan, try it, and keep it if it is faster")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument(
    "--wire", choices=["plain", "fp32", "bf16", "fp16"], default="fp32", help="plain: DDP without Syncline"
)
parser.add_argument("--hierarchical", action="store_true", help="sum inside hosts first; --wire applies between hosts")
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
data = digits()
train = TensorDataset(data.train_images, data.train_labels)
sampler = DistributedSampler(train, seed=0)
batches = DataLoader(train, options.batch, sampler=sampler, drop_last=True)

model = DDP(build_model("cnn"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

handle = None
if options.tune:
    images, labels = next(iter(batches))
    tuned = syncline.tune(model, lambda model: loss(model(images), labels).backward())
    handle = tuned.handle
elif options.wire != "plain":
    exchange = syncline.Dense(wire=options.wire)
    handle = syncline.attach(model, syncline.Hierarchical(across=exchange) if options.hierarchical else exchange)

for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    start = time.monotonic()
    for images, labels in batches:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()
    per_step = (time.monotonic() - start) / len(batches)
    if dist.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            right = model.module(data.held_out_images).argmax(-1) == data.held_out_labels
        model.train()
        print(f"epoch {epoch}: {per_step * 1000:.0f} ms per step, {right.float().mean():.1%} of held-out digits right")

if handle is not None and dist.get_rank() == 0:
    print(handle.describe())
    print("sent in the last step:", handle.stats().sent_bytes)
dist.destroy_process_group()
