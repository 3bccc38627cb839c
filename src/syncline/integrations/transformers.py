"""Hugging Face's Trainer, with the exchange as one more argument.

    trainer = SynclineTrainer(model=model, args=args, train_dataset=data, exchange=syncline.OkTopk(density=0.01))

Around a trainer of somebody else's: `class Mine(SynclineTrainer, SFTTrainer): ...`. A callback would not do: it is
given neither the wrapped model nor the checkpoint that a run is resumed from. All of TrainingArguments works as before,
its DDP options too. With neither an exchange nor a plan, the model is tuned from its first sixty steps.

Each `checkpoint-N` gets a folder `syncline` with what each rank keeps, as safetensors, a file for each rank; and
`train(resume_from_checkpoint=…)` goes on with it. What a step sent and how long that took is logged with the loss.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from syncline.ddp.handle import Handle
from syncline.errors import UsageError
from syncline.exchange import Exchange
from syncline.integrations.accelerate import SynclineKwargs
from syncline.integrations.synced import Asked, missing
from syncline.records.network import Network
from syncline.records.plan import Plan

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as error:
    raise missing("transformers", error) from error


class SynclineTrainer(Trainer):
    """Trainer whose gradients are exchanged through `exchange`, or as `plan` says, or as tuning finds best.

    `allow`, `network` and `timeout_s` are as for `syncline.follow`; `on_world_size` says what a run does that is
    resumed on another number of ranks, as for `Handle.load`; everything else is Trainer's.
    """

    def __init__(
        self,
        *trainer_arguments: Any,
        exchange: Exchange | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        allow: Sequence[str] = (),
        network: Network | str | os.PathLike[str] | None = None,
        on_world_size: str = "refuse",
        timeout_s: float | None = None,
        quiet: bool = False,
        **trainer_options: Any,
    ) -> None:
        self._asked = Asked.of(exchange, plan, allow, network, on_world_size, quiet, timeout_s)
        self._resumed: Path | None = None
        super().__init__(*trainer_arguments, **trainer_options)
        self.add_callback(_Checkpoints(self))

    @property
    def handle(self) -> Handle | None:
        """Of what is attached to the model; None before its first training step, and where plain DDP is best."""
        return self.syncline.handle

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.syncline = SynclineKwargs.of(self._asked).join(self.accelerator)

    def _wrap_model(self, model: Any, *arguments: Any, **options: Any) -> Any:
        wrapped = super()._wrap_model(model, *arguments, **options)
        self.syncline.take_over(self.accelerator)  # which older releases have given a handler of their own by now
        return wrapped

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        found: Any = resume_from_checkpoint
        if found is True:
            found = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call] # theirs
        self._resumed = Path(found) if found else None
        return super().train(resume_from_checkpoint, *args, **options)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        super().log({**logs, **self.syncline.figures()} if "loss" in logs else logs, *args, **options)


class _Checkpoints(TrainerCallback):
    """Has what ranks keep saved in each checkpoint, and loaded from the one that a run is resumed from."""

    def __init__(self, trainer: SynclineTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **about: Any
    ) -> None:
        if args.world_size > 1 and not self._trainer.syncline.followed:
            raise UsageError("Trainer did not wrap its model in DDP through Accelerate: use syncline.follow(model)")
        if self._trainer._resumed is not None:
            self._trainer.syncline.load(self._trainer._resumed)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **about: Any) -> None:
        if not args.save_only_model and not state.is_hyper_param_search:
            self._trainer.syncline.save(Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
