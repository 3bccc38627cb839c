"""What a trainer is given, checked: a module, an optimizer, an exchange, a group; and made the same on all ranks."""

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
_BROADCAST_BYTES = 2**26
_LONGEST_S = 1e9
"""That a timedelta holds, with room to spare."""


def trained_of(module: nn.Module) -> dict[str, nn.Parameter]:
    if isinstance(module, DDP):
        raise UsageError("Layerwise takes the module itself, not a DistributedDataParallel: pass model.module")
    if not isinstance(module, nn.Module):
        raise UsageError(f"Layerwise trains a module, not a {type(module).__name__}")
    refuse_sparse(module)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise UsageError("the model has no parameter that requires a gradient")
    for name, parameter in trained.items():
        if parameter.is_complex():
            raise UsageError(f"{name} is complex, which is not supported here: use DDP and attach")
        if not is_dense(parameter):
            raise UsageError(f"{name} does not lie densely in memory: make it contiguous()")
    return trained


def lying_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """In memory as the parameter does: as a rule it does so already."""
    if gradient.layout != torch.strided:
        raise UsageError("sparse gradients are not supported: build the embedding with sparse=False")
    gradient = gradient.detach()
    if gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError("there is no process group: call torch.distributed.init_process_group first, under torchrun")
    found = group if group is not None else dist.group.WORLD
    assert found is not None  # noqa: S101 - it is initialised
    return found


def checked_exchange(exchange: Exchange | None) -> Exchange:
    exchange = Dense() if exchange is None else exchange
    if isinstance(exchange, type) or not isinstance(exchange, Exchange):
        raise UsageError(f"{exchange!r} is not an exchange: pass an instance, for example syncline.Dense()")
    return exchange


def check_lanes(lanes: object) -> None:
    if not isinstance(lanes, int) or isinstance(lanes, bool) or not 1 <= lanes <= MAX_LANES:
        raise UsageError(f"lanes is {lanes!r}: there may be 1 to {MAX_LANES}")


def made_optimizer(optimizer: Optimizer | OptimizerOf, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
    made = optimizer if isinstance(optimizer, Optimizer) else None
    if made is None:
        if not callable(optimizer):
            raise UsageError(
                f"optimizer is a {type(optimizer).__name__}: pass one, or a function that makes one for parameters, "
                "like lambda p: torch.optim.SGD(p, lr=0.1)"
            )
        made = optimizer(list(parameters.values()))
    if not isinstance(made, Optimizer):
        raise UsageError(f"the optimizer's function returned a {type(made).__name__}, not an optimizer")
    stepped = {id(p) for group in made.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        if id(parameter) not in stepped:
            raise UsageError(f"the optimizer does not have {name}, which is trained: freeze it, or pass it along")
    return made


def same_as_first(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """Collective: all ranks' tensors become rank 0's, one broadcast for each type."""
    first = dist.get_global_rank(group, 0)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
        step = max(1, _BROADCAST_BYTES // dtype.itemsize)
        chunk: list[Tensor] = []
        for tensor in [*same, None]:
            if chunk and (tensor is None or sum(one.numel() for one in chunk) + tensor.numel() > step):
                flat = torch.cat([one.reshape(-1) for one in chunk])
                dist.broadcast(flat, first, group=group)
                for one, part in zip(chunk, flat.split([one.numel() for one in chunk]), strict=True):
                    one.copy_(part.view(one.shape))
                chunk = []
            if tensor is not None:
                chunk.append(tensor)


def check_timeout(timeout_s: object) -> None:
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (number and 0 < timeout_s < _LONGEST_S):  # type: ignore[operator]
        raise UsageError(f"timeout_s must be greater than 0, and is {timeout_s!r}")


def check_numbers(
    bucket_mb: float | None,
    backlog_mb: float | None,
    clip_norm: float | None,
    timeout_s: float | None,
    residual: str | None,
) -> None:
    for name, value in {
        "bucket_mb": bucket_mb,
        "backlog_mb": backlog_mb,
        "clip_norm": clip_norm,
        "timeout_s": timeout_s,
    }.items():
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{name} is {value!r}: pass a positive number")
    if residual not in (None, "device", "host"):
        raise UsageError(f"residual is {residual!r}: it is kept on the device, or on the host")


def refuse_double_momentum(exchange: Exchange, optimizer: Optimizer, *, mirror: bool) -> None:
    inner = getattr(exchange, "across", exchange)
    if isinstance(inner, OkTopk) and inner.momentum and any(group.get("momentum") for group in optimizer.param_groups):
        raise UsageError(f"{inner!r} and the optimizer both have momentum: leave one of them without")
    if mirror and isinstance(inner, OkTopk) and inner.momentum:
        raise UsageError(f"mirror=True has momentum of its own: use OkTopk(density={inner.density})")
