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
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline._version import __version__
from syncline.engine.activations import Managed
from syncline.engine.agreement import current_device, flatten, meet, together
from syncline.engine.attach import BucketTiming, Stats, read_network
from syncline.engine.checkpoint import Checkpoints
from syncline.engine.comm import LaneGroups, gather_bytes, group_timeout
from syncline.engine.given import (
    OptimizerOf,
    check_numbers,
    checked_exchange,
    group_of,
    lying_like,
    made_optimizer,
    refuse_double_momentum,
    same_as_first,
    trained_of,
    ways_of,
)
from syncline.engine.lane import Job, Lane, make_lane
from syncline.engine.model import only_device
from syncline.engine.passes import Bucket, Flight, Pass, counts
from syncline.engine.pieces import Cut, Piece, cut, cut_of, dealt_to, joined, layout_of, misfit_of
from syncline.engine.place import find_place, hosts_of
from syncline.engine.route import Planned, Route, Uniform, read_plan, tell
from syncline.engine.stepping import Stepping, of_optimizer, state_bytes
from syncline.errors import ExchangeError, SynclineError, UsageError
from syncline.exchange import Climbing, Exchange, Tree, settings
from syncline.exchange.workspace import Workspace
from syncline.measure.activations import KEEP, PARK, RECOMPUTE
from syncline.measure.blocks import measure_activations
from syncline.measure.network import Network
from syncline.plan.plan import Plan, Where
from syncline.predict.memory import (
    BACKLOG_BUCKETS,
    Choice,
    Training,
    bucket_bytes,
    choose,
    layerwise_lanes,
    smallest_budget,
)
from syncline.units import format_bytes, parse_bytes

MIB = 2**20
_ALL_THERE = 4
"""Steps after which an optimizer, and whatever exchanges keep, takes what it will take."""


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
        planned = None if plan is None else read_plan(plan, self._group)
        if planned is not None and (exchange is not None or lanes is not None or bucket_mb is not None):
            raise UsageError("exchange, lanes and bucket_mb are the plan's: leave them out")
        if planned is not None and planned.nothing:
            planned = None
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
        self._route: Route = Uniform(self.exchange, lanes or layerwise_lanes(str(dist.get_backend(self._group))))
        if planned is not None:
            self._route = Planned(planned, settled_after=0)
        self._find_unused, self._broadcasts = find_unused_parameters, broadcast_buffers
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self.error: BaseException | None = None
        self._broken = False
        """A collective failed: nothing can be exchanged any more."""
        self.steps = 0
        self._syncing = True
        self._synced = True
        """Whether the last forward's gradients were exchanged: buffers become rank 0's after that, as in DDP."""
        self._pass = Pass()
        self._last = Pass()
        self._settled = planned is not None
        """Whether buckets follow the order in which gradients become ready."""
        self._counted: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._dropped = [torch.zeros((), dtype=torch.int64, device=self._device) for _ in range(self._route.lanes)]
        """By lane: they do not wait for each other."""
        self._told_dropped = 0
        self.choice: Choice | None = None
        """What a memory budget came to."""
        self._budget_bytes = budget_bytes
        self._managed: Managed | None = None
        self._groups: list[LaneGroups] = []
        self._lanes: list[Lane] = []
        self._hooks: list[Any] = []
        timeout = group_timeout(self._group) if timeout_s is None else timedelta(seconds=timeout_s)
        with current_device(self._device):
            known = read_network(network)
            meet(self._group, self._fingerprint(residual, known, budget_bytes), "what is trained", "Layerwise")
            if isinstance(known, SynclineError):
                raise known
            self._place = find_place(self._group, self._route.exchanges, known)
            same_as_first(self._group, [*module.parameters(), *module.buffers()])
            self._workspaces = [
                Workspace(self._device, rest_on_host=residual == "host") for _ in range(self._route.lanes)
            ]
            try:
                for index in range(self._route.lanes):
                    topology = None if self._place is None else self._place.topology
                    self._groups.append(LaneGroups.create(self._group, timeout, topology))
                    self._lanes.append(make_lane(self._device, f"syncline-lane-{index}"))
                self._buckets = self._furnished(self._first_cut(planned))
                if step is not None and budget_bytes is not None:
                    with together(self._group, self._device, "the memory budget", "Layerwise"):
                        self.choice, activations = self._choose(step, budget_bytes, residual)
                    for workspace in self._workspaces:
                        workspace.rest_on(self.choice.residual)
                self._managed = Managed(module, ways_of(module, activations))
            except BaseException:
                self.close()
                raise
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrive) for parameter in self._parameters.values()
        ]

    # --- what a training loop calls -----------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """The module's forward."""
        if torch.is_grad_enabled():
            self._check_ready()
            if self._broadcasts and self._synced:
                same_as_first(self._group, list(self.module.buffers()))
            self._synced = self._syncing
        return self.module(*inputs, **options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only accumulates gradients, as in DDP: they then are all there until one outside exchanges
        them, which is what this exists to avoid. Larger batches that fit because of it are the better way."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def train(self, mode: bool = True) -> Layerwise:
        self.module.train(mode)
        return self

    def eval(self) -> Layerwise:
        return self.train(False)

    # --- backward -----------------------------------------------------------------------------------------------

    def _arrive(self, parameter: Tensor) -> None:
        """Backward has completed a parameter's gradient."""
        if not self._syncing:
            return
        if self.error is not None:
            raise ExchangeError(f"an earlier exchange of this model failed: {self.error}") from self.error
        name, now = self._names[id(parameter)], self._pass
        if name in now.arrived:
            raise UsageError(
                f"the gradient of {name} came twice in one backward: a weight that several checkpointed parts share "
                "needs torch.utils.checkpoint(…, use_reentrant=False)"
            )
        gradient = parameter.grad
        assert gradient is not None  # noqa: S101 - it has just been accumulated
        parameter.grad = None
        first = not now.arrived
        now.arrived.add(name)
        now.order.append(name)
        now.held[name] = lying_like(gradient, parameter)
        del gradient
        if not self._find_unused:
            self._submit_ready()
        elif first:
            _at_end_of_backward(self._fill_unused)

    def _submit_ready(self) -> None:
        """In the order of buckets, which is the same on all ranks, whatever became ready first here."""
        now = self._pass
        while now.submitted < len(self._buckets):
            bucket = self._buckets[now.submitted]
            if any(piece.name not in now.arrived for piece in bucket.pieces):
                return
            now.submitted += 1
            self._submit(bucket)
        _at_end_of_backward(self._finish)

    def _submit(self, bucket: Bucket) -> None:
        now, lane = self._pass, self._lanes[bucket.lane]
        held = [now.held[piece.name] for piece in bucket.pieces]
        waiting = bucket.layout.numel * bucket.layout.dtype.itemsize
        while now.under_way and sum(flight.bytes for flight in now.under_way) + waiting > self._backlog_bytes:
            self._land(now.under_way.pop(0))
        on_lane = self._device.type == "cuda"
        job = Job(
            bucket=bucket.index,
            lane=bucket.lane,
            flat=self._workspaces[bucket.lane].take("flat", (bucket.layout.numel,), bucket.layout.dtype),
            run=lambda: self._run(bucket, held, now, apply=on_lane),
            marks=lane.marks(now.jobs[0].marks if now.jobs else None),
        )
        now.jobs.append(job)
        now.under_way.append(Flight(bucket, self._guarded(lambda: lane.submit(job), bucket), waiting))

    def _land(self, flight: Flight) -> None:
        """Waits for a bucket: on CUDA, backward's stream does. Then nothing of it is needed any more."""
        self._guarded(flight.future.wait, flight.bucket)
        if self._device.type != "cuda":
            self._apply(flight.bucket, self._pass)
        for name in flight.bucket.ends:
            if not self._stepping.at_end:
                self._pass.held.pop(name, None)

    def _guarded(self, call: Callable[[], Any], bucket: Bucket) -> Any:
        try:
            return call()
        except BaseException as error:
            if self.error is None:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                failed = ExchangeError(
                    f"exchanging {bucket.label} failed in step {self.steps}: {reason}. Some layers have taken this "
                    "step and others have not: go on from a checkpoint"
                )
                self.error, self._broken = failed, True
                raise failed from error
            raise

    def _finish(self) -> None:
        """All gradients have arrived and are under way."""
        now = self._pass
        while now.under_way:
            self._land(now.under_way.pop(0))
        if self._stepping.at_end:
            flags = torch.stack([counts(bucket, now) for bucket in self._buckets]).tolist()
            names = [
                name
                for bucket, counted in zip(self._buckets, flags, strict=True)
                for name in self._to_step(bucket, now)
                if counted
            ]
            if names:
                self._step(names, now.held, torch.ones((), dtype=torch.bool))
        self._stepping.end()
        self._last, self._pass = now, Pass()
        self._last.held.clear()
        sent = self.sent_bytes
        self._sent = {level: sent[level] - self._counted.get(level, 0) for level in sent}
        self._counted = sent
        self.steps += 1
        if self._device.type != "cuda":
            self._tell_dropped()
        if not self._settled:
            self._settle(now.order)
        self._check_peak()

    def _check_peak(self) -> None:
        """Whether what was foreseen is what is taken: once, when everything that is kept is there."""
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

    def _fill_unused(self) -> None:
        """Backward is over: what did not arrive was not used, here; somewhere else it may have been. Nothing was
        exchanged before this is known: ranks would use their communicators in different orders."""
        now, names = self._pass, list(self._parameters)
        for name, parameter in self._parameters.items():
            if name not in now.arrived and parameter.grad is not None:  # from a backward under no_sync
                now.arrived.add(name)
                now.held[name], parameter.grad = lying_like(parameter.grad, parameter), None
        used = torch.tensor([name in now.arrived for name in names], dtype=torch.int32, device=self._device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        now.unused = frozenset(name for name, any_rank in zip(names, used.tolist(), strict=True) if not any_rank)
        for name in names:
            if name not in now.arrived:
                now.arrived.add(name)
                now.held[name] = torch.zeros_like(self._parameters[name])
        self._submit_ready()

    # --- on a lane ----------------------------------------------------------------------------------------------

    def _run(self, bucket: Bucket, held: Sequence[Tensor], now: Pass, *, apply: bool) -> None:
        state, groups = bucket.state, self._groups[bucket.lane]
        workspace = self._workspaces[bucket.lane]
        flat = workspace.take("flat", (bucket.layout.numel,), bucket.layout.dtype)
        with torch.no_grad():
            parts = [
                (piece.of(gradient), slot.offset)
                for piece, gradient, slot in zip(bucket.pieces, held, bucket.layout.slots, strict=True)
            ]
            for part, offset in parts:
                flat[offset : offset + part.numel()].copy_(part)
            self._stepping.before(bucket.pieces, flat, workspace)
            if not bucket.averages:
                flat.mul_(1 / groups.comm.size)
            state.begin(self.steps)
            work = bucket.exchange.run(flat, state, groups.comm)
            if work is not None:
                work.wait()
            finite = state.finite(flat)
            state.settle(finite)
            flat.masked_fill_(~finite, 0)
            self._stepping.after(bucket.pieces, finite, workspace)
            for part, offset in parts:
                part.copy_(flat[offset : offset + part.numel()])
        now.finite[bucket.index] = finite
        if apply:
            self._apply(bucket, now)

    def _apply(self, bucket: Bucket, now: Pass) -> None:
        """The optimizer steps what this bucket completes."""
        self._dropped[bucket.lane] += ~now.finite[bucket.index]
        names = self._to_step(bucket, now)
        if names and not self._stepping.at_end:
            self._step(names, now.held, counts(bucket, now))

    def _to_step(self, bucket: Bucket, now: Pass) -> list[str]:
        """All that it completes; but what no rank used stays as it is, unless something that waited was applied."""
        keeps = self._stepping.mirror or bucket.exchange.keeps
        return [name for name in bucket.ends if keeps or name not in now.unused]

    def _step(self, names: Sequence[str], held: Mapping[str, Tensor], finite: Tensor) -> None:
        self._stepping.step([(self._parameters[name], held[name]) for name in names], finite)

    # --- buckets ------------------------------------------------------------------------------------------------

    def _furnished(self, made: Cut, kept: Mapping[str, Mapping[str, Tensor]] | None = None) -> list[Bucket]:
        """Collective. Buckets with their states, the largest first: the others then fit into its memory."""
        described = {str(index): " ".join(map(str, pieces)) for index, pieces in enumerate(made)}
        meet(self._group, described, "how gradients are cut into buckets", "Layerwise")
        ends: dict[str, int] = {piece.name: index for index, pieces in enumerate(made) for piece in pieces}
        starts = {piece.name: index for index, pieces in reversed(list(enumerate(made))) for piece in pieces}
        buckets: dict[int, Bucket] = {}
        sizes = {index: sum(piece.numel for piece in pieces) for index, pieces in enumerate(made)}
        for index in sorted(sizes, key=lambda index: (-sizes[index], index)):
            pieces = made[index]
            names = list(dict.fromkeys(piece.name for piece in pieces))
            # All parts of a parameter are on one lane: whoever steps it finds the others done.
            exchange, lane = self._route.way(names, starts[pieces[0].name], self.steps)
            layout = layout_of(pieces, self._parameters, self._workspaces[lane])
            self._workspaces[lane].take("flat", (layout.numel,), layout.dtype)
            state = exchange.prepare(layout, self._groups[lane].comm)
            if isinstance(exchange, Climbing):
                meet(self._group, {"way": state.describe()}, "the way of a bucket", "Layerwise")
            if kept is not None:
                state.load(layout, dealt_to(pieces, kept, self._parameters))
            averages = state.average(1 / self._group.size())
            last = tuple(name for name in names if ends[name] == index)
            before = tuple(other for other in range(index) if last and made[other][0].name == pieces[0].name)
            buckets[index] = Bucket(index, pieces, lane, exchange, layout, state, averages, last, before)
        return [buckets[index] for index in range(len(made))]

    def _first_cut(self, plan: Plan | None) -> Cut:
        if plan is None:
            return cut(list(self._parameters)[::-1], self._parameters, self._cap_bytes)
        where = Where(
            host_of_rank=hosts_of(self._group),
            backend=str(dist.get_backend(self._group)),
            device=self._device.type,
        )
        model = {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in self._parameters.items()}
        different = plan.difference(model, where)
        meet(self._group, {"difference": different}, "what the plan does not fit", "Layerwise")
        if different is not None:
            raise UsageError(f"the plan is for something else: {different}. Plan again, or leave it out")
        return tuple(
            tuple(Piece(name, 0, self._parameters[name].numel()) for name in bucket.parameters)
            for bucket in plan.buckets
        )

    def _settle(self, order: Sequence[str]) -> None:
        """Cuts anew, in the order in which rank 0's gradients became ready."""
        self._settled = True
        first = gather_bytes(self._group, "\n".join(order).encode())[0].decode().split("\n")
        rest = [name for name in list(self._parameters)[::-1] if name not in set(first)]
        made = cut([*first, *rest], self._parameters, self._cap_bytes)
        if made != tuple(bucket.pieces for bucket in self._buckets):
            kept = self._kept()
            self._buckets = []
            self._buckets = self._furnished(made, kept)

    def _kept(self) -> dict[str, dict[str, Tensor]]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return joined(
            [(bucket.pieces, bucket.state.tensors(bucket.layout)) for bucket in self._buckets], self._parameters
        )

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def sent_bytes(self) -> dict[str, int]:
        """By the busiest rank since it was made, per level."""
        total: dict[str, int] = {}
        for groups in self._groups:
            for level, sent in groups.counter.sent_bytes.items():
                total[level] = total.get(level, 0) + sent
        return total

    @property
    def tree(self) -> Tree | None:
        """Where ranks sit, for an exchange that asks."""
        return None if self._place is None else self._place.tree

    @property
    def lanes(self) -> int:
        return len(self._lanes)

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
        total: dict[str, int] = {}
        for bucket in self._buckets:
            topology = self._groups[bucket.lane].topology
            cost = bucket.exchange.cost(bucket.layout.numel, bucket.layout.dtype, topology)
            for level, sent in cost.sent_bytes.items():
                total[level] = total.get(level, 0) + sent
        return total

    def stats(self) -> Stats:
        timings = []
        for job in self._last.jobs:
            seconds = job.marks.seconds()
            if seconds is not None:
                size = job.flat.numel() * job.flat.element_size()
                timings.append(
                    BucketTiming(job.bucket, job.lane, size, seconds["ready"], seconds["start"], seconds["end"])
                )
        return Stats(self.steps, dict(self._sent), self.sent_bytes, tuple(timings))

    def describe(self) -> str:
        """What trains here, in how many buckets, and what becomes of activations."""
        lines = [f"{self.exchange!r} layer by layer among {self._group.size()} ranks, {len(self._buckets)} buckets"]
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

    @property
    def dropped(self) -> int:
        """How often a bucket was not finite, and its layers did not take a step. Waits for the device."""
        return sum(int(dropped) for dropped in self._dropped)

    def _tell_dropped(self) -> None:
        dropped = self.dropped
        if dropped > self._told_dropped and self._group.rank() == 0:
            where = [bucket.label for bucket in self._buckets if not bool(self._last.finite.get(bucket.index, True))]
            tell(
                f"step {self.steps - 1}: the gradients of {', '.join(where[:3])} are not finite, and these layers do "
                f"not take this step, on any rank ({dropped} so far)"
            )
        self._told_dropped = dropped

    # --- memory -------------------------------------------------------------------------------------------------

    def training(self) -> Training:
        """What is there all the time, in bytes."""
        parameters = list(self.module.parameters())
        total = sum(p.numel() * p.element_size() for p in self._parameters.values())
        largest = max(p.numel() * p.element_size() for p in self._parameters.values())
        waiting = total if self._stepping.at_end else min(total, self._backlog_bytes + largest)
        return Training(
            elements=sum(p.numel() for p in self._parameters.values()),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            buffer_bytes=sum(b.numel() * b.element_size() for b in self.module.buffers()),
            optimizer_bytes=int(state_bytes(self.optimizer) * sum(p.numel() for p in self._parameters.values())),
            residual_bytes=sum(bucket.state.rests_bytes for bucket in self._buckets),
            workspace_bytes=sum(workspace.bytes for workspace in self._workspaces),
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

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to go on: weights and optimizer, as they are, and a copy of what waits to be
        exchanged, in the host's memory."""
        self._check_ready()
        return {
            **self._checkpoints.identity,
            "steps": self.steps,
            "buckets": [[str(piece) for piece in bucket.pieces] for bucket in self._buckets],
            "tensors": self._kept(),
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, on the same rank of as many. All ranks load what they saved at the same
        step, or none changes anything."""
        if self._broken:
            raise ExchangeError(f"an exchange failed, and its groups with it: make another Layerwise: {self.error}")
        with together(self._group, self._device, "what is loaded", "load_state_dict") as fields:
            made = self._loadable(state)
            fields["steps"] = state["steps"]
            fields["buckets"] = state["buckets"]
            fields["weights"] = {name: float(state["model"][name].double().sum()) for name in self._parameters}
        now, self._pass, self.error = self._pass, Pass(), None
        for flight in now.under_way:  # of a backward that broke off, on all ranks
            flight.future.wait()
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        self._settled = self._settled or self.steps > 0
        with current_device(self._device):
            self._buckets = []
            self._buckets = self._furnished(made, state["tensors"])

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
        levels = repr(self._place.tree.root) if self._place is not None and self.exchange.keeps else None
        described = {
            **self._route.settings(),
            "mirror": self._stepping.mirror,
            "optimizer": type(self.optimizer).__name__,
        }
        misfit = functools.partial(misfit_of, self._parameters)
        return Checkpoints(self._group, self._device, described, levels, misfit, deals=False)

    def close(self) -> None:
        """Gives the module back as an ordinary one: what waits to be exchanged is lost."""
        if self._managed is not None:
            self._managed.close()
        for hook in self._hooks:
            hook.remove()
        for lane in self._lanes:
            lane.close()
        for groups in self._groups:
            groups.destroy()
        self._hooks, self._lanes, self._groups, self._buckets = [], [], [], []
        self._pass = self._last = Pass()

    # --- checks -------------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self.error is not None:
            raise ExchangeError(f"an earlier exchange of this model failed: {self.error}") from self.error
        if not self._lanes:
            raise UsageError("this trainer is closed: make another")
        kind = self._device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            raise UsageError(
                "autocast to float16 needs a GradScaler, which decides at the end of backward whether a step counts, "
                "and layers have taken theirs by then: use torch.bfloat16, which needs no scaling"
            )
        trained = [id(parameter) for parameter in self.module.parameters() if parameter.requires_grad]
        if len(trained) != len(self._names) or not self._names.keys() >= set(trained):
            raise UsageError(
                "other parameters are trained than when this trainer was made: freeze and unfreeze before that, or "
                "close() it and make another"
            )
        now = self._pass
        if not now.arrived:
            return
        missing = [name for name in self._parameters if name not in now.arrived]
        failed = ExchangeError(
            f"the last backward ended with {len(now.arrived)} of {len(self._parameters)} gradients"
            f"{f', without {missing[0]}' if missing else ''}. "
            + (
                "Some layers have taken that step and others have not: go on from a checkpoint. "
                if now.submitted
                else "No layer has taken that step. "
            )
            + "If nothing was raised, these parameters were not used: pass find_unused_parameters=True"
        )
        self._pass = Pass()
        if now.submitted:
            self.error = failed
        raise failed

    def _fingerprint(
        self, residual: str | None, network: Network | SynclineError | None, budget_bytes: int | None
    ) -> dict[str, Any]:
        model = {
            name: f"{tuple(p.shape)} {p.dtype} {p.stride()} {'trained' if p.requires_grad else 'frozen'}"
            for name, p in [*self.module.named_parameters(), *self.module.named_buffers()]
        }
        versions = {"syncline": __version__, "torch": str(torch.__version__)}
        known = network if isinstance(network, SynclineError) else None
        return flatten(
            {
                "exchange": settings(self.exchange),
                "lanes": self._route.lanes,
                "bucket_bytes": self._cap_bytes,
                "residual": residual,
                "memory_budget": budget_bytes,
                "find_unused_parameters": self._find_unused,
                "broadcast_buffers": self._broadcasts,
                "optimizer": self._stepping.describe(),
                "version": versions,
                "parameter": model,
                "network": f"unreadable: {known}" if known else network is not None,
            }
        )


def _at_end_of_backward(call: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)
