"""Find the parameters of a model that are exchanged, and their device."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from syncline.errors import UsageError


def ddp_of(model: nn.Module) -> DDP:
    inner = getattr(model, "_orig_mod", model)  # torch.compile(DDP(net))
    if not isinstance(inner, DDP):
        raise UsageError(f"the model is a {type(inner).__name__}: wrap it in DistributedDataParallel first")
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
