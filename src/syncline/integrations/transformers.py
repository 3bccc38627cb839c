"""Hugging Face's Trainer, with the exchange as one more argument.

    trainer = SynclineTrainer(model=model, args=args, train_dataset=data, exchange=syncline.OkTopk(density=0.01))

To extend another trainer: `class Mine(SynclineTrainer, SFTTrainer): ...`. A callback would not be enough, because
callbacks receive neither the wrapped model nor the checkpoint from which a run is resumed.

Each `checkpoint-N` gets a folder `syncline` with the residual of each rank in its own file, and
`train(resume_from_checkpoint=…)` restores it. The bytes sent and the time taken by a step are logged with the loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from syncline.ddp.handle import Handle
from syncline.errors import UsageError
from syncline.integrations.accelerate import SynclineKwargs
from syncline.integrations.followed_model import missing, take_arguments

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as error:
    raise missing("transformers", error) from error


class SynclineTrainer(Trainer):
    """A Trainer whose model exchanges its gradients through Syncline.

    Args:
        *arguments: Arguments of Trainer.
        exchange: The exchange to attach.
        plan: The plan to apply, or its file. With neither an exchange nor a plan, the model is tuned during its first
            sixty steps.
        on_world_size: What a run that is resumed on another number of ranks does with residuals, as in `Handle.load`.
        allow, network, timeout_s, quiet: As in `syncline.follow`.
        **options: Arguments of Trainer.

    Raises:
        UsageError: An argument is invalid, or the accelerator does not use plain DDP.
        FileError: The plan or the network cannot be read.

    Example:
        >>> trainer = SynclineTrainer(model=model, args=args, train_dataset=data)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.syncline = SynclineKwargs(**take_arguments(options))
        self._resumed: Path | None = None
        super().__init__(*arguments, **options)
        self.add_callback(_Checkpoints(self))

    @property
    def handle(self) -> Handle | None:
        """The handle of what is attached. None before the first training step, and if plain DDP stays."""
        return self.syncline.handle

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.syncline.join(self.accelerator)

    def _wrap_model(self, model: Any, *arguments: Any, **options: Any) -> Any:
        wrapped = super()._wrap_model(model, *arguments, **options)
        self.syncline.take_over(self.accelerator)  # older releases have set a handler of their own by now
        return wrapped

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train, as Trainer does, and restore the residuals of the checkpoint."""
        checkpoint: Any = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call] # not typed there
        self._resumed = Path(checkpoint) if checkpoint else None
        return super().train(resume_from_checkpoint, *args, **options)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log as Trainer does, and add the last step's numbers where a loss is logged."""
        super().log({**logs, **self.syncline.figures()} if "loss" in logs else logs, *args, **options)


class _Checkpoints(TrainerCallback):
    """Saves residuals with each checkpoint, and loads those of the checkpoint from which a run is resumed."""

    def __init__(self, trainer: SynclineTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **about: Any
    ) -> None:
        if args.world_size > 1 and not self._trainer.syncline.follows:
            raise UsageError("Trainer did not wrap its model in DDP through Accelerate: use syncline.follow(model)")
        if self._trainer._resumed is not None:
            self._trainer.syncline.load(self._trainer._resumed)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **about: Any) -> None:
        if not args.save_only_model and not state.is_hyper_param_search:
            self._trainer.syncline.save(Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
