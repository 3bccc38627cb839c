"""What a model has that is exchanged, and where it is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.errors import UsageError


def ddp_of(model: nn.Module) -> DDP:
    inner = getattr(model, "_orig_mod", model)  # torch.compile(DDP(net))
    if not isinstance(inner, DDP):
        raise UsageError(f"attach needs a DistributedDataParallel model, not {type(inner).__name__}: wrap it first")
    refuse_sparse(inner.module)
    return inner


def refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(f"{name or 'the model'} makes sparse gradients, which are not supported: sparse=False")


def parameters_of(ddp: DDP) -> dict[str, nn.Parameter]:
    """All that DDP may exchange. Frozen ones too: those that were frozen after DDP was built are in its buckets."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in ddp.module.named_parameters()
        if name not in ignored
    }


def only_device(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    devices = {parameter.device for parameter in parameters.values()}
    if not devices:
        raise UsageError("the model has no parameters: there is nothing to exchange")
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"the model's parameters are on several devices ({names}): one per process is supported")
    return devices.pop()


def shapes_of(ddp: DDP) -> dict[str, tuple[tuple[int, ...], str]]:
    """Of all that is trained, as a plan has them."""
    return {name: described(parameter) for name, parameter in parameters_of(ddp).items() if parameter.requires_grad}


def described(parameter: Tensor) -> tuple[tuple[int, ...], str]:
    """Its shape and type, as a plan has them."""
    return tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")


def described_fully(tensor: Tensor) -> str:
    """All of it that must be the same on all ranks."""
    trained = "trained" if tensor.requires_grad else "frozen"
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.stride()} {trained}"
