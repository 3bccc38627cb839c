"""Check the arguments of trainers, and copy tensors from the first rank to all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from syncline.errors import UsageError
from syncline.exchange import Dense, Exchange, OkTopk, is_dense
from syncline.records.plan import MAX_LANES
from syncline.runtime.parameters import refuse_sparse

OptimizerOf = Callable[[Iterable[nn.Parameter]], Optimizer]


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name. Raise if Layerwise cannot train the module."""
    if isinstance(module, DDP):
        raise UsageError("Layerwise takes a plain module, not a DistributedDataParallel: pass model.module")
    if not isinstance(module, nn.Module):
        raise UsageError(f"Layerwise takes an nn.Module, not a {type(module).__name__}")
    refuse_sparse(module)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise UsageError("the model has no parameter that requires a gradient")
    for name, parameter in trained.items():
        if parameter.is_complex():
            raise UsageError(f"{name} is complex, which Layerwise does not support: use DDP and syncline.attach")
        if not is_dense(parameter):
            raise UsageError(f"{name} has gaps or overlaps in memory: make it contiguous()")
    return trained


def with_layout_of(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient with the strides and type of its parameter. It is copied only if these differ."""
    if gradient.layout != torch.strided:
        raise UsageError("sparse gradients are not supported: build the embedding with sparse=False")
    gradient = gradient.detach()
    if gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError("there is no process group: call torch.distributed.init_process_group first, under torchrun")
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None  # noqa: S101 - it is initialised
    return chosen


def checked_exchange(exchange: Exchange | None) -> Exchange:
    exchange = Dense() if exchange is None else exchange
    if isinstance(exchange, type) or not isinstance(exchange, Exchange):
        raise UsageError(f"{exchange!r} is not an exchange: pass an instance, for example syncline.Dense()")
    return exchange


def check_lanes(lanes: object) -> None:
    if not isinstance(lanes, int) or isinstance(lanes, bool) or not 1 <= lanes <= MAX_LANES:
        raise UsageError(f"lanes is {lanes!r}: it must be an integer from 1 to {MAX_LANES}")


def build_optimizer(optimizer: Optimizer | OptimizerOf, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
    """Return the optimizer, or call the function that creates it. Raise if it misses a parameter."""
    built: object = optimizer
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        built = optimizer(list(parameters.values()))
    if not isinstance(built, Optimizer):
        kind = type(built).__name__
        raise UsageError(f"optimizer is a {kind}: pass an optimizer, or a function that creates one from parameters")
    stepped = {id(p) for group in built.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        if id(parameter) not in stepped:
            raise UsageError(f"{name} requires a gradient, but the optimizer does not have it: add it, or freeze it")
    return built


def broadcast_from_first(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """Collective: overwrite the tensors of all ranks with those of the group's first rank."""
    if tensors:  # the function is private, but DDP copies its parameters with it
        dist._broadcast_coalesced(group, [tensor.detach() for tensor in tensors], 2**26, 0)  # type: ignore[attr-defined]


def check_timeout(timeout_s: object) -> None:
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (number and 0 < timeout_s < 1e9):  # type: ignore[operator]
        raise UsageError(f"timeout_s must be greater than 0, not {timeout_s!r}")


def check_numbers(residual: str | None, **numbers: float | None) -> None:
    """Raise unless each number is positive and finite, or None, and `residual` is a valid choice."""
    for name, value in numbers.items():
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{name} is {value!r}: it must be greater than 0")
    if residual not in (None, "device", "host"):
        raise UsageError(f"residual is {residual!r}: pass 'device' or 'host'")


def refuse_double_momentum(exchange: Exchange, optimizer: Optimizer) -> None:
    inner = getattr(exchange, "across", exchange)
    if isinstance(inner, OkTopk) and inner.momentum and any(group.get("momentum") for group in optimizer.param_groups):
        raise UsageError(f"{inner!r} and the optimizer both have momentum: remove it from one of them")
