"""Train on real digits with Accelerate: Syncline tunes itself in the first steps, or you choose the exchange.

torchrun --nproc-per-node 2 examples/accelerate_digits.py
torchrun --nproc-per-node 2 examples/accelerate_digits.py --density 0.02 --folder /tmp/digits
torchrun --nproc-per-node 2 examples/accelerate_digits.py --density 0.02 --folder /tmp/digits --resume
syncline cluster run --hosts 2 --rate 100mbit -- torchrun examples/accelerate_digits.py --accumulate 2
"""

import argparse
import itertools

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import syncline
from syncline.integrations.accelerate import SynclineKwargs
from syncline.models.data import digits
from syncline.models.zoo import build_model, loss

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--accumulate", type=int, default=1, help="batches per step")
parser.add_argument("--density", type=float, default=0.0, help="fraction of the gradients to send; 0: tune, lossless")
parser.add_argument("--folder", help="folder for a checkpoint at the end")
parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the folder")
options = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
data = digits()

kwargs = SynclineKwargs(exchange=syncline.OkTopk(options.density) if options.density else None)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate, kwargs_handlers=[kwargs])
kwargs.join(accelerator)

model = build_model("cnn")
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
batches = DataLoader(TensorDataset(data.train_images, data.train_labels), options.batch, shuffle=True, drop_last=True)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
if options.resume:
    accelerator.load_state(options.folder)

endless = itertools.chain.from_iterable(itertools.repeat(batches))
for images, labels in itertools.islice(endless, options.steps * options.accumulate):
    with accelerator.accumulate(model):
        accelerator.backward(loss(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()

if options.folder:
    accelerator.save_state(options.folder)
if accelerator.is_main_process:
    if kwargs.handle is not None:
        print(kwargs.handle.describe())
    model.eval()
    with torch.no_grad():
        right = accelerator.unwrap_model(model)(data.held_out_images).argmax(-1) == data.held_out_labels
    print(f"{options.steps} steps: {right.float().mean():.1%} of held-out digits right")
accelerator.end_training()
