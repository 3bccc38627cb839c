"""Exchange what the ranks' optimizers have changed, after each of their steps.

Fragments of the weights take turns: each is exchanged in one of every `every` steps. Without a delay, the optimizer's
step ends when the result is applied. With a delay, lanes exchange while the next steps compute, and the result is
applied that many steps later. Floating-point buffers, such as the statistics of BatchNorm, are averaged in the same
way.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.balance.sample_weights import Counted, SampleWeights
from syncline.dist.agreement import agree, current_device
from syncline.dist.comm import gather_bytes
from syncline.errors import warn
from syncline.exchange import Dense, Work
from syncline.health.meeting import meeting
from syncline.records.pieces import buffer_period, fragments_of
from syncline.runtime.bucket_runner import BucketRunner, Residuals, Step, Watched
from syncline.runtime.bucketing import join_residuals, layout_of, split_residuals
from syncline.runtime.checkpoint import digest_of_bits, misfit_of
from syncline.runtime.local_tensors import local_part
from syncline.runtime.topology import RankTopology
from syncline.runtime.validation import broadcast_from_first
from syncline.updates.fragment import Fragment
from syncline.updates.optimizer_state import OptimizerState
from syncline.updates.policy import UpdatePolicy


@dataclass(eq=False)
class Flight:
    """A fragment that is being exchanged."""

    fragment: Fragment
    begun: int  # the step in which it was sent
    sent: Tensor | None  # the weights at that time, if the result is applied in a later step
    flat: Tensor  # their update, which the exchange replaces by the mean
    future: Any = None
    finite: Tensor | None = None  # whether the mean is finite, once the future has completed


class _Synced(contextlib.AbstractContextManager[None]):
    """Gives the model the weights that all ranks agreed on last. Unlike a generator, it does nothing if it is released
    without being left, as at the end of a framework's training."""

    def __init__(self, engine: UpdateEngine) -> None:
        self._engine, self._inside_another = engine, False

    def __enter__(self) -> None:
        self._inside_another = self._engine.is_synced
        self._engine.use_agreed()

    def __exit__(self, *_: object) -> None:
        if not self._inside_another:
            self._engine.use_own()


class UpdateEngine:
    """Exchanges the updates of one model. All ranks create it together, in the same order as their other groups."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        optimizer: Optimizer,
        policy: UpdatePolicy,
        timeout: timedelta,
        topology: RankTopology | None,
        watched: Watched | None = None,
        weights: SampleWeights | None = None,
    ) -> None:
        self.group, self.policy = group, policy
        self._sample_weights = weights
        self._parameters = parameters
        self._weights = {name: local_part(parameter) for name, parameter in parameters.items()}
        self._buffers = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self._tensors = {**self._weights, **self._buffers}
        self.optimizer_state = OptimizerState(optimizer, parameters)
        self._device = next(iter(parameters.values())).device
        self._resets_moments = policy.every == 1
        """Whether first moments become zero where an update of this rank was applied."""
        self.steps = 0  # of the optimizer, skipped ones included
        self.fragments: list[Fragment] = []
        self._flights: list[Flight] = []
        self._own: list[Tensor] | None = None
        """This rank's weights by fragment, while the model has those that all ranks agreed on."""
        self._finite_flags: list[tuple[Tensor, Any]] = []
        """Whether each result of the last step was finite, and on CUDA the event after which the flag can be read."""
        self.runner = BucketRunner(group, self._device, policy.lanes, timeout, topology, watched)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        """Collective: divide the weights and buffers into fragments, and prepare their exchanges."""
        every, exchange = self.policy.every, self.policy.exchange
        buffers_every = buffer_period(every)
        parts = [(exchange, every, *part) for part in fragments_of(self._weights, every)]
        parts += [(Dense(), buffers_every, *part) for part in fragments_of(self._buffers, 1)]
        with meeting(self.group, "attach"):
            agree(self.group, {"fragments": len(parts)}, "the division into fragments")
            for index, (exchange, period, turn, pieces) in enumerate(parts):
                dtype = torch.promote_types(self._tensors[pieces[0].name].dtype, torch.float32)
                layout = layout_of(pieces, self._tensors, dtype=dtype)
                lane = index % self.policy.lanes
                fragment = Fragment(index, lane, exchange, layout, pieces=pieces, period=period, turn=turn)
                self.runner.prepare(fragment, {})
                if self._resets_moments:
                    fragment.ready.track_applied()
                self.fragments.append(fragment)

    def _find_weights(self) -> None:
        """Find the weights again where a script or a framework has given a parameter other memory, as `.to()` may."""
        for name, parameter in self._parameters.items():
            if (weights := local_part(parameter)).data_ptr() != self._weights[name].data_ptr():
                self._weights[name] = self._tensors[name] = weights

    def start(self) -> None:
        """Collective: make the current weights the anchor. If they differ between ranks, the first rank's are used."""
        self._find_weights()
        if len(set(gather_bytes(self.group, digest_of_bits(self._tensors).encode()))) > 1:
            broadcast_from_first(self.group, list(self._tensors.values()))
        counted = self._samples_so_far()
        for fragment in self.fragments:
            fragment.start(self._tensors, self.policy.outer)
            fragment.counted = counted

    # --- after each step of the optimizer -----------------------------------------------------------------------

    def after_step(self) -> None:
        """Send the fragments whose turn it is, and apply the results that are due. All ranks call this."""
        self.runner.raise_if_failed()
        step = Step()
        self._find_weights()
        with torch.no_grad(), current_device(self._device):
            self.steps += 1
            self.apply(self.steps - self.policy.delay)
            due = [fragment for fragment in self.fragments if (self.steps - 1 - fragment.turn) % fragment.period == 0]
            counted = self._samples_so_far() if due else None
            for fragment in due:
                self._send(step, fragment, counted)
            if self.policy.delay == 0:
                self.apply(self.steps)
        self.runner.end(step)
        if self._device.type != "cuda":
            self.recover()

    def _samples_so_far(self) -> Counted | None:
        """Collective: return the samples of all ranks, if updates are weighted by them."""
        try:
            return None if self._sample_weights is None else self._sample_weights.so_far()
        except RuntimeError as error:
            raise self.runner.fail("the numbers of samples", error) from error

    def _exchange(self, fragment: Fragment, flat: Tensor, counted: Counted | None) -> Work | None:
        """Exchange an update, weighted by the samples since the last exchange of the fragment. Runs on the lane."""
        if counted is not None:
            flat.mul_(counted.weight(self.runner.ranks, fragment.counted))
            fragment.counted = counted
        return self.runner.exchange(fragment, flat)

    def _send(self, step: Step, fragment: Fragment, counted: Counted | None) -> None:
        sent = fragment.gathered(self._tensors) if self.policy.delay else None
        update = fragment.update(self._tensors) if sent is None else fragment.update_from(sent)
        flight = Flight(fragment, self.steps, sent, update)
        run = partial(self._exchange, fragment, flight.flat, counted)
        done, waits = partial(self._settle, flight), fragment.exchange.waits or counted is not None
        flight.future = self.runner.submit(step, fragment, flight.flat, run, waits=waits, done=done)
        self._flights.append(flight)

    def _settle(self, flight: Flight, mean: Tensor) -> None:
        """Keep the new residual if the result is finite, and the old one otherwise. Runs on the lane."""
        flight.finite = flight.fragment.ready.finite(mean)
        self.runner.settle([flight.fragment], flight.finite)

    def apply(self, latest: int) -> None:
        """Wait for the results of all updates that were sent up to the step `latest`, and apply them."""
        while self._flights and self._flights[0].begun <= latest:
            flight = self._flights.pop(0)
            self.runner.wait(flight.future)
            self._apply(flight)

    def _apply(self, flight: Flight) -> None:
        fragment, finite = flight.fragment, flight.finite
        assert finite is not None  # noqa: S101 - the exchange has ended
        if self._resets_moments and (mine := fragment.ready.applied_here()) is not None:
            if self.steps == 1:
                self.optimizer_state.check_known()
            self.optimizer_state.reset_first_moments(fragment.pieces, mine & finite)
        fragment.apply(flight.flat, finite, self.policy.outer if fragment.pieces[0].name in self._weights else None)
        new = fragment.anchor.to(self._tensors[fragment.pieces[0].name].dtype)
        if flight.sent is not None and flight.begun < self.steps:  # keep what this rank has done since, if it is finite
            now = fragment.gathered(self._tensors) if self._own is None else self._own[fragment.index]
            new = torch.where(finite, new + (now - flight.sent), new)
        if self._own is None:
            fragment.scatter(new, self._tensors)
        else:
            self._own[fragment.index] = new
        self._record_finite(finite)

    # --- updates that are not finite ----------------------------------------------------------------------------

    def _record_finite(self, finite: Tensor) -> None:
        """Record whether a result was finite. On CUDA, the flag is copied to the host without waiting for it."""
        if not finite.is_cuda:
            self._finite_flags.append((finite, None))
            return
        on_host = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._finite_flags.append((on_host, event))

    def recover(self) -> None:
        """Undo what a step with a result that is not finite has left on this rank, before the optimizer's next step.

        Weights that are not finite return to the anchor, and values in the optimizer's state that are not finite become
        zero. On CUDA, the next gradients were computed from such weights, and are dropped if they are not finite.
        """
        flags, self._finite_flags = self._finite_flags, []
        for _, event in flags:
            if event is not None:
                event.synchronize()  # the device has probably passed it during the forward and backward pass
        if all(bool(finite) for finite, _ in flags):
            return
        with torch.no_grad():
            for fragment in self.fragments:
                now = fragment.gathered(self._tensors)
                if not bool(torch.isfinite(now).all()):
                    fragment.scatter(fragment.anchor.to(now.dtype), self._tensors)
            self.optimizer_state.remove_non_finite()
        if self.group.rank() == 0:
            text = "the updates are not finite, so all ranks return to the weights that they agreed on last"
            warn(f"step {self.runner.steps - 1}: {text}")

    # --- for the handle -----------------------------------------------------------------------------------------

    @property
    def is_synced(self) -> bool:
        """Whether the model has the weights that all ranks agreed on last, instead of this rank's own."""
        return self._own is not None

    def use_agreed(self) -> None:
        """Give the model the weights that all ranks agreed on last, until `use_own`, `finish` or `load`."""
        if self._own is None:
            self._find_weights()
            with torch.no_grad():
                self._own = [fragment.gathered(self._tensors) for fragment in self.fragments]
                for fragment, own in zip(self.fragments, self._own, strict=True):
                    fragment.scatter(fragment.anchor.to(own.dtype), self._tensors)

    def use_own(self) -> None:
        """Give the model this rank's own weights again."""
        own, self._own = self._own, None
        self._find_weights()
        with torch.no_grad():
            for fragment, tensor in zip(self.fragments, own or (), strict=own is not None):
                fragment.scatter(tensor, self._tensors)

    def synced(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the weights that all ranks agreed on last."""
        return _Synced(self)

    def _own_weights(self) -> Mapping[str, Tensor]:
        """Return this rank's own weights and buffers, by name. Inside `synced`, they are copies."""
        if self._own is None:
            return self._tensors
        tensors = {name: torch.empty_like(tensor) for name, tensor in self._tensors.items()}
        for fragment, own in zip(self.fragments, self._own, strict=True):
            fragment.scatter(own, tensors)
        return tensors

    def wait(self) -> None:
        """Wait for the exchanges that still run, and apply their results."""
        self._find_weights()
        with torch.no_grad(), current_device(self._device):
            self.apply(self.steps)

    def finish(self) -> None:
        """Collective: average what ranks have done since their last exchange, so that all have the same weights and
        optimizer state. Residuals are dropped. If the model has the agreed weights, it keeps them."""
        self._find_weights()
        with torch.no_grad(), current_device(self._device):
            if self._own is None:
                self.apply(self.steps)
            else:
                self._land()
                self._own = None
            counted = self._samples_so_far()
            for fragment in self.fragments:
                now = fragment.gathered(self._tensors)
                flat = fragment.update_from(now).mul_(1 / self.group.size())
                if counted is not None:
                    flat.mul_(counted.weight(self.runner.ranks, fragment.counted))
                    fragment.counted = counted
                dist.all_reduce(flat, group=self.group)
                fragment.apply(flat, torch.isfinite(flat).all(), None)
                fragment.scatter(fragment.anchor.to(now.dtype), self._tensors)
            broadcast_from_first(self.group, self.optimizer_state.tensors())

    def predicted_sent_bytes(self) -> dict[str, int]:
        """Return the bytes per step and level that the busiest rank should send, on average over all turns."""
        total: Counter[str] = Counter()
        for period in {fragment.period for fragment in self.fragments}:
            some = [fragment for fragment in self.fragments if fragment.period == period]
            for level, sent in self.runner.predicted_sent_bytes(some).items():
                total[level] += round(sent / period)
        return dict(total)

    def saved(self) -> Residuals:
        """Return what a checkpoint of this rank needs, by name of the parameter or buffer, and by kind. Exchanges
        that still run are completed first."""
        self.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        states = [(fragment.pieces, fragment.saved()) for fragment in self.fragments]
        saved = {name: dict(kinds) for name, kinds in join_residuals(states, self._tensors).items()}
        for name, tensor in self._own_weights().items():
            saved[name]["weights"] = tensor
        for name in self._weights:
            saved[name] |= self.optimizer_state.saved(name)
        return saved

    def misfit(self, tensors: Residuals, buckets: Sequence[Sequence[str]] = ()) -> str | None:
        """Return why a checkpoint does not belong to this model, or None if it does."""
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        for name in shapes if tensors else ():
            if not {"weights", "anchor"} <= tensors.get(name, {}).keys():
                return f"the checkpoint does not contain {name!r}"
        return misfit_of(shapes, tensors)

    def load(self, tensors: Residuals, steps: int) -> None:
        """Collective: continue from a checkpoint without `misfit`, with its weights and its optimizer state. If it is
        empty, continue from the current weights."""
        self._land()
        self._find_weights()
        self._own, self._finite_flags, self.steps = None, [], steps
        with torch.no_grad():
            for name, kinds in tensors.items():
                self._tensors[name].copy_(kinds["weights"])
            self.start()
            for name, kinds in tensors.items():  # again: `start` may have replaced them
                self._tensors[name].copy_(kinds["weights"])
            for fragment in self.fragments:
                if tensors:
                    fragment.load(split_residuals(fragment.pieces, tensors, self._tensors))
                else:
                    fragment.ready.load(fragment.layout, {})  # no residual
        if tensors:
            self.optimizer_state.load(tensors)

    def _land(self) -> None:
        """Wait for the exchanges that are under way, and drop their results. Residuals are no longer changed then."""
        flights, self._flights = self._flights, []
        for flight in flights:
            flight.future.wait()

    def close(self) -> None:
        """Close the lanes, and drop all fragments."""
        self.runner.close()
        self.fragments, self._flights, self._own = [], [], None
