"""Attach an exchange of updates to a replica whose peers come and go."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from syncline.ddp.handle import AnyEngine, Handle
from syncline.dist.agreement import versions_here
from syncline.elastic.engine import Engine
from syncline.elastic.manager import Manager
from syncline.elastic.stats import ElasticStats
from syncline.elastic.weights import Weights
from syncline.errors import UsageError
from syncline.exchange import Exchange, is_dense
from syncline.fsdp.units import is_sharded
from syncline.runtime import validation
from syncline.updates.policy import Nesterov, checked_policy

TIMEOUT_S = 8.0
_ATTACHED: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()  # no handle: it has the model


def attach_elastic(
    model: nn.Module,
    exchange: Exchange,
    manager: object,
    optimizer: Optimizer | None,
    every: int,
    outer: Nesterov | None,
    timeout_s: float | None,
    unsupported: dict[str, bool],
) -> ElasticHandle:
    """Attach an exchange to a replica, and wait until it has the weights of the others. See `attach`."""
    if not isinstance(manager, Manager):
        kind = f"{type(manager).__module__}.{type(manager).__name__}"
        text = "torchft's own Manager cannot be used" if kind.startswith("torchft.") else "that is not a manager"
        raise UsageError(f"manager is a {kind}: {text}: pass a syncline.elastic.Manager")
    net: nn.Module = getattr(model, "_orig_mod", model)  # of torch.compile
    before = _ATTACHED.get(net)
    if manager.is_shut_down or (manager.is_used and (before is None or before.manager is not manager)):
        state = "was shut down" if manager.is_shut_down else "is used by another model"
        raise UsageError(f"the manager {state}: create another one")
    if optimizer is None:
        raise UsageError("with a manager, updates are exchanged: pass optimizer= too")
    for name, is_set in unsupported.items():
        if is_set:
            raise UsageError(f"{name} cannot be used with a manager: leave it out")
    if isinstance(net, DDP) or is_sharded(net):
        kind = "a DistributedDataParallel" if isinstance(net, DDP) else "sharded"
        raise UsageError(f"the model is {kind}, but each process is a replica by itself: pass the plain module")
    validation.refuse_sparse(net)
    policy = checked_policy(exchange, 1, every, 0, 0, outer)
    if policy.every < 2:
        raise UsageError(f"every is {every}: with a manager, pass the number of steps between exchanges, 2 or more")
    parameters = validation.named_parameters(net, ())
    validation.only_device(parameters)
    validation.check_steps_all(optimizer, parameters)
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    buffers = {n.replace("_orig_mod.", ""): buffer for n, buffer in net.named_buffers() if is_dense(buffer)}
    described = {name: validation.described_fully(tensor) for name, tensor in (parameters | buffers).items()}
    settings = {**policy.fingerprint(), "model": described, "version": versions_here()}
    settings["optimizer"] = type(optimizer).__name__
    if before is not None:
        _ATTACHED.pop(net).close()
        before.manager.is_used = False
    weights = Weights(trained, buffers, optimizer, policy)
    engine = Engine(weights, policy, manager, TIMEOUT_S if timeout_s is None else timeout_s, settings)
    manager.is_used = True
    try:
        engine.join()
    except BaseException:
        manager.is_used = False
        engine.close()
        raise
    alive = weakref.ref(engine)  # the optimizer holds its hooks
    engine.hooks += [
        optimizer.register_step_pre_hook(lambda *_: _call(alive, Engine.before_step)),
        optimizer.register_step_post_hook(lambda *_: _call(alive, Engine.after_step)),
    ]
    _ATTACHED[net] = engine
    return ElasticHandle(net, engine)


class ElasticHandle(Handle):
    """The handle of a replica whose peers come and go. `attach` returns it if it got a manager.

    It has `stats`, `synced`, `describe`, `clip_grad_norm_` and `detach`. Everything else raises a UsageError.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model, self._policy, self._topology = model, engine.policy, None
        self._elastic = engine

    @property
    def manager(self) -> Manager:
        """The manager that was passed to `attach`."""
        return self._elastic.manager

    @property
    def _attached(self) -> AnyEngine:
        text = "with a manager, a handle has only stats, synced, describe, clip_grad_norm_ and detach"
        raise UsageError(f"{text}: to save the training, save the model inside synced(), and the optimizer")

    @property
    def error(self) -> BaseException | None:
        """None: exchanges that fail are repeated, and counted in `stats`."""
        return None

    def stats(self) -> ElasticStats:
        """Return the numbers of steps and exchanges, and the replicas that are present."""
        return self._elastic.stats

    def describe(self) -> str:
        """Describe the attached exchange, and the replicas that took part in the last one."""
        stats = self._elastic.stats
        lines = [f"{self._policy}, among {len(stats.replicas)} replicas: {', '.join(stats.replicas)}"]
        connections = self._elastic.connections
        if connections is not None and connections.topology is not None and connections.topology.tree is not None:
            lines.append(connections.topology.tree.describe())
        return "\n".join(lines)

    def synced(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the weights that all replicas agreed on last."""
        return self._elastic.synced()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Any:
        """Scale this replica's gradients so that their norm is at most `max_norm`."""
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm, norm_type, error_if_nonfinite)

    def detach(self) -> None:
        """Stop exchanging. The model keeps this replica's own weights. Shut the manager down, or use it again.

        Raises:
            UsageError: The handle is detached, or another `attach` has replaced it.
        """
        if self._elastic.is_closed:
            text = "this handle is detached, or another attach has replaced it"
            raise UsageError(f"{text}: use the newest handle, or attach again")
        self._elastic.close()
        self.manager.is_used = False
        _ATTACHED.pop(self._model, None)


def _call(engine: weakref.ref[Engine], method: Callable[[Engine], None]) -> None:
    if (alive := engine()) is not None:
        method(alive)
