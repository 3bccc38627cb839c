"""Find the parameters of a model that are exchanged, and check the arguments of trainers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from syncline.errors import UsageError
from syncline.exchange import Dense, Exchange, OkTopk, is_dense
from syncline.records.plan import MAX_LANES

OptimizerOf = Callable[[Iterable[nn.Parameter]], Optimizer]


def ddp_of(model: nn.Module, call: str | None = None) -> DDP:
    """Return the DDP model, which may be compiled. The error for another model speaks of `call`, if it is given."""
    inner = getattr(model, "_orig_mod", model)  # torch.compile(DDP(net))
    if not isinstance(inner, DDP):
        if any(kind.__name__ == "FSDPModule" for kind in type(inner).__mro__):
            text = "the model is sharded with fully_shard, for which there are no plans"
            raise UsageError(f"{text}: choose an exchange with syncline.attach(model, exchange, replicate=…)")
        what = "the model is" if call is None else f"{call} needs a DistributedDataParallel model, and this is"
        raise UsageError(f"{what} a {type(inner).__name__}: wrap it in DistributedDataParallel first")
    refuse_sparse(inner.module)
    return inner


def refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(f"{name or 'the model'} makes sparse gradients, which are not supported: use sparse=False")


def parameters_of(ddp: DDP) -> dict[str, nn.Parameter]:
    """Return all parameters that DDP may exchange. Those that were frozen after DDP was built are in its buckets."""
    return named_parameters(ddp.module, getattr(ddp, "parameters_to_ignore", ()))


def named_parameters(module: nn.Module, ignored: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the parameters of a module, with the names that they have without torch.compile."""
    parameters = module.named_parameters()
    return {name.replace("_orig_mod.", ""): parameter for name, parameter in parameters if name not in ignored}


def only_device(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    devices = {parameter.device for parameter in parameters.values()}
    if not devices:
        raise UsageError("the model has no parameters to exchange")
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"the model's parameters are on several devices ({names}): use one device per process")
    return devices.pop()


def described_fully(tensor: Tensor) -> str:
    """Return the properties of a tensor that must be equal on all ranks, as text."""
    trained = "trained" if tensor.requires_grad else "frozen"
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.stride()} {trained}"


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
    same = gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype
    return gradient.detach() if same else torch.empty_like(parameter).copy_(gradient.detach())


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    chosen = dist.group.WORLD if group is None and dist.is_available() else group
    if chosen is None:
        raise UsageError("there is no process group: call torch.distributed.init_process_group first, under torchrun")
    return chosen


def checked_exchange(exchange: Exchange | None) -> Exchange:
    exchange = Dense() if exchange is None else exchange
    if isinstance(exchange, type) or not isinstance(exchange, Exchange):
        raise UsageError(f"{exchange!r} is not an exchange: pass an instance, for example syncline.Dense()")
    return exchange


def check_lanes(lanes: object) -> None:
    if not isinstance(lanes, int) or isinstance(lanes, bool) or not 1 <= lanes <= MAX_LANES:
        raise UsageError(f"lanes is {lanes!r}: it must be an integer from 1 to {MAX_LANES}")


def build_optimizer(
    optimizer: Optimizer | OptimizerOf, parameters: Mapping[str, nn.Parameter], exchange: Exchange
) -> Optimizer:
    """Return the optimizer, or call the function that creates it. Raise if it does not fit."""
    built = optimizer
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        built = optimizer(list(parameters.values()))
    if not isinstance(built, Optimizer):
        kind = type(built).__name__
        raise UsageError(f"optimizer is a {kind}: pass an optimizer, or a function that creates one from parameters")
    stepped = {id(p) for group in built.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        if id(parameter) not in stepped:
            raise UsageError(f"{name} requires a gradient, but the optimizer does not have it: add it, or freeze it")
    inner = getattr(exchange, "across", exchange)
    if isinstance(inner, OkTopk) and inner.momentum and any(group.get("momentum") for group in built.param_groups):
        raise UsageError(f"{inner!r} and the optimizer both have momentum: remove it from one of them")
    return built


def check_steps_all(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise unless the updates of this optimizer can be exchanged, and it steps these parameters and no others."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer is a {type(optimizer).__name__}: pass the torch.optim.Optimizer of the model")
    kind = type(optimizer).__name__
    if kind in ("LBFGS", "SparseAdam", "ZeroRedundancyOptimizer"):
        raise UsageError(f"the updates of {kind} cannot be exchanged: use another optimizer")
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    build_optimizer(optimizer, trained, Dense())
    known = set(map(id, parameters.values()))
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise UsageError("the optimizer has parameters that are not in this model: use one optimizer per model")
    for name, parameter in trained.items():
        if parameter.is_complex() or not is_dense(parameter):
            what = "is complex" if parameter.is_complex() else "has gaps or overlaps in memory"
            raise UsageError(f"{name} {what}, so its updates cannot be exchanged: attach without optimizer=")


def optimizer_settings(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer that must be equal on all ranks."""
    described: dict[str, Any] = {"type": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items()}
        settings["params"] = len(group["params"])
        described[f"group {index}"] = msgspec.to_builtins(settings, enc_hook=repr)
    return described


def buffers_of(ddp: DDP) -> dict[str, Tensor]:
    """Return the buffers that DDP broadcasts, without those that have gaps in memory."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    buffers = ((name, buffer) for name, buffer in ddp.module.named_buffers() if name not in ignored)
    return {name.replace("_orig_mod.", ""): buffer for name, buffer in buffers if is_dense(buffer)}


def broadcast_from_first(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """Collective: overwrite the tensors of all ranks with those of the group's first rank."""
    if tensors:  # the function is private, but DDP copies its parameters with it
        dist._broadcast_coalesced(group, [tensor.detach() for tensor in tensors], 2**26, 0)  # type: ignore[attr-defined]


def check_positive(**numbers: object) -> None:
    """Raise unless each number is positive and of a usual size, or None."""
    for name, value in numbers.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < 1e9):  # type: ignore[operator]
            raise UsageError(f"{name} is {value!r}: {name} must be greater than 0, and less than 1e9")


def check_scaler(scaler: object) -> None:
    """Raise a UsageError unless `scaler` is a GradScaler or None."""
    known = all(callable(getattr(scaler, name, None)) for name in ("is_enabled", "get_scale"))
    if scaler is not None and (isinstance(scaler, type) or not known):
        raise UsageError(f"scaler is a {type(scaler).__name__}: pass the GradScaler of the loss, or leave it out")


def scale_of(scaler: GradScaler | None) -> Tensor | None:
    """Return the current loss scale as a 0-dim tensor, without waiting for the device if torch permits it."""
    if scaler is None or not scaler.is_enabled():
        return None
    scale: Tensor | None = getattr(scaler, "_get_scale_async", lambda: None)()  # private: `get_scale` waits
    return torch.tensor(scaler.get_scale()) if scale is None else scale
