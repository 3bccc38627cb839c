"""`Layerwise`: data parallelism for a plain module, layer by layer, where memory is short and links are slow.

After LaySA (memory management and sparse communication together, IEEE Access 2021). DDP keeps every gradient until
backward is over, and a sparse hook keeps a residual beside it, twice. Here a layer's gradients leave as soon as
backward has made them: they are exchanged on a lane while backward goes on, the optimizer steps the layer, and the
gradients are gone. What an exchange keeps is there once, on the device or in the host's memory, and what it needs
while it runs is shared by all layers (`exchange/workspace.py`).

The optimizer is an ordinary one, and steps the layers one by one, each when its gradients have arrived:

- *G* (default): the exchange gets gradients, the optimizer gets their average. Exactly DDP with the same exchange.
- *U* (`mirror=True`, SGD only): each rank turns its gradients into its own update, u = η·(velocity), and updates are
  exchanged: w ← w − mean of what was accepted. What waits is a part of the *weights'* way, so it is worth the same
  whatever the learning rate does meanwhile. The mirror, w minus what waits, is never stored: the difference of two
  nearly equal numbers would lose it.

Gradients wait for their exchange in their own memory, up to `backlog_mb`; then backward waits for the link.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.dist.agreement import current_device, flatten, versions_here
from syncline.dist.comm import backend_of, group_timeout
from syncline.errors import ExchangeError, SynclineError, UsageError, tell
from syncline.exchange import Exchange, Tree, settings
from syncline.health.meeting import meet, meeting, together
from syncline.layerwise.activations import Managed, ways_of
from syncline.layerwise.bucketing import Cut, Piece, cut_of
from syncline.layerwise.gradient_pipeline import GradientPipeline
from syncline.layerwise.layer_optimizer import Stepping, of_optimizer, state_bytes
from syncline.layerwise.measure_blocks import measure_activations
from syncline.predict.memory import (
    BACKLOG_BUCKETS,
    Choice,
    Training,
    bucket_bytes,
    choose,
    layerwise_lanes,
    smallest_budget,
)
from syncline.predict.schedule import MIB
from syncline.records.activations import KEEP, PARK, RECOMPUTE
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.runtime.bucket_policy import Planned, Route, Uniform, difference_of, read_plan
from syncline.runtime.checkpoint import Checkpoints, mark_of_bits, misfit_of
from syncline.runtime.parameters import described, described_fully, only_device
from syncline.runtime.stats import Stats, predicted_for, timings_of
from syncline.runtime.topology import find_place, mark_of, read_network
from syncline.runtime.validation import (
    OptimizerOf,
    check_lanes,
    check_numbers,
    checked_exchange,
    group_of,
    made_optimizer,
    refuse_double_momentum,
    same_as_first,
    trained_of,
)
from syncline.units import format_bytes, parse_bytes

_ALL_THERE = 4
"""Steps after which an optimizer, and whatever exchanges keep, takes what it will take."""
_VELOCITY = "mirror"
"""The kind of tensor that it is in a file, beside what the exchange keeps."""


class Layerwise:
    """Trains `module` with data parallelism; call it like the module, and backward on the loss does all the rest.

        trainer = syncline.Layerwise(net, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), syncline.OkTopk())
        for inputs, labels in batches:
            loss_of(trainer(inputs), labels).backward()      # exchanges, steps and frees, layer by layer

    All ranks of the process group create it, with the same arguments. `optimizer` makes one for the parameters it is
    given, or is one; `trainer.optimizer` is an ordinary optimizer, for schedulers and the like. Weights and buffers
    become rank 0's.

    `plan`, or the file of one: its buckets, lanes and exchanges, instead of `exchange`, `lanes` and `bucket_mb`.
    `mirror`: exchange updates instead of gradients (U). `clip_norm`: clip the global norm of the averaged gradients;
    all of them are then kept to the end of backward, which costs as much memory as they take. `bucket_mb` and
    `backlog_mb`: the most that is exchanged together, and the most that waits for it. `residual`: where exchanges keep
    what waits, `device` or `host`. `find_unused_parameters`: some get no gradient in some steps; costs a round trip per
    step.

    `memory_budget`, like "8GiB", is what tensors on the device may take, weights included. What blocks of layers leave
    for their backward is then kept, recomputed or moved to the host, and so is what waits to be exchanged, as it costs
    least time; or it is refused, with the least that would do. `step` runs a forward on the module that it is given,
    with a batch like those to come, and returns the loss: sizes and times are measured with it, before training.
    `activations` says it instead: `keep`, `recompute`, `offload` or `park` (recompute, from the host's memory), for all
    blocks or by their names.

    What DDP offers and this does not: GradScaler (it decides at the end whether a step counts, and layers have taken
    theirs by then: use bf16, which needs no scaling), `join`, gradients that are parts of each other's buckets.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | OptimizerOf,
        exchange: Exchange | None = None,
        *,
        mirror: bool = False,
        plan: Plan | str | os.PathLike[str] | None = None,
        bucket_mb: float | None = None,
        backlog_mb: float | None = None,
        lanes: int | None = None,
        clip_norm: float | None = None,
        memory_budget: str | int | None = None,
        step: Callable[[nn.Module], Tensor] | None = None,
        activations: str | Mapping[str, str] | None = None,
        residual: str | None = None,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
        network: Network | str | os.PathLike[str] | None = None,
    ) -> None:
        self.module = module
        self._parameters = trained_of(module)
        self._device = only_device(self._parameters)
        self._group = group_of(process_group)
        planned = None if plan is None else read_plan(plan, self._group, self._device, "Layerwise")
        if planned is not None and (exchange is not None or lanes is not None or bucket_mb is not None):
            raise UsageError("exchange, lanes and bucket_mb are the plan's: leave them out")
        if planned is not None and planned.nothing:
            planned = None
        if lanes is not None:
            check_lanes(lanes)
        self.exchange = checked_exchange(planned.exchanges[0] if planned is not None else exchange)
        check_numbers(bucket_mb, backlog_mb, clip_norm, timeout_s, residual)
        budget_bytes = None if memory_budget is None else parse_bytes(memory_budget)
        if budget_bytes is not None and (step is None or activations is not None):
            raise UsageError(
                "memory_budget measures, with step=, a function that runs a forward on the module that it is given and "
                "returns the loss; and it chooses what becomes of activations itself"
            )
        self.optimizer = made_optimizer(optimizer, self._parameters)
        self._stepping: Stepping = of_optimizer(self.optimizer, self._parameters, mirror=mirror, clip_norm=clip_norm)
        refuse_double_momentum(self.exchange, self.optimizer, mirror=mirror)
        total = sum(p.numel() * p.element_size() for p in self._parameters.values())
        self._cap_bytes = bucket_bytes(total) if bucket_mb is None else int(bucket_mb * MIB)
        self._backlog_bytes = BACKLOG_BUCKETS * self._cap_bytes if backlog_mb is None else int(backlog_mb * MIB)
        self._route: Route = Uniform(self.exchange, lanes or layerwise_lanes(backend_of(self._group)))
        if planned is not None:
            self._route = Planned(planned, settled_after=0)
        self._broadcasts, self._synced = broadcast_buffers, True
        """Whether the last forward's gradients were exchanged: buffers become rank 0's after that, as in DDP."""
        self._trained = {id(parameter) for parameter in self._parameters.values()}
        self._budget_bytes = budget_bytes
        self.choice: Choice | None = None
        """What a memory budget came to."""
        self._managed: Managed | None = None
        timeout = group_timeout(self._group) if timeout_s is None else timedelta(seconds=timeout_s)
        with current_device(self._device):
            known = read_network(network)
            given = {
                "residual": residual,
                "memory_budget": budget_bytes,
                "find_unused_parameters": find_unused_parameters,
            }
            meet(self._group, self._fingerprint(given, known), "what is trained", "Layerwise")
            if isinstance(known, SynclineError):
                raise known
            with meeting(self._group, "Layerwise", users=True):
                self._place = find_place(self._group, self._route.exchanges, known)
                same_as_first(self._group, [*module.parameters(), *module.buffers()])
                self._pipeline = GradientPipeline(
                    self._group,
                    self._parameters,
                    self._route,
                    self._stepping,
                    timeout,
                    place=self._place,
                    cap_bytes=self._cap_bytes,
                    backlog_bytes=self._backlog_bytes,
                    find_unused=find_unused_parameters,
                    rest_on_host=residual == "host",
                    first=None if planned is None else self._planned_cut(planned),
                )
            try:
                if step is not None and budget_bytes is not None:
                    with together(self._group, self._device, "the memory budget", "Layerwise"):
                        self.choice, activations = self._choose(step, budget_bytes, residual)
                    for workspace in self._pipeline.workspaces:
                        workspace.rest_on(self.choice.residual)
                self._managed = Managed(module, ways_of(module, activations))
            except BaseException:
                self.close()
                raise
        self._pipeline.start()

    # --- what a training loop calls -----------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """The module's forward."""
        if torch.is_grad_enabled():
            self._check_ready()
            if self._broadcasts and self._synced:
                same_as_first(self._group, list(self.module.buffers()))
            self._synced = self._pipeline.syncing
            self._check_peak()
        return self.module(*inputs, **options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only accumulates gradients, as in DDP: they then are all there until one outside exchanges
        them, which is what this exists to avoid. Larger batches that fit because of it are the better way."""
        before, self._pipeline.syncing = self._pipeline.syncing, False
        try:
            yield
        finally:
            self._pipeline.syncing = before

    def train(self, mode: bool = True) -> Layerwise:
        self.module.train(mode)
        return self

    def eval(self) -> Layerwise:
        return self.train(False)

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        return self._pipeline.runner.steps

    @property
    def error(self) -> BaseException | None:
        """Why it cannot go on, if it cannot."""
        return self._pipeline.error

    @property
    def straggler(self) -> str | None:
        """Which rank keeps the others waiting, and for how long, if one does: the first rank looks every 10 s."""
        return self._pipeline.runner.straggler

    @property
    def dropped(self) -> int:
        """How often a bucket was not finite, and its layers did not take a step. Waits for the device."""
        return self._pipeline.dropped

    @property
    def tree(self) -> Tree | None:
        """Where ranks sit, for an exchange that asks."""
        return None if self._place is None else self._place.tree

    @property
    def lanes(self) -> int:
        return self._route.lanes

    @property
    def bucket_bytes(self) -> int:
        """The most that is exchanged together."""
        return self._cap_bytes

    @property
    def ways(self) -> dict[str, str]:
        """What becomes of what blocks leave for their backward: those that are not simply kept."""
        return {} if self._managed is None else {name: way for name, way in self._managed.ways.items() if way != KEEP}

    @property
    def recomputes(self) -> bool:
        return any(way in (RECOMPUTE, PARK) for way in self.ways.values())

    def predicted_sent_bytes(self) -> dict[str, int]:
        """What a step should send, per level, by the exchange's own account."""
        return predicted_for(self._pipeline.buckets, self._pipeline.runner.groups)

    def stats(self) -> Stats:
        runner = self._pipeline.runner
        last = runner.last_step
        return Stats(runner.steps, dict(last.sent_bytes), runner.sent_bytes, timings_of(last.jobs))

    def describe(self) -> str:
        """What trains here, in how many buckets, and what becomes of activations."""
        ranks, count = self._group.size(), len(self._pipeline.buckets)
        lines = [f"{self.exchange!r} layer by layer among {ranks} ranks, {count} buckets"]
        if self.choice is not None and self._budget_bytes is not None:
            lines.append(
                f"memory: {format_bytes(self.choice.peak_bytes)} of {format_bytes(self._budget_bytes)} foreseen, "
                f"{format_bytes(self.choice.states.bytes)} of it between steps; blocks: {self.choice.describe()}"
            )
        elif self.ways:
            lines.append(f"blocks: {', '.join(f'{name} {way}' for name, way in list(self.ways.items())[:4])}, …")
        if self._place is not None:
            lines.append(self._place.tree.describe())
        return "\n".join(lines)

    # --- memory -------------------------------------------------------------------------------------------------

    def training(self) -> Training:
        """What is there all the time, in bytes."""
        parameters = list(self.module.parameters())
        total = sum(p.numel() * p.element_size() for p in self._parameters.values())
        largest = max(p.numel() * p.element_size() for p in self._parameters.values())
        waiting = total if self._stepping.at_end else min(total, self._backlog_bytes + largest)
        return Training(
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            buffer_bytes=sum(b.numel() * b.element_size() for b in self.module.buffers()),
            optimizer_bytes=int(state_bytes(self.optimizer) * sum(p.numel() for p in self._parameters.values())),
            residual_bytes=sum(
                bucket.state.rests_bytes for bucket in self._pipeline.buckets if bucket.state is not None
            ),
            workspace_bytes=sum(workspace.bytes for workspace in self._pipeline.workspaces),
            waiting_bytes=waiting,
        )

    def _choose(
        self, step: Callable[[nn.Module], Tensor], budget_bytes: int, residual: str | None
    ) -> tuple[Choice, dict[str, str]]:
        found, training = measure_activations(self.module, {1: step}), self.training()
        choice = choose(found, training, 1, budget_bytes, residual=residual)
        if choice is None:
            least = smallest_budget(found, training, 1, residual=residual)
            raise UsageError(
                f"memory_budget is {format_bytes(budget_bytes)}, and the least with which this batch can be trained is "
                f"{format_bytes(math.ceil(least / MIB) * MIB)}: allow that, or take a smaller batch"
            )
        return choice, {block.name: way for block, way in zip(found.blocks, choice.ways, strict=True)}

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes what is this rank's own to a file of its own in `folder`. All ranks call it, between steps.

        That is what waits to be exchanged and, with `mirror`, the velocity. All else is the same on every rank, and one
        of them saves it as ever: `trainer.module.state_dict()` and `trainer.optimizer.state_dict()`. If a rank cannot
        write, every rank raises and the folder holds what it held before.
        """
        state = self._about()
        tensors = self._pipeline.kept()
        for name, velocity in self._velocities().items():
            tensors.setdefault(name, {})[_VELOCITY] = velocity
        self._checkpoints.save(folder, {**state, "weights": mark_of_bits(self._parameters), "tensors": tensors})

    def load(self, folder: str | os.PathLike[str], *, on_world_size: str = "refuse") -> None:
        """Goes on where `save` was called, on all ranks together, after each of them has loaded the weights and the
        optimizer of that step. Other weights are refused.

        `on_world_size`, where not so many ranks are here as saved it, is that of `handle.load`; with `mirror`
        velocities cannot be dealt anew, and it is `refuse` or `reset`.
        """
        self._check_loads()
        state = self._checkpoints.load(folder, on_world_size, self._examine)
        kept = {name: dict(kinds) for name, kinds in state["tensors"].items()}
        if self._stepping.mirror:
            for name, parameter in self._parameters.items():
                velocity = kept.get(name, {}).pop(_VELOCITY, None)
                self.optimizer.state[parameter]["momentum_buffer"] = (
                    None if velocity is None else torch.empty_like(parameter).copy_(velocity)
                )
        waiting = {name: kinds for name, kinds in kept.items() if kinds}
        self._go_on(cut_of(state["buckets"], self._parameters), waiting, state["steps"])

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to go on: weights and optimizer, as they are, and a copy of what waits to be
        exchanged, in the host's memory."""
        return {
            **self._about(),
            "tensors": self._pipeline.kept(),
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, on the same rank of as many. All ranks load what they saved at the same
        step, or none changes anything."""
        self._check_loads()
        with together(self._group, self._device, "what is loaded", "load_state_dict") as fields:
            made = self._loadable(state)
            fields["steps"] = state["steps"]
            fields["buckets"] = state["buckets"]
            fields["weights"] = {name: float(state["model"][name].double().sum()) for name in self._parameters}
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._go_on(made, state["tensors"], state["steps"])

    def _about(self) -> dict[str, Any]:
        """What a state belongs to."""
        self._check_ready()
        buckets = [[str(piece) for piece in bucket.pieces] for bucket in self._pipeline.buckets]
        return {**self._checkpoints.identity, "steps": self.steps, "buckets": buckets}

    def _go_on(self, made: Cut, kept: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        with current_device(self._device):
            self._pipeline.go_on(made, kept, steps)

    def _velocities(self) -> dict[str, Tensor]:
        """Where each rank has its own."""
        state = self.optimizer.state
        found = {name: state.get(p, {}).get("momentum_buffer") for name, p in self._parameters.items()}
        return {name: velocity for name, velocity in found.items() if velocity is not None and self._stepping.mirror}

    def _examine(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses a state of other weights; what ranks would drift apart with, if theirs were not the same."""
        if state.get("weights") != mark_of_bits(self._parameters):
            raise UsageError(
                f"the weights here are not those of step {state['steps']}, with which this was saved: first load the "
                "module's and the optimizer's state of that step, on every rank"
            )
        shared = {
            f"{name}.{kind}": value
            for name, parameter in self._parameters.items()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and not self._stepping.mirror
        }
        return flatten({"optimizer": {**self._stepping.describe(), "state": mark_of_bits(shared)}})

    def _loadable(self, state: Mapping[str, Any]) -> Cut:
        """The buckets of a state of which nothing is left that could not be loaded."""
        self._checkpoints.check(state)
        for part in ("model", "optimizer"):
            if not isinstance(state.get(part), Mapping):
                raise UsageError(f"the state has no {part!r}: pass what state_dict() returned")
        mine, theirs = self.module.state_dict(), state["model"]
        for name in dict.fromkeys([*mine, *theirs]):
            here, there = (str(tuple(of[name].shape)) if name in of else "missing" for of in (mine, theirs))
            if here != there:
                raise UsageError(f"the state's {name} is {there}, and the model's is {here}")
        here, there = (
            str([len(group["params"]) for group in of["param_groups"]])
            for of in (self.optimizer.state_dict(), state["optimizer"])
        )
        if here != there:
            raise UsageError(f"the state's optimizer has groups of {there} parameters, and this one of {here}")
        return cut_of(state["buckets"], self._parameters)

    @property
    def _checkpoints(self) -> Checkpoints:
        keeps = any(exchange.keeps for exchange in self._route.exchanges)
        levels = repr(self._place.tree.root) if self._place is not None and keeps else None
        described = {
            **self._route.settings(),
            "mirror": self._stepping.mirror,
            "optimizer": type(self.optimizer).__name__,
        }
        deals = not self._stepping.mirror
        return Checkpoints(self._group, self._device, described, levels, self._misfit, deals)

    def _misfit(self, tensors: Mapping[str, Mapping[str, Tensor]], buckets: Sequence[Sequence[str]]) -> str | None:
        try:
            cut_of(buckets, self._parameters)
        except UsageError as error:
            return str(error)
        return misfit_of({name: parameter.shape for name, parameter in self._parameters.items()}, tensors)

    def close(self) -> None:
        """Gives the module back as an ordinary one: what waits to be exchanged is lost."""
        if self._managed is not None:
            self._managed.close()
        self._pipeline.close()

    # --- checks -------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._pipeline.runner.lanes:
            raise UsageError("this trainer is closed: make another")

    def _check_loads(self) -> None:
        self._check_open()
        if self._pipeline.runner.error is not None:
            raise ExchangeError(f"an exchange failed, and its groups with it: make another Layerwise: {self.error}")

    def _check_ready(self) -> None:
        self._check_open()
        kind = self._device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            raise UsageError(
                "autocast to float16 needs a GradScaler, which decides at the end of backward whether a step counts, "
                "and layers have taken theirs by then: use torch.bfloat16, which needs no scaling"
            )
        trained = [id(parameter) for parameter in self.module.parameters() if parameter.requires_grad]
        if len(trained) != len(self._trained) or not self._trained.issuperset(trained):
            raise UsageError(
                "other parameters are trained than when this trainer was made: freeze and unfreeze before that, or "
                "close() it and make another"
            )
        self._pipeline.check_complete()

    def _check_peak(self) -> None:
        """Whether what was foreseen is what is taken: once, after a step with everything that is kept there."""
        if self.choice is None or self._device.type != "cuda" or self.steps not in (_ALL_THERE, _ALL_THERE + 1):
            return
        if self.steps == _ALL_THERE:
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        peak = torch.cuda.max_memory_allocated(self._device)
        if peak > max(1.1 * self.choice.peak_bytes, self._budget_bytes or 0):
            tell(
                f"a step takes {format_bytes(peak)} of memory, and {format_bytes(self.choice.peak_bytes)} were "
                "foreseen: something else is on the device, or batches are larger than the one that was measured"
            )

    def _fingerprint(self, given: Mapping[str, Any], network: Network | SynclineError | None) -> dict[str, Any]:
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        return flatten(
            {
                **given,
                "exchange": settings(self.exchange),
                "lanes": self._route.lanes,
                "bucket_bytes": self._cap_bytes,
                "broadcast_buffers": self._broadcasts,
                "optimizer": self._stepping.describe(),
                "version": versions_here(),
                "parameter": {name: described_fully(tensor) for name, tensor in tensors},
                "network": mark_of(network),
            }
        )

    def _planned_cut(self, plan: Plan) -> Cut:
        shapes = {name: described(parameter) for name, parameter in self._parameters.items()}
        different = difference_of(plan, shapes, self._group, self._device.type, "Layerwise")
        if different is not None:
            raise UsageError(f"the plan is for something else: {different}. Plan again, or leave it out")
        return tuple(
            tuple(Piece(name, 0, self._parameters[name].numel()) for name in bucket.parameters)
            for bucket in plan.buckets
        )
