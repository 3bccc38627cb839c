"""A training with Hugging Face's Trainer as its quick start shows it: no line of it knows Syncline.

torchrun --nproc-per-node 2 benchmarks/plain_trainer.py TEXT STEPS
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

CONTEXT = 64


class Windows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, text: bytes) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.tensor(list(self.text[index * CONTEXT : (index + 1) * CONTEXT]))
        return {"input_ids": row, "labels": row}


def main() -> None:
    path, steps = sys.argv[1:]
    sizes: dict[str, Any] = {"n_positions": CONTEXT, "n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 256}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))
    args = TrainingArguments(
        "trained",
        max_steps=int(steps),
        per_device_train_batch_size=4,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model=model, args=args, train_dataset=Windows(Path(path).read_bytes())).train()


if __name__ == "__main__":
    main()
