"""Carries gradients from backward to the optimizer, layer by layer: the part of `Layerwise` that moves.

A gradient that has arrived is held in its own memory until its bucket is complete and those before it are on their way.
The bucket is then gathered in memory that all buckets of a lane share, exchanged, and scattered back, and the optimizer
steps what is complete. On CUDA all of that is enqueued on the lane's stream, and gradients are let go once backward's
stream waits for it. On the CPU a lane's thread exchanges, and the thread that runs backward steps what has landed, so
nothing changes under the user's hands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.dist.comm import close_lanes, gather_bytes, open_lanes
from syncline.dist.lane import Job
from syncline.dist.span import span_of
from syncline.errors import ExchangeError, UsageError, first_line, tell
from syncline.exchange import Climbing
from syncline.exchange.workspace import Workspace
from syncline.health.meeting import meet
from syncline.health.watchdog import Watchdog
from syncline.layerwise.backward_pass import Bucket, Flight, Pass, counts
from syncline.layerwise.bucketing import Cut, cut, dealt_to, joined, layout_of
from syncline.layerwise.layer_optimizer import Stepping
from syncline.runtime.bucket_policy import Route
from syncline.runtime.stats import sent_over
from syncline.runtime.topology import Place
from syncline.runtime.validation import lying_like


class Conveyor:
    """All ranks create it together. `first`: the buckets to begin with, if they are to stay; else they are cut anew
    after the first backward, in the order in which gradients became ready."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Mapping[str, nn.Parameter],
        route: Route,
        stepping: Stepping,
        timeout: timedelta,
        *,
        place: Place | None,
        cap_bytes: int,
        backlog_bytes: int,
        find_unused: bool,
        rest_on_host: bool,
        first: Cut | None,
    ) -> None:
        self._group, self._parameters, self._route, self._stepping = group, parameters, route, stepping
        self._cap_bytes, self._backlog_bytes, self._find_unused = cap_bytes, backlog_bytes, find_unused
        self._device = next(iter(parameters.values())).device
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.error: BaseException | None = None
        self.broken = False
        """A collective failed: nothing can be exchanged any more."""
        self.steps = 0
        self.syncing = True
        self.settled = first is not None
        """Whether buckets follow the order in which gradients become ready, or are not to."""
        self._pass = Pass()
        self.last = Pass()
        self._counted: dict[str, int] = {}
        self.sent_last: dict[str, int] = {}
        """In the last step, per level."""
        self._dropped = [torch.zeros((), dtype=torch.int64, device=self._device) for _ in range(route.lanes)]
        """By lane: they do not wait for each other."""
        self._told_dropped = 0
        self.workspaces = [Workspace(self._device, rest_on_host=rest_on_host) for _ in range(route.lanes)]
        self._watchdog = Watchdog(group, timeout)
        self.buckets: list[Bucket] = []
        self._hooks: list[Any] = []
        topology = None if place is None else place.topology
        self.groups, self.lanes = open_lanes(group, timeout, route.lanes, self._device, topology)
        try:
            self._watchdog.start(self.groups, self.lanes)
            self.buckets = self.furnished(first or cut(list(parameters)[::-1], parameters, cap_bytes))
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """From now on, backward gives it its gradients."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrive) for parameter in self._parameters.values()
        ]

    # --- in backward --------------------------------------------------------------------------------------------

    def _arrive(self, parameter: Tensor) -> None:
        """Backward has completed a parameter's gradient."""
        if not self.syncing:
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
        while now.submitted < len(self.buckets):
            bucket = self.buckets[now.submitted]
            if any(piece.name not in now.arrived for piece in bucket.pieces):
                return
            now.submitted += 1
            self._submit(bucket)
        _at_end_of_backward(self._finish)

    def _submit(self, bucket: Bucket) -> None:
        now, lane = self._pass, self.lanes[bucket.lane]
        held = [now.held[piece.name] for piece in bucket.pieces]
        waiting = bucket.layout.numel * bucket.layout.dtype.itemsize
        while now.under_way and sum(flight.bytes for flight in now.under_way) + waiting > self._backlog_bytes:
            self._land(now.under_way.pop(0))
        on_lane = self._device.type == "cuda"
        job = Job(
            bucket=bucket.index,
            lane=bucket.lane,
            flat=self.workspaces[bucket.lane].take("flat", (bucket.layout.numel,), bucket.layout.dtype),
            run=lambda: self._run(bucket, held, now, apply=on_lane),
            marks=lane.marks(now.jobs[0].marks if now.jobs else None),
            exchange=bucket.exchange,
            on_done=self._watchdog.over,
        )
        if not now.jobs:
            self._begin(now)
        self._watchdog.begin(job, self.steps)
        now.jobs.append(job)
        now.under_way.append(Flight(bucket, self._guarded(lambda: lane.submit(job), bucket), waiting))

    def _begin(self, now: Pass) -> None:
        now.began_s = time.monotonic()
        if self.last.began_s is not None:
            self._watchdog.stepped(span_of(self.last.jobs), now.began_s - self.last.began_s)

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
                told = f"exchanging {bucket.label} failed in step {self.steps}: {first_line(error)}"
                told += self._watchdog.explain(told, cause=error)
                failed = ExchangeError(
                    f"{told}. Some layers have taken this step and others have not: go on from a checkpoint"
                )
                self.error, self.broken = failed, True
                raise failed from error
            raise

    def _finish(self) -> None:
        """All gradients have arrived and are under way."""
        now = self._pass
        while now.under_way:
            self._land(now.under_way.pop(0))
        if self._stepping.at_end:
            flags = torch.stack([counts(bucket, now) for bucket in self.buckets]).tolist()
            names = [
                name
                for bucket, counted in zip(self.buckets, flags, strict=True)
                for name in self._to_step(bucket, now)
                if counted
            ]
            if names:
                self._step(names, now.held, torch.ones((), dtype=torch.bool))
        self._stepping.end()
        self.last, self._pass = now, Pass()
        self.last.held.clear()
        sent = self.sent_bytes
        self.sent_last = {level: sent[level] - self._counted.get(level, 0) for level in sent}
        self._counted = sent
        self.steps += 1
        if self._device.type != "cuda":
            self._tell_dropped()
        if not self.settled:
            self._settle(now.order)

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
        state, groups = bucket.state, self.groups[bucket.lane]
        self._watchdog.runs(bucket.lane, self.steps, bucket.index)
        workspace = self.workspaces[bucket.lane]
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
            self._stepping.after(bucket.pieces, flat, finite, workspace)
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

    def furnished(self, made: Cut, kept: Mapping[str, Mapping[str, Tensor]] | None = None) -> list[Bucket]:
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
            layout = layout_of(pieces, self._parameters, self.workspaces[lane])
            self.workspaces[lane].take("flat", (layout.numel,), layout.dtype)
            state = exchange.prepare(layout, self.groups[lane].comm)
            if isinstance(exchange, Climbing):
                meet(self._group, {"way": state.describe()}, "the way of a bucket", "Layerwise")
            if kept is not None:
                state.load(layout, dealt_to(pieces, kept, self._parameters))
            averages = state.average(1 / self._group.size())
            last = tuple(name for name in names if ends[name] == index)
            before = tuple(other for other in range(index) if last and made[other][0].name == pieces[0].name)
            buckets[index] = Bucket(index, pieces, lane, exchange, layout, state, averages, last, before)
        return [buckets[index] for index in range(len(made))]

    def _settle(self, order: Sequence[str]) -> None:
        """Cuts anew, in the order in which rank 0's gradients became ready."""
        self.settled = True
        first = gather_bytes(self._group, "\n".join(order).encode())[0].decode().split("\n")
        rest = [name for name in list(self._parameters)[::-1] if name not in set(first)]
        made = cut([*first, *rest], self._parameters, self._cap_bytes)
        if made != tuple(bucket.pieces for bucket in self.buckets):
            kept = self.kept()
            self.buckets = []
            self.buckets = self.furnished(made, kept)

    def kept(self) -> dict[str, dict[str, Tensor]]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return joined(
            [(bucket.pieces, bucket.state.tensors(bucket.layout)) for bucket in self.buckets], self._parameters
        )

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def sent_bytes(self) -> dict[str, int]:
        """By the busiest rank since it was made, per level."""
        return sent_over(self.groups)

    @property
    def dropped(self) -> int:
        """How often a bucket was not finite, and its layers did not take a step. Waits for the device."""
        return sum(int(dropped) for dropped in self._dropped)

    def _tell_dropped(self) -> None:
        dropped = self.dropped
        if dropped > self._told_dropped and self._group.rank() == 0:
            where = [bucket.label for bucket in self.buckets if not bool(self.last.finite.get(bucket.index, True))]
            tell(
                f"step {self.steps - 1}: the gradients of {', '.join(where[:3])} are not finite, and these layers do "
                f"not take this step, on any rank ({dropped} so far)"
            )
        self._told_dropped = dropped

    # --- between steps ------------------------------------------------------------------------------------------

    def check_complete(self) -> None:
        """Raises where a failure, or a backward that broke off, has left layers behind."""
        if self.error is not None:
            raise ExchangeError(f"an earlier exchange of this model failed: {self.error}") from self.error
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
        if now.submitted:
            self.error = failed
        else:
            self._pass = Pass()  # as if it had not begun
        raise failed

    def go_on(self, made: Cut, kept: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Collective: from a checkpoint. What was under way when a backward broke off, on all ranks, ends first."""
        for flight in self._pass.under_way:
            flight.future.wait()
        self._pass, self.error = Pass(), None
        self.steps, self.settled = steps, self.settled or steps > 0
        self.buckets = []
        self.buckets = self.furnished(made, kept)

    @property
    def straggler(self) -> str | None:
        return self._watchdog.straggler

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._watchdog.stop()
        close_lanes(self.lanes, self.groups)
        self._hooks, self.lanes, self.groups, self.buckets = [], [], [], []
        self._pass = self.last = Pass()


def _at_end_of_backward(call: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)
