"""`Layerwise`: data-parallel training of a plain module, layer by layer, for little memory and slow links.

After LaySA (IEEE Access 2021). DDP keeps all gradients until the end of the backward pass, and a sparse hook stores two
copies of the residual. `Layerwise` exchanges the gradients of a layer while the backward pass continues, steps the
layer, and frees them. It stores one copy of the residual, on the device or in host memory, and all layers share the
buffers of the exchange (`exchange/workspace.py`). The result is that of DDP with the same exchange.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.dist.agreement import current_device, first_difference, flatten, versions_here
from syncline.dist.comm import backend_of, group_timeout
from syncline.errors import ExchangeError, UsageError
from syncline.exchange import Exchange, Tree, settings
from syncline.health.meeting import meeting, same_on_all_ranks
from syncline.layerwise.activations import Managed
from syncline.layerwise.gradient_pipeline import GradientPipeline
from syncline.layerwise.layer_optimizer import LayerOptimizer
from syncline.layerwise.memory_budget import budget_of, choose_activations
from syncline.predict.memory import BACKLOG_BUCKETS, Choice, bucket_bytes, layerwise_lanes
from syncline.predict.schedule import MIB
from syncline.records.activations import KEEP
from syncline.runtime import validation
from syncline.runtime.bucketing import parse_buckets
from syncline.runtime.checkpoint import Checkpoints, digest_of_bits, misfit_of
from syncline.runtime.stats import Stats
from syncline.runtime.topology import NetworkOrFile, find_topology, read_network
from syncline.runtime.validation import described_fully, only_device
from syncline.units import format_bytes


class Layerwise:
    """Train a module with data parallelism, layer by layer.

    Call the trainer like the module. `backward()` on the loss exchanges the gradients, steps the optimizer and frees
    the gradients. All ranks of the process group create the trainer with the same arguments. Parameters and buffers are
    copied from the first rank.

    `Layerwise` has no `join`, and does not support a GradScaler: use bfloat16, which needs no scaling.

    Args:
        module: The module to train. All its trained parameters are on one device.
        optimizer: An optimizer of these parameters, or a function that creates one for the parameters it is given.
        exchange: How gradients are exchanged; `Dense()` by default.
        bucket_mb: The largest size of a bucket, in MiB.
        backlog_mb: How much may wait for its exchange, in MiB, before the backward pass waits for the link.
        lanes: How many buckets may be exchanged at the same time.
        clip_norm: Clip the norm of all averaged gradients. They are then all kept until the end of the backward pass.
        memory_budget: The device memory for tensors, weights included, like "8GiB". It needs `step`, and chooses
            `activations` and `residual` such that a step fits and takes the least time.
        step: A function that runs a forward pass of the module with a typical batch, and returns the loss. The trainer
            measures memory and time with it before training.
        activations: What to do with the activations of blocks: `keep`, `recompute`, `offload` (to host memory) or
            `park` (recompute from an input in host memory). For all blocks, or by block name.
        residual: Where residuals are stored, `device` or `host`.
        find_unused_parameters: Whether parameters may get no gradient in some steps. This costs a round trip per step.
        broadcast_buffers: Whether buffers are copied from the first rank before each step, as in DDP.
        process_group: The ranks that train together; by default all.
        timeout_s: How long a collective may take; by default the timeout of the group.
        network: A network, or its file, for exchanges that use levels.

    Raises:
        UsageError: An argument is invalid, or no step fits into `memory_budget`. The message names the smallest budget
            that would do.
        MismatchError: The arguments differ between ranks.

    Example:
        >>> trainer = syncline.Layerwise(
        ...     net, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), syncline.OkTopk()
        ... )
        >>> for inputs, labels in batches:
        ...     loss_of(trainer(inputs), labels).backward()
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | validation.OptimizerOf,
        exchange: Exchange | None = None,
        *,
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
        network: NetworkOrFile = None,
    ) -> None:
        self.module = module
        self._parameters = validation.trained_parameters(module)
        self._device = only_device(self._parameters)
        self._group = group = validation.group_or_default(process_group)
        self.exchange = validation.checked_exchange(exchange)
        self.lanes = layerwise_lanes(backend_of(group)) if lanes is None else lanes
        """Number of buckets that may be exchanged at the same time."""
        validation.check_lanes(self.lanes)
        numbers = {"bucket_mb": bucket_mb, "backlog_mb": backlog_mb, "clip_norm": clip_norm, "timeout_s": timeout_s}
        validation.check_positive(**numbers)
        if residual not in (None, "device", "host"):
            raise UsageError(f"residual is {residual!r}: pass 'device' or 'host'")
        self._budget_bytes = budget_of(memory_budget, step, activations)
        self.optimizer = validation.build_optimizer(optimizer, self._parameters, self.exchange)
        """An ordinary optimizer, for example for a learning-rate scheduler."""
        stepper = LayerOptimizer(self.optimizer, clip_norm)
        total = sum(parameter.nbytes for parameter in self._parameters.values())
        self.bucket_bytes = bucket_bytes(total) if bucket_mb is None else int(bucket_mb * MIB)
        """The largest size of a bucket."""
        backlog_bytes = BACKLOG_BUCKETS * self.bucket_bytes if backlog_mb is None else int(backlog_mb * MIB)
        timeout = group_timeout(group) if timeout_s is None else timedelta(seconds=timeout_s)
        self._broadcasts, self._synced = broadcast_buffers, True
        """Whether the last forward was outside `no_sync`. As in DDP, only then the next one broadcasts buffers."""
        self.choice: Choice | None = None
        """How a step fits into `memory_budget`, if there is one."""
        self._managed = Managed(module, None)
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        with current_device(self._device):
            with same_on_all_ranks(group, self._device, "the configuration", "Layerwise") as fields:
                known = read_network(network, fields)
                fields |= {"residual": residual, "memory_budget": self._budget_bytes, "lanes": self.lanes}
                fields |= {"find_unused_parameters": find_unused_parameters, "broadcast_buffers": broadcast_buffers}
                fields |= flatten({"exchange": settings(self.exchange), "optimizer": stepper.describe()})
                fields |= flatten({"bucket_bytes": self.bucket_bytes, "version": versions_here()})
                fields |= flatten({"parameter": {name: described_fully(tensor) for name, tensor in tensors.items()}})
            with meeting(group, "Layerwise", users=True):
                topology = find_topology(group, (self.exchange,), known)
                validation.broadcast_from_first(group, list(tensors.values()))
                sizes = {"lanes": self.lanes, "cap_bytes": self.bucket_bytes, "backlog_bytes": backlog_bytes}
                self._pipeline = GradientPipeline(
                    group, self._parameters, self.exchange, stepper, timeout, topology, find_unused_parameters, **sizes
                )
            try:
                if step is not None and self._budget_bytes is not None:
                    with same_on_all_ranks(group, self._device, "the memory budget", "Layerwise"):
                        sized = self._pipeline, self._budget_bytes, residual
                        self.choice, activations = choose_activations(module, step, *sized)
                    residual = self.choice.residual
                for workspace in self._pipeline.workspaces:
                    workspace.rest_on(residual or "device")
                self._managed = Managed(module, activations)
            except BaseException:
                self.close()
                raise
        self._pipeline.start()

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the module's forward pass and return its result.

        Raises:
            UsageError: The trainer is closed, autocast uses float16, or other parameters require gradients than when
                the trainer was created.
            ExchangeError: An exchange failed, or the last backward pass was interrupted.
        """
        if torch.is_grad_enabled():
            self._check_ready()
            if self._broadcasts and self._synced:
                validation.broadcast_from_first(self._group, list(self.module.buffers()))
            self._synced = self._pipeline.syncing
        return self.module(*inputs, **options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them, as in DDP, until a backward pass outside this context.

        All gradients are then in memory at once. A larger batch usually needs less.
        """
        before, self._pipeline.syncing = self._pipeline.syncing, False
        try:
            yield
        finally:
            self._pipeline.syncing = before

    def train(self, mode: bool = True) -> Layerwise:
        """Set the module to training mode, or to evaluation mode if `mode` is False, and return the trainer."""
        self.module.train(mode)
        return self

    def eval(self) -> Layerwise:
        """Set the module to evaluation mode, and return the trainer."""
        return self.train(False)

    @property
    def steps(self) -> int:
        """Number of steps that were exchanged, including those before a checkpoint."""
        return self._pipeline.runner.steps

    @property
    def error(self) -> BaseException | None:
        """Why training cannot continue, if it cannot."""
        return self._pipeline.error

    @property
    def dropped(self) -> int:
        """Number of buckets that were not finite, so that their layers skipped a step. Waits for the device."""
        return self._pipeline.dropped

    @property
    def tree(self) -> Tree | None:
        """The topology, if the exchange uses it."""
        return None if self._pipeline.topology is None else self._pipeline.topology.tree

    @property
    def activations(self) -> dict[str, str]:
        """The treatment of the activations of each block that does not keep them, by its name."""
        return {name: way for name, way in self._managed.ways.items() if way != KEEP}

    def predicted_sent_bytes(self) -> dict[str, int]:
        """Return the bytes that a step should send, per level, by the cost that the exchange states."""
        return self._pipeline.runner.predicted_sent_bytes(self._pipeline.buckets)

    def stats(self) -> Stats:
        """Return the number of steps, the bytes sent, and the times of the last step's buckets."""
        return self._pipeline.runner.stats()

    def describe(self) -> str:
        """Return a summary in a few lines: exchange, buckets, memory, activations and topology."""
        ranks, count = self._group.size(), len(self._pipeline.buckets)
        lines = [f"{self.exchange!r} layer by layer on {ranks} ranks, {count} buckets"]
        if self.choice is not None and self._budget_bytes is not None:
            peak, budget = format_bytes(self.choice.peak_bytes), format_bytes(self._budget_bytes)
            between = f"{format_bytes(self.choice.states_bytes)} of it between steps"
            lines.append(f"memory: {peak} of {budget} predicted, {between}; blocks: {self.choice.describe()}")
        elif self.activations:
            lines.append(f"blocks: {', '.join(f'{name} {way}' for name, way in list(self.activations.items())[:4])}, …")
        return "\n".join([*lines, *([] if self.tree is None else [self.tree.describe()])])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Collective: save this rank's residuals to a file in `folder`, with a digest of the weights, between steps.

        Weights and the optimizer's state are equal on all ranks. Save them once, as usual.

        Args:
            folder: The folder, which is created if necessary.

        Raises:
            UsageError: The file cannot be written. All ranks raise then, and the folder keeps the previous checkpoint.
            MismatchError: Another rank cannot write its file, or the weights differ between ranks.

        Example:
            >>> if rank == 0:
            ...     torch.save([trainer.module.state_dict(), trainer.optimizer.state_dict()], "run/training.pt")
            >>> trainer.save("run/exchange")
        """
        self._check_ready()
        self._checkpoints.save(folder, {**self._residual_state(), "weights": digest_of_bits(self._parameters)})

    def load(self, folder: str | os.PathLike[str], *, on_world_size: str = "refuse") -> None:
        """Collective: continue from a checkpoint that `save` wrote. Load the weights and the optimizer's state first.

        Args:
            folder: The folder that was passed to `save`.
            on_world_size: What to do if another number of ranks saved the checkpoint: `refuse` it, `reset` (drop the
                residuals) or `redistribute` them.

        Raises:
            UsageError: The checkpoint is damaged, or does not fit the model, its weights or the exchange.
            MismatchError: Another rank cannot load its file, or the ranks load different checkpoints.

        Example:
            >>> model, optimizer = torch.load("run/training.pt")
            >>> trainer.module.load_state_dict(model)
            >>> trainer.optimizer.load_state_dict(optimizer)
            >>> trainer.load("run/exchange")
        """
        self._check_ready(to_load=True)
        self._resume(self._checkpoints.load(folder, on_world_size, self._examine))

    def state_dict(self) -> dict[str, Any]:
        """Return all state of this rank: weights, the optimizer's state, and a copy of the residuals in host memory."""
        self._check_ready()
        weights, optimizer = self.module.state_dict(), self.optimizer.state_dict()
        return {**self._residual_state(), "model": weights, "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Collective: continue from what `state_dict` returned, on the same rank of as many ranks.

        Args:
            state: The state, which all ranks saved at the same step.

        Raises:
            UsageError: The state does not fit the model, the optimizer or the exchange.
            MismatchError: Another rank refuses its state, or the states are of different steps.
        """
        self._check_ready(to_load=True)
        with same_on_all_ranks(self._group, self._device, "the state", "load_state_dict") as fields:
            self._checkpoints.check(state)
            here = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            for part in here:
                if not isinstance(state.get(part), Mapping):
                    raise UsageError(f"the state has no {part!r}: pass what state_dict() returned")
            if (difference := first_difference(_shapes(state), _shapes(here))) is not None:
                text = "{} is {} in the state, but {} now".format(*difference)
                raise UsageError(f"{text}: load it into the same model")
            fields |= {"steps": state["steps"], "buckets": state["buckets"]}
            fields["weights"] = {name: float(state["model"][name].double().sum()) for name in self._parameters}
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._resume(state)

    @property
    def _checkpoints(self) -> Checkpoints:  # not an attribute, which would refer back to this trainer
        # Earlier releases could exchange updates instead of gradients ("mirror").
        expected = {**settings(self.exchange), "mirror": False, "optimizer": type(self.optimizer).__name__}
        levels = self.tree if self.exchange.keeps else None
        return Checkpoints(self._group, self._device, expected, levels, self._misfit)

    def _residual_state(self) -> dict[str, Any]:
        buckets = [[str(piece) for piece in bucket.pieces] for bucket in self._pipeline.buckets]
        tensors = self._pipeline.residuals()
        return {**self._checkpoints.identity, "steps": self.steps, "buckets": buckets, "tensors": tensors}

    def _resume(self, state: Mapping[str, Any]) -> None:
        buckets = parse_buckets(state["buckets"], self._parameters)
        with current_device(self._device):
            self._pipeline.resume(buckets, state["tensors"], state["steps"])

    def _examine(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Raise if the model has other weights than the checkpoint. Return what must be equal on all ranks."""
        if state.get("weights") != digest_of_bits(self._parameters):
            text = f"the model's weights are not those of step {state['steps']}, at which the checkpoint was saved"
            raise UsageError(f"{text}: load the module's and the optimizer's state of that step first, on every rank")
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            kinds = self.optimizer.state.get(parameter, {})
            tensors |= {f"{name}.{kind}": value for kind, value in kinds.items() if isinstance(value, Tensor)}
        return flatten({"optimizer": {**self._pipeline.optimizer.describe(), "state": digest_of_bits(tensors)}})

    def _misfit(self, tensors: Mapping[str, Mapping[str, Tensor]], buckets: Sequence[Sequence[str]]) -> str | None:
        try:
            parse_buckets(buckets, self._parameters)
        except UsageError as error:
            return str(error)
        return misfit_of({name: parameter.shape for name, parameter in self._parameters.items()}, tensors)

    def close(self) -> None:
        """Stop exchanging, and leave the module as an ordinary one. Residuals are lost."""
        self._managed.close()
        self._pipeline.close()

    def _check_ready(self, *, to_load: bool = False) -> None:
        if not self._pipeline.runner.lanes:
            raise UsageError("this trainer is closed: create a new one")
        if to_load and self._pipeline.runner.error is not None:
            raise ExchangeError(f"an exchange of this trainer failed: create a new Layerwise to load: {self.error}")
        if to_load:
            return
        device = self._device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            why = "a GradScaler would skip a step only after some layers have taken it"
            raise UsageError(f"Layerwise does not support autocast to float16, as {why}: use torch.bfloat16 instead")
        if {p for p in self.module.parameters() if p.requires_grad} != set(self._parameters.values()):
            text = "other parameters require gradients than when this trainer was created"
            raise UsageError(f"{text}: close() it, and create a new one after freezing or unfreezing")
        self._pipeline.check_complete()


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    shapes = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
    return {**shapes, "parameters of optimizer groups": [len(g["params"]) for g in state["optimizer"]["param_groups"]]}
