"""Training of a model by ranks that are simulated in one process, with a real exchange.

While gradients are exchanged, all ranks of data-parallel training have the same weights, so one model computes the
gradients of every rank, each from the rank's own batch. Where updates are exchanged, each rank has its own model and
optimizer, and the code of `syncline.updates` exchanges what they change. Exchanges run over `LocalComm`: the code that
runs on a network runs here. With the same seed, all methods start from the same weights and draw the same batches.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from peers import OneBit, PowerSGD
from quality_methods import Method, method_named
from quality_tasks import Data, Source, Task
from syncline.dist.local_comm import LocalComm, run_ranks
from syncline.errors import UsageError
from syncline.exchange import WORLD, Dense, Exchange, Layout, Slot, State, Work
from syncline.models import zoo
from syncline.records import pieces as pieces_module
from syncline.records.pieces import buffer_period, fragments_of
from syncline.runtime.bucket_runner import Bucket, BucketRunner, Step
from syncline.runtime.bucketing import layout_of
from syncline.updates.engine import Flight, UpdateEngine
from syncline.updates.fragment import Fragment
from syncline.updates.optimizer_state import OptimizerState
from syncline.updates.policy import UpdatePolicy
from training import average

POINTS = 15
"""Number of evaluations per training."""
_STEPS_BETWEEN_CHECKS = 100
"""On CUDA, a check waits for the device."""
DEADLINE_S = 300.0
"""The first step compiles kernels."""

# --- gradients --------------------------------------------------------------------------------------------------------


class RankGradients:
    """Computes the gradients of all ranks, each into the rank's own flat buffer, with one model or one for each rank.

    On CUDA, forward and backward of all ranks are one CUDA graph, because launching their kernels one by one takes
    longer than running them. The gradients of a model's parameters are views of the buffer of its (first) rank.
    """

    def __init__(self, models: Sequence[nn.Module], source: Source, task: Task, device: torch.device) -> None:
        self._models, self._source, self._autocast = models, source, partial(autocast, task, device)
        self.parameters = [bucket_order(model) for model in models]
        common = models[0] is models[-1]
        norms = [module for module in models[0].modules() if isinstance(module, nn.BatchNorm2d)]
        self._norms = [(module, module.momentum) for module in norms] if common else []
        self.layout = _layout_of_gradients(self.parameters[0], device)
        self.flats = [torch.zeros(self.layout.numel, device=device) for _ in models]
        self._views = [[slot.view(flat) for slot in self.layout.slots] for flat in self.flats]
        for rank in reversed(range(len(models))):
            for parameter, view in zip(self.parameters[rank], self._views[rank], strict=True):
                parameter.grad = view
        self._numbers = torch.zeros(len(models), task.examples // len(models), dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._record()

    @property
    def recorded(self) -> bool:
        return self._graph is not None

    def compute(self, numbers: Tensor) -> None:
        """Compute the gradients of examples with these numbers, one row per rank."""
        self._numbers.copy_(numbers)
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()

    def _compute(self) -> None:
        for rank, (model, views) in enumerate(zip(self._models, self._views, strict=True)):
            for module, momentum in self._norms:  # 0 leaves the running statistics as they are
                module.momentum = momentum if rank == 0 else 0.0
            inputs, targets = self._source.batch(self._numbers[rank])
            with self._autocast():
                loss = zoo.loss(model(inputs), targets)
            torch._foreach_copy_(views, torch.autograd.grad(loss, self.parameters[rank]))

    def _record(self) -> None:
        buffers = [(buffer, buffer.clone()) for model in self._models for buffer in model.buffers()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._compute()
            self._graph = graph
        except RuntimeError as error:
            print(f"no CUDA graph, so steps are slower: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
        for buffer, saved in buffers:
            buffer.copy_(saved)


def bucket_order(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters in about the order of DDP's buckets after the first step, in which gradients are ready."""
    return list(model.parameters())[::-1]


def _layout_of_gradients(parameters: Iterable[nn.Parameter], device: torch.device) -> Layout:
    slots, offset = [], 0
    for number, parameter in enumerate(parameters):
        shape = tuple(parameter.shape)
        slots.append(Slot(str(number), shape, torch.empty(shape, device="meta").stride(), offset, parameter.numel()))
        offset += parameter.numel()
    return Layout(tuple(slots), torch.float32, device)


def autocast(task: Task, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    bf16 = task.bf16 and device.type == "cuda"
    return torch.autocast("cuda", torch.bfloat16) if bf16 else contextlib.nullcontext()


def exchange_step(
    exchange: Exchange, layout: Layout, flats: Sequence[Tensor], states: Sequence[list[State]], step: int
) -> int:
    """Replace every rank's gradients by their average, and return the bytes that the busiest rank sent.

    `states` has one list per rank, which the first step fills.
    """

    def main(comm: LocalComm) -> int:
        mine = states[comm.rank]
        if not mine:
            mine.append(exchange.prepare(layout, comm))
        average(exchange, [flats[comm.rank]], mine, step, comm)
        return comm.counter.sent_bytes.get(WORLD, 0)

    return max(run_ranks(len(flats), main, deadline_s=DEADLINE_S))


# --- updates ----------------------------------------------------------------------------------------------------------


class LocalRunner:
    """Runs exchanges like `BucketRunner`, over a `LocalComm`, and at once: a delay is one of applying the result."""

    error = None
    raise_if_failed = BucketRunner.raise_if_failed
    wait = BucketRunner.wait

    def __init__(self, ranks: int) -> None:
        self.steps, self._ranks = 0, ranks
        self.comm: LocalComm | None = None
        """The comm of the current step."""

    def prepare(self, bucket: Bucket, residuals: Any) -> None:
        assert self.comm is not None
        bucket.state = bucket.exchange.prepare(bucket.layout, self.comm)
        bucket.averages = bucket.state.average(1 / self._ranks)

    def submit(
        self,
        step: Step,
        bucket: Bucket,
        flat: Tensor,
        run: Callable[[], Work | None],
        *,
        waits: bool,
        done: Callable[[Tensor], None],
    ) -> torch.futures.Future[None]:
        work = run()
        if work is not None:
            work.wait()
        done(flat)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def exchange(self, bucket: Bucket, flat: Tensor) -> Work | None:
        assert self.comm is not None
        bucket.ready.begin(self.steps)
        if not bucket.averages:
            flat.mul_(1 / self._ranks)
        return bucket.exchange.run(flat, bucket.ready, self.comm)

    def settle(self, buckets: Iterable[Bucket], finite: Tensor) -> None:
        BucketRunner.settle(cast(BucketRunner, self), buckets, finite)

    def end(self, step: Step) -> None:
        self.steps += 1


class SimulatedEngine(UpdateEngine):
    """Syncline's engine for updates, on one simulated rank. Only its creation and the runner are different."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, method: Method, policy: UpdatePolicy, ranks: int
    ) -> None:
        parameters = dict(model.named_parameters())
        self.policy, self._parameters, self._own = policy, parameters, None
        self._weights = {name: parameter.detach() for name, parameter in parameters.items()}
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        self._tensors = {**self._weights, **self._buffers}
        self.optimizer_state = OptimizerState(optimizer, parameters)
        self._device = next(iter(parameters.values())).device
        self._method = method
        self._resets_moments = method.resets != "none" if method.resets else policy.every == 1
        self.steps = 0
        self._sample_weights = None
        self.fragments: list[Fragment] = []
        self._flights: list[Flight] = []
        self._finite_flags: list[tuple[Tensor, Any]] = []
        self.local = LocalRunner(ranks)
        self.runner = cast(BucketRunner, self.local)

    def prepare(self, comm: LocalComm) -> None:
        """Collective: divide the weights and buffers into fragments, and have their exchanges allocate states."""
        self.local.comm = comm
        every, smallest = self.policy.every, pieces_module._SMALLEST_FRAGMENT_BYTES
        with patch.object(pieces_module, "_SMALLEST_FRAGMENT_BYTES", 1 if self._method.turns == "fine" else smallest):
            divided = fragments_of(self._weights, every)
        rarely = buffer_period(every)
        parts = [(self.policy.exchange, every, *part) for part in divided]
        parts += [(Dense(), rarely, *part) for part in fragments_of(self._buffers, 1)]
        for index, (exchange, period, turn, pieces) in enumerate(parts):
            layout = layout_of(pieces, self._tensors, dtype=torch.float32)
            turn = 0 if self._method.turns == "once" else turn
            fragment = Fragment(index, 0, exchange, layout, pieces=pieces, period=period, turn=turn)
            self.local.prepare(fragment, {})
            if self._resets_moments:
                fragment.ready.track_applied()
            self.fragments.append(fragment)

    def start(self) -> None:
        """Make the current weights, which are the same on all ranks, the anchor."""
        for fragment in self.fragments:
            fragment.start(self._tensors, self.policy.outer)

    def _apply(self, flight: Flight) -> None:
        if self._resets_moments and self._method.resets == "any":
            self.optimizer_state.reset_first_moments(flight.fragment.pieces, flight.flat != 0)
        super()._apply(flight)

    def _record_finite(self, finite: Tensor) -> None:
        if self._device.type != "cuda":  # there, a simulated step would wait for the device once per rank
            super()._record_finite(finite)


# --- one training -----------------------------------------------------------------------------------------------------


class Training:
    """The ranks of one training. This class exchanges gradients, with one model for all ranks."""

    def __init__(
        self, models: Sequence[nn.Module], source: Source, task: Task, lr: float, device: torch.device, warmup: int
    ) -> None:
        self.models, self._task, self.warmup = models, task, warmup
        self.gradients = RankGradients(models, source, task, device)
        self._own = self.gradients.parameters[:1] if models[0] is models[-1] else self.gradients.parameters
        self.optimizers = [task.optimize(parameters, lr) for parameters in self._own]
        self.schedulers = [LambdaLR(some, partial(schedule, steps=task.steps)) for some in self.optimizers]
        self._states: list[list[State]] = [[] for _ in models]

    exchange: Exchange = Dense()

    def step(self, step: int, numbers: Tensor) -> int:
        """Take a step with the examples of these numbers, and return the bytes that the busiest rank sent."""
        self.gradients.compute(numbers)
        sent = self._exchange_gradients(self.exchange, step)
        self._step_optimizers()
        return sent

    def _exchange_gradients(self, exchange: Exchange, step: int) -> int:
        sent = exchange_step(exchange, self.gradients.layout, self.gradients.flats, self._states, step)
        if step % _STEPS_BETWEEN_CHECKS == 0:
            _check_equal(self.gradients.flats)
        return sent

    def _step_optimizers(self) -> None:
        for parameters, optimizer, scheduler in zip(self._own, self.optimizers, self.schedulers, strict=True):
            if self._task.clip is not None:
                nn.utils.clip_grad_norm_(parameters, self._task.clip)
            optimizer.step()
            scheduler.step()

    def final(self) -> nn.Module:
        """Return the model that a training would have if it ended now."""
        return self.models[0]

    def check(self) -> None:
        """Raise if ranks that should have the same weights do not."""

    def describe(self) -> str:
        return self._states[0][0].describe() if self._states[0] else ""


class UpdateTraining(Training):
    """Ranks that exchange updates, after a warm-up that exchanges gradients. Each has its own model and optimizer."""

    def __init__(self, method: Method, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._policy = method.policy(self.warmup)
        self.engines = [
            SimulatedEngine(model, optimizer, method, self._policy, len(self.models))
            for model, optimizer in zip(self.models, self.optimizers, strict=True)
        ]
        self._on_ranks(lambda engine, comm: engine.prepare(comm))
        if not self.warmup:
            self._hand_over()

    def step(self, step: int, numbers: Tensor) -> int:
        if step < self.warmup:  # DDP broadcasts buffers before each forward
            for model in self.models[1:]:
                for mine, first in zip(model.buffers(), self.models[0].buffers(), strict=True):
                    mine.copy_(first)
        self.gradients.compute(numbers)
        sent = self._exchange_gradients(self._policy.warm_exchange, step) if step < self.warmup else 0
        self._step_optimizers()
        if step >= self.warmup:
            sent = self._on_ranks(lambda engine, comm: engine.after_step())
        elif step + 1 == self.warmup:
            self._hand_over()
        return sent

    def _hand_over(self) -> None:
        for model, engine in zip(self.models, self.engines, strict=True):
            for mine, first in zip(model.buffers(), self.models[0].buffers(), strict=True):
                mine.copy_(first)
            engine.local.steps = self.warmup
            engine.start()

    def _on_ranks(self, call: Callable[[SimulatedEngine, LocalComm], None]) -> int:
        """Call a function for each rank, and return the bytes that the busiest rank sent."""

        def main(comm: LocalComm) -> int:
            engine = self.engines[comm.rank]
            engine.local.comm = comm
            call(engine, comm)
            return comm.counter.sent_bytes.get(WORLD, 0)

        return max(run_ranks(len(self.engines), main, deadline_s=DEADLINE_S))

    @torch.no_grad()
    def final(self) -> nn.Module:
        """Return a model with the mean of the ranks' weights, as `Handle.detach` makes it."""
        mean = copy.deepcopy(self.models[0])
        for name, tensor in mean.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.stack([model.state_dict()[name] for model in self.models]).mean(0))
        return mean

    def check(self) -> None:
        for fragments in zip(*(engine.fragments for engine in self.engines), strict=True):
            _check_equal([fragment.anchor for fragment in fragments])

    def describe(self) -> str:
        first = self.engines[0].fragments
        return f"{len(first)} fragments: {first[0].ready.describe()}"


class OneBitTraining(Training):
    """1-bit Adam: AdamW while gradients are exchanged in 4 bits. Then the second moment is frozen, and ranks exchange
    the first moment in 1 bit per element."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self._task.optimizer != "AdamW":
            raise UsageError(f"1-bit Adam needs a task with AdamW, but this one uses {self._task.optimizer}")
        self._bits: OneBit | None = None
        self._moment = self._divisor = torch.empty(0)

    def step(self, step: int, numbers: Tensor) -> int:
        if step < self.warmup:
            return super().step(step, numbers)
        if self._bits is None:
            self._freeze()
        assert self._bits is not None
        self.gradients.compute(numbers)
        parameters, options = self.gradients.parameters[0], self.optimizers[0].param_groups[0]
        lr, beta = options["lr"], options["betas"][0]
        vectors = torch.stack(self.gradients.flats)
        if self._task.clip is not None:
            norms = vectors.norm(dim=1, keepdim=True)
            vectors.mul_((self._task.clip / (norms + 1e-6)).clamp(max=1.0))
        self._moment = self._bits.mean(vectors.mul_(1 - beta).add_(self._moment, alpha=beta))
        changes = (self._moment / self._divisor).split([parameter.numel() for parameter in parameters])
        weights = [parameter.detach() for parameter in parameters]
        torch._foreach_mul_(weights, 1 - lr * options["weight_decay"])
        torch._foreach_add_(weights, [c.view_as(w) for c, w in zip(changes, weights, strict=True)], alpha=-lr)
        self.schedulers[0].step()
        return self._bits.sent_bytes

    def _freeze(self) -> None:
        parameters, options = self.gradients.parameters[0], self.optimizers[0].param_groups[0]
        state = self.optimizers[0].state
        correction = 1 - options["betas"][1] ** max(1, self.warmup)
        self._moment = torch.cat([state[p]["exp_avg"].flatten() for p in parameters])
        second = torch.cat([state[p]["exp_avg_sq"].flatten() for p in parameters])
        self._divisor = (second / correction).sqrt_().add_(options["eps"])
        self._bits = OneBit([p.numel() for p in parameters], len(self.models), second.device)


def training_of(
    method: Method, model: nn.Module, source: Source, task: Task, lr: float, data: Data, ranks: int, share: float
) -> Training:
    """Return the ranks of a training by a method, all with the weights of `model`."""
    warmup = method.warmup(task.steps, share)
    common = [model] * ranks
    if method.kind == "updates":
        replicas = [model, *(copy.deepcopy(model) for _ in range(ranks - 1))]
        return UpdateTraining(method, replicas, source, task, lr, data.device, warmup)
    if method.kind == "1-bit-adam":
        training: Training = OneBitTraining(common, source, task, lr, data.device, max(1, warmup))
        training.exchange = method_named("int4").exchange
        return training
    training = Training(common, source, task, lr, data.device, warmup)
    exchange = method.exchange
    training.exchange = replace(exchange, start=warmup) if isinstance(exchange, PowerSGD) else exchange
    return training


@torch.no_grad()
def evaluate(model: nn.Module, source: Source, task: Task, device: torch.device) -> tuple[float, float]:
    """Return the mean loss over held-out examples, in nats, and the accuracy in per cent."""
    model.eval()
    losses, right, count = [], 0, 0
    for inputs, targets in source.held_out():
        with autocast(task, device):
            outputs = model(inputs)
        losses.append(zoo.loss(outputs.float(), targets).item() * targets.numel())
        right += int((outputs.argmax(-1) == targets).sum())
        count += targets.numel()
    model.train()
    loss = sum(losses) / count
    chance = math.log(outputs.shape[-1])
    return (loss if math.isfinite(loss) else chance), 100 * right / count


@dataclass(frozen=True)
class Run:
    """One training of the study."""

    model: str
    method: str
    seed: int
    lr: float
    ranks: int
    sweep: bool = False

    @property
    def label(self) -> str:
        text = f"{self.model:9} {self.method:36} seed {self.seed:<3} lr {self.lr:<6g} {self.ranks} ranks"
        return text + (" sweep" if self.sweep else "")


def train(run: Run, task: Task, data: Data, share: float) -> dict[str, Any]:
    """Train a model with one method, and return its curve. `share` is the warm-up's share of the steps."""
    start = time.monotonic()
    source = task.source(data)
    torch.manual_seed(run.seed)
    model = task.build().to(data.device)
    generator = torch.Generator().manual_seed(run.seed)
    numbers = torch.randint(source.examples, (task.steps, task.examples), generator=generator).to(data.device)
    numbers = numbers.view(task.steps, run.ranks, -1)
    training = training_of(method_named(run.method), model, source, task, run.lr, data, run.ranks, share)
    points = sorted({round(task.steps * number / POINTS) for number in range(1, POINTS + 1)} - {0})
    curve: list[tuple[float, float]] = []
    sent, warm_sent, sent_at, training_s, began = 0, 0, [], 0.0, time.monotonic()
    prepared_s = began - start
    for step in range(task.steps):
        sent += training.step(step, numbers[step])
        warm_sent = sent if step < training.warmup else warm_sent
        if step + 1 in points:
            training.check()
            _synchronize(data.device)
            training_s += time.monotonic() - began
            curve.append(evaluate(training.final(), source, task, data.device))
            sent_at.append(sent)
            began = time.monotonic()
    return {
        "model": run.model,
        "method": run.method,
        "seed": run.seed,
        "lr": run.lr,
        "ranks": run.ranks,
        "sweep": run.sweep,
        "points": points,
        "loss": [round(loss, 5) for loss, _ in curve],
        "accuracy": [round(accuracy, 3) for _, accuracy in curve],
        "sent_bytes": sent_at,
        "warmup_steps": training.warmup,
        "warmup_bytes": warm_sent,
        "bytes_per_step": round(sent / task.steps),
        "bucket": training.describe(),
        "device": torch.cuda.get_device_name() if data.device.type == "cuda" else "cpu",
        "cuda_graph": training.gradients.recorded,
        "gradient_ms": round(_gradient_ms(training.gradients, numbers[0], data.device) / run.ranks, 3),
        "ms_per_step": round(1e3 * training_s / task.steps, 2),
        "prepared_s": round(prepared_s, 2),
        "all_s": round(time.monotonic() - start, 2),
    }


def _gradient_ms(gradients: RankGradients, numbers: Tensor, device: torch.device, times: int = 3) -> float:
    """Return the milliseconds that the gradients of all ranks take."""
    _synchronize(device)
    start = time.monotonic()
    for _ in range(times):
        gradients.compute(numbers)
    _synchronize(device)
    return 1e3 * (time.monotonic() - start) / times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _check_equal(flats: Sequence[Tensor]) -> None:
    first = flats[0].view(torch.int32)  # NaNs of the same bits are equal, too
    if not all(torch.equal(first, other.view(torch.int32)) for other in flats[1:]):
        raise RuntimeError("the ranks got different results")


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear for a fifteenth of the steps, then a cosine down to 0.1."""
    rise = max(1, steps // 15)
    if step < rise:
        return (step + 1) / rise
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - rise) / max(1, steps - rise)))
