"""Train a small GPT-2 on Python's standard library with Hugging Face's Trainer, tuned or with your own exchange.

torchrun --nproc-per-node 2 examples/trainer_text.py
torchrun --nproc-per-node 2 examples/trainer_text.py --density 0.05 --folder /tmp/text
torchrun --nproc-per-node 2 examples/trainer_text.py --density 0.05 --folder /tmp/text --resume --steps 200
syncline cluster run --hosts 2 --rate 50mbit -- torchrun examples/trainer_text.py
"""

import argparse
import math
import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import syncline
from syncline.integrations.transformers import SynclineTrainer
from syncline.models.data import library_text

CONTEXT = 64
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--density", type=float, default=0.0, help="fraction of the gradients to send; 0: tune, lossless")
parser.add_argument(
    "--folder", default=tempfile.gettempdir(), help="folder for a checkpoint after each half of the steps"
)
parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the folder")
options = parser.parse_args()


class Windows(Dataset[dict[str, Tensor]]):
    """The text in windows of CONTEXT bytes."""

    def __init__(self, text: bytes) -> None:
        whole = len(text) // CONTEXT * CONTEXT
        self.rows = torch.frombuffer(bytearray(text[:whole]), dtype=torch.uint8).view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index].long()
        return {"input_ids": row, "labels": row}


torch.manual_seed(0)
torch.set_num_threads(1)
text = library_text()
sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 128, "n_layer": 4, "n_head": 4}
trainer = SynclineTrainer(
    model=GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
    args=TrainingArguments(
        options.folder,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=1e-3,
        logging_steps=max(1, options.steps // 4),
        save_steps=max(1, options.steps // 2),
        save_strategy="no" if options.folder == tempfile.gettempdir() else "steps",
        ddp_find_unused_parameters=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    ),
    train_dataset=Windows(text.train),
    eval_dataset=Windows(text.held_out[: 256 * CONTEXT]),
    exchange=syncline.OkTopk(options.density) if options.density else None,
)
trainer.train(resume_from_checkpoint=options.resume)
held_out = trainer.evaluate()["eval_loss"] / math.log(2)
if trainer.is_world_process_zero():
    print(f"{trainer.state.global_step} steps: {held_out:.2f} bits per held-out byte")
