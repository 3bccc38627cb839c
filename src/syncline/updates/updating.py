"""Exchange the updates of a model's optimizer, after a warm-up in which gradients are exchanged.

During the warm-up, an ordinary engine exchanges gradients in backward passes. Then these no longer synchronise, and a
hook of the optimizer exchanges what each of its steps has changed. `ddp/updating.py` and `fsdp/updating.py` say how
backward passes of their models stop and start to synchronise.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from syncline.errors import UsageError
from syncline.runtime.bucket_runner import Bucket, BucketRunner, Residuals
from syncline.runtime.stats import Stats
from syncline.runtime.topology import RankTopology
from syncline.updates.engine import UpdateEngine


class WarmUp(Protocol):
    """The interface of an engine that exchanges gradients in the warm-up."""

    runner: BucketRunner
    buckets: Any

    @property
    def concludes_together(self) -> bool: ...
    @property
    def bucket_names(self) -> list[list[str]]: ...
    def conclude(self) -> None: ...
    def predicted_sent_bytes(self) -> dict[str, int]: ...
    def residuals(self) -> Residuals: ...
    def misfit(self, tensors: Residuals, buckets: Sequence[Sequence[str]] = ()) -> str | None: ...
    def load(self, tensors: Residuals, buckets: Sequence[Sequence[str]], steps: int) -> None: ...
    def close(self) -> None: ...


Warm = TypeVar("Warm", bound=WarmUp)


class Updating(Generic[Warm]):
    """The exchange of updates that is attached to a model."""

    def __init__(
        self,
        engine: UpdateEngine,
        warm: Warm | None,
        optimizer: Optimizer,
        scaler: GradScaler | None,
        topology: RankTopology | None,
    ) -> None:
        self._engine, self._warm, self._optimizer = engine, warm, optimizer
        self._is_closed = False
        self._stop_watching: Callable[[], None] = lambda: None
        self.policy, self.topology = engine.policy, topology
        self._finished_step = 0  # number of steps when `finish` last gave all ranks the same weights
        self._warmup_sent_bytes: dict[str, int] = {}  # per level
        self.steps = 0  # of the optimizer; after the warm-up, also those that a GradScaler has skipped
        itself = weakref.ref(self)  # the optimizer holds its hooks
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: _call(itself, "_before_step")),
            optimizer.register_step_post_hook(lambda *_: _call(itself, "_after_step")),
        ]
        if scaler is not None and scaler.is_enabled():
            self._watch_scaler(scaler, itself)
        if warm is None:
            self._start_updates()

    # --- what depends on the model ------------------------------------------------------------------------------

    def _synchronise(self, on: bool) -> None:
        """Make backward passes exchange gradients, or stop it."""
        raise NotImplementedError

    def _check_step(self) -> None:
        """Raise a UsageError if the optimizer must not step now."""

    def _watch_scaler(self, scaler: GradScaler, itself: weakref.ref[Any]) -> None:
        """Wrap the scaler's `step`, so that this rank takes part in the exchange of a step that it skips."""
        step, before_this, optimizer = scaler.step, vars(scaler).get("step"), weakref.ref(self._optimizer)

        def step_or_skip(stepped: Optimizer, *args: Any, **options: Any) -> Any:
            before = _steps_of(itself)
            result = step(stepped, *args, **options)
            if stepped is optimizer() and before == _steps_of(itself):
                _call(itself, "_after_skipped_step")
            return result

        vars(scaler)["step"] = step_or_skip  # hides the method of the class until `close`

        def stop() -> None:  # another model with the same scaler may be watched, too
            if vars(scaler).get("step") is step_or_skip:
                vars(scaler).pop("step")
                if before_this is not None:
                    vars(scaler)["step"] = before_this

        self._stop_watching = stop

    # --- before and after each step of the optimizer ------------------------------------------------------------

    def _before_step(self) -> None:
        if self._engine.is_synced:
            text = "optimizer.step() inside handle.synced(), where the model has the weights of all ranks"
            raise UsageError(f"{text}: leave the context before you train")
        self._engine.recover()

    def _after_step(self) -> None:
        self._check_step()
        self.steps += 1
        if self._warm is None:
            self._engine.after_step()
            self._synchronise(False)  # again, because a `no_sync()` that has ended restores the former setting
        elif self.steps >= self.policy.warmup:
            self._end_warmup()

    def _after_skipped_step(self) -> None:
        """Take part in the exchange of a step that the GradScaler has skipped on this rank. In the warm-up, gradients
        are equal on all ranks, and all skip the step."""
        if self._warm is None and not self._is_closed:
            self.steps += 1
            self._engine.after_step()

    def _end_warmup(self) -> None:
        """Collective: end the warm-up, and start to exchange updates. The warm-up's residual, less than one code of 4
        bits per element, is dropped."""
        assert self._warm is not None  # noqa: S101
        warm, self._warm = self._warm, None
        warm.conclude()
        self._warmup_sent_bytes = warm.runner.sent_bytes
        self._engine.runner.steps = self.steps
        warm.close()
        self._start_updates()

    def _start_updates(self) -> None:
        self._engine.start()
        self._synchronise(False)

    # --- for the handle -----------------------------------------------------------------------------------------

    @property
    def exchanges_gradients(self) -> bool:
        return self._warm is not None

    @property
    def runner(self) -> BucketRunner:
        return self._engine.runner if self._warm is None else self._warm.runner

    @property
    def keeps(self) -> bool:
        return self.policy.exchange.keeps

    @property
    def buckets(self) -> Mapping[Any, Bucket]:
        return dict(enumerate(self._engine.fragments)) if self._warm is None else self._warm.buckets

    @property
    def bucket_names(self) -> list[list[str]]:
        return [] if self._warm is None else self._warm.bucket_names

    @property
    def concludes_together(self) -> bool:
        """Whether `conclude` is collective."""
        return self._warm is not None and self._warm.concludes_together

    def conclude(self) -> None:
        if self._warm is not None:
            self._warm.conclude()

    def drift(self) -> str | None:
        return None

    def stats(self) -> Stats:
        stats = self.runner.stats()
        total = Counter(stats.total_sent_bytes) + Counter(self._warmup_sent_bytes)
        return replace(stats, steps=self.steps, total_sent_bytes=dict(total))

    def predicted_sent_bytes(self) -> dict[str, int]:
        return self._engine.predicted_sent_bytes() if self._warm is None else self._warm.predicted_sent_bytes()

    def residuals(self) -> Residuals:
        return self._engine.saved() if self._warm is None else self._warm.residuals()

    def misfit(self, tensors: Residuals, buckets: Sequence[Sequence[str]] = ()) -> str | None:
        saved_in_warmup = not any("weights" in kinds for kinds in tensors.values())
        if saved_in_warmup and self._warm is not None:
            return self._warm.misfit(tensors, buckets)
        return self._engine.misfit(tensors)

    def load(self, tensors: Residuals, buckets: Sequence[Sequence[str]], steps: int) -> None:
        """Collective: continue from a checkpoint that has no `misfit`."""
        if steps < self.policy.warmup:
            if self._warm is None:
                raise UsageError("this checkpoint was saved in the warm-up, which is over: load it after a new attach")
            self._warm.load(tensors, buckets, steps)
        else:
            if self._warm is not None:
                self._end_warmup()
            self._engine.load(tensors, steps - self.policy.warmup)
        self.steps = self.runner.steps = steps

    def synced(self) -> contextlib.AbstractContextManager[None]:
        return self._engine.synced() if self._warm is None else contextlib.nullcontext()

    def wait(self) -> None:
        """Wait for the exchanges that still run, and apply their results."""
        if self._warm is None:
            self._engine.wait()

    def finish(self) -> None:
        """Collective: give all ranks the same weights and optimizer state, if they have stepped since the last call."""
        if self._warm is None and self.runner.error is None and self.steps != self._finished_step:
            self._engine.finish()
            self._finished_step = self.steps

    def close(self) -> None:
        """Return to backward passes that synchronise, and close the lanes."""
        for hook in self._hooks:
            hook.remove()
        self._stop_watching()
        self._is_closed = True
        self._synchronise(True)
        if self._warm is not None:
            self._warm.close()
        self._engine.close()


def _steps_of(itself: weakref.ref[Any]) -> int:
    updating = itself()
    return 0 if updating is None else int(updating.steps)


def _call(itself: weakref.ref[Any], method: str) -> None:
    updating = itself()
    if updating is not None:
        getattr(updating, method)()
