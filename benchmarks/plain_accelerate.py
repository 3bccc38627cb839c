"""A training with Accelerate as its quick start shows it: no line of it knows Syncline.

torchrun --nproc-per-node 2 benchmarks/plain_accelerate.py TEXT STEPS
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 64


def main() -> None:
    path, steps = sys.argv[1:]
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    text = torch.tensor(list(Path(path).read_bytes()))
    windows = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    sizes: dict[str, Any] = {"n_positions": CONTEXT, "n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 256}
    model: Any = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(list(windows), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    while done < int(steps):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done += 1
            if done % 50 == 0:
                accelerator.print(f"step {done}: loss {float(loss):.4f}")
            if done == int(steps):
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
