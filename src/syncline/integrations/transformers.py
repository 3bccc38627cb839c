"""Hugging Face's Trainer, with the exchange as one more argument.

To extend another trainer: `class Mine(SynclineTrainer, SFTTrainer): ...`. A callback alone would receive neither the
wrapped model nor the checkpoint from which a run is resumed. Each `checkpoint-N` gets a folder `syncline` with the
residual of each rank in its own file. The bytes sent and the time taken by a step are logged with the loss.
"""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import Any, cast

from torch.utils.data import DataLoader

from syncline.balance.sampler import ShareSampler
from syncline.balance.shares import Shares
from syncline.ddp.handle import Handle
from syncline.errors import UsageError
from syncline.integrations.accelerate import SynclineKwargs
from syncline.integrations.followed_model import needs, take_arguments

with needs("transformers"):
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint


class _ShareLoader(DataLoader[Any]):
    """A loader that passes the number of the epoch on to its batch sampler."""

    def set_epoch(self, epoch: int) -> None:
        cast(ShareSampler, self.batch_sampler).set_epoch(epoch)


class SynclineTrainer(Trainer, TrainerCallback):
    """A Trainer whose model exchanges its gradients through Syncline.

    Args:
        exchange, plan, quality, allow, network, cache, timeout_s, quiet: As in `syncline.follow`. With neither an
            exchange nor a plan, the model is tuned during its first steps.
        updates, every, warmup, delay, outer: With `updates=True`, the optimizer's updates are exchanged instead of
            gradients. The other settings are those of `syncline.attach`.
        shares: The batches of the ranks, instead of `per_device_train_batch_size`. Gradients are weighted by samples,
            or by tokens, as without `shares`, if the Trainer averages the loss over the tokens of all ranks.
        on_world_size: What a run that is resumed on another number of ranks does with residuals, as in `Handle.load`.
        *arguments, **options: Arguments of Trainer.

    Raises:
        UsageError, FileError: An argument is invalid, a file cannot be read, or the accelerator does not use plain DDP.

    Example:
        >>> trainer = SynclineTrainer(model=model, args=args, train_dataset=data)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        wanted = take_arguments(options)
        self._shares: Shares | None = wanted.get("shares")
        self.syncline = SynclineKwargs(**wanted)
        self._resumed: Path | None = None
        super().__init__(*arguments, **options)
        self.add_callback(self)
        if self._shares is not None and self._averages_tokens:  # losses are parts of a mean over all ranks
            if wanted.get("updates"):
                text = (
                    "the Trainer averages losses over the tokens of all ranks, so updates cannot be weighted by samples"
                )
                raise UsageError(f"{text}: pass average_tokens_across_devices=False")
            self.syncline.weigh_by_loss()

    @property
    def _averages_tokens(self) -> bool:
        """Whether the Trainer divides each rank's loss by the tokens of all ranks, and so weights gradients by them."""
        counts = getattr(self, "model_accepts_loss_kwargs", False) or getattr(self, "compute_loss_func", None)
        return bool(counts and getattr(self.args, "average_tokens_across_devices", False))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return Trainer's loader, or one that deals unequal batches."""
        if self._shares is None or self.args.world_size == 1:
            return super().get_train_dataloader()
        if not isinstance(self.train_dataset, Sized):
            raise UsageError("shares needs a train_dataset with a length: this one has none")
        strategy = getattr(self.args, "train_sampling_strategy", "random")
        if strategy != "random" or getattr(self.args, "group_by_length", False):
            raise UsageError("shares deals samples at random: leave out train_sampling_strategy and group_by_length")
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return _ShareLoader(
            cast(Any, self.train_dataset),
            batch_sampler=self._shares.sampler(self.train_dataset, seed=seed, drop_last=self.args.dataloader_drop_last),
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Train as Trainer does."""
        if self._shares is not None and self._averages_tokens and num_items_in_batch is None:
            text = "the Trainer averages losses over the tokens of all ranks, but batches have no labels to count"
            raise UsageError(f"{text}: pass average_tokens_across_devices=False to weight gradients by samples")
        return super().training_step(model, inputs, num_items_in_batch)

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

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **about: Any) -> None:
        """Load the residuals of the checkpoint. The trainer is its own callback."""
        if args.world_size > 1 and not self.syncline.followed:
            raise UsageError("Trainer did not wrap its model in DDP through Accelerate: use syncline.follow(model)")
        for followed in self.syncline.followed:
            followed.begin_again()  # newer releases of Trainer use the wrapped model again
        if self._resumed is not None:
            self.syncline.load(self._resumed)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **about: Any) -> None:
        """Leave the model with the weights that all ranks agreed on last."""
        for followed in self.syncline.followed:
            followed.end()

    def _load_best_model(self, *arguments: Any, **options: Any) -> None:
        for followed in self.syncline.followed:
            followed.end()  # before the best weights replace the last
        super()._load_best_model(*arguments, **options)

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Evaluate as Trainer does, with the weights that all ranks agreed on last."""
        with self.syncline.synced():
            metrics: dict[str, float] = super().evaluate(*arguments, **options)
            return metrics

    def predict(self, *arguments: Any, **options: Any) -> Any:
        """Predict as Trainer does, with the weights that all ranks agreed on last."""
        with self.syncline.synced():
            return super().predict(*arguments, **options)

    def save_model(self, *arguments: Any, **options: Any) -> None:
        """Save the model as Trainer does, with the weights that all ranks agreed on last."""
        with self.syncline.synced():
            super().save_model(*arguments, **options)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **about: Any) -> None:
        if not args.save_only_model and not state.is_hyper_param_search:
            self.syncline.save(Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
