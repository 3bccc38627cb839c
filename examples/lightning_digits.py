"""Train on real digits with Lightning: Syncline tunes itself in the first steps, or you choose the exchange.

torchrun --nproc-per-node 2 examples/lightning_digits.py
torchrun --nproc-per-node 2 examples/lightning_digits.py --density 0.02 --folder /tmp/digits
torchrun --nproc-per-node 2 examples/lightning_digits.py --density 0.02 --folder /tmp/digits --resume --steps 400
syncline cluster run --hosts 2 --rate 100mbit -- torchrun examples/lightning_digits.py
"""

import argparse
import os

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import syncline
from syncline.integrations.lightning import SynclineCallback, SynclineStrategy
from syncline.models.data import digits
from syncline.models.zoo import build_model, loss

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--density", type=float, default=0.0, help="fraction of the gradients to send; 0: tune, lossless")
parser.add_argument("--folder", help="folder for a checkpoint after each epoch")
parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the folder")
options = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
data = digits()


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = build_model("cnn")

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return loss(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # set by torchrun
trainer = Trainer(
    accelerator="cpu",
    devices=local,
    num_nodes=int(os.environ.get("WORLD_SIZE", 1)) // local,
    strategy=SynclineStrategy(exchange=syncline.OkTopk(options.density) if options.density else None),
    callbacks=[SynclineCallback(), *([ModelCheckpoint(options.folder, save_last=True)] if options.folder else [])],
    max_steps=options.steps,
    enable_checkpointing=options.folder is not None,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
)
model = Digits()
batches = DataLoader(TensorDataset(data.train_images, data.train_labels), options.batch, shuffle=True, drop_last=True)
trainer.fit(model, batches, ckpt_path=f"{options.folder}/last.ckpt" if options.resume else None)

if trainer.is_global_zero:
    model.eval()
    with torch.no_grad():
        right = model.net(data.held_out_images).argmax(-1) == data.held_out_labels
    print(f"{trainer.global_step} steps: {right.float().mean():.1%} of held-out digits right")
