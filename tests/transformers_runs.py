"""Small trainings with Hugging Face's Trainer on the text of a Python module, for its tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from syncline.integrations.transformers import SynclineTrainer

__all__ = ["GPT2LMHeadModel", "ShortWindows", "SynclineTrainer", "Trainer", "get_last_checkpoint", "large_batches"]
__all__ += ["losses", "small_gpt2", "trainer"]
CONTEXT = 16
TEXT = Path(torch.__file__).read_bytes()[: 256 * CONTEXT]


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of the text, as bytes."""

    def __len__(self) -> int:
        return len(TEXT) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.tensor(list(TEXT[index * CONTEXT : (index + 1) * CONTEXT]))
        return {"input_ids": row, "labels": row}


def small_gpt2(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2}
    sizes |= {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))


def trainer(kind: type[Trainer], folder: Path, *, wanted: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """Create a trainer for six steps. Dropout and a decaying learning rate show if a run resumes at the wrong step."""
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        **{"max_steps": 6, "logging_steps": 1, "save_strategy": "no", **options},
    )
    data = {"train_dataset": Windows(), "eval_dataset": Windows() if "eval_strategy" in options else None}
    return kind(**{"model": small_gpt2(), "args": arguments, **data, **(wanted or {})})


class ShortWindows(Windows):
    """39 windows, with as many tokens in each."""

    def __len__(self) -> int:
        return 39


def large_batches(total: int, epochs: int) -> GPT2LMHeadModel:
    """Train one process on the batches of all ranks together, as `trainer` does with SGD and without dropout."""
    model, data = small_gpt2(dropout=0.0), ShortWindows()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(42 + epoch))
        for indices in order.split(total):
            rows = torch.stack([data[int(index)]["input_ids"] for index in indices])
            optimizer.zero_grad()
            model(input_ids=rows, labels=rows).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model


def losses(of: Trainer) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]
