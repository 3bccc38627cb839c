"""Tensors that must not be read yet. Reading one waits for its value, or raises an error.

While the new weights of a parameter are being gathered, the parameter is a `PendingParameter`: the first function of
torch that uses it waits for them. So a forward pass waits for exactly the weights that it uses, whatever module uses
them, and so do `state_dict`, copies and averages of weights. After a backward pass whose gradients are summed in
shards, a parameter's own gradient is an `UnfinishedGradient`: it must not be used, except by `zero_grad` and by a
GradScaler.

A guard changes the class of a tensor that others refer to, as torch itself does for lazily initialised parameters.
Functions that read memory without calling a function of torch, such as C++ extensions, do not see it. For them, each
module that owns parameters waits for its own before its forward. Tensors that share a parameter's memory, such as a
`state_dict()` that was not cloned, are not guarded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from syncline.errors import UsageError

Wait = Callable[[], None]


class Shards(Protocol):
    """Where the gradients really are."""

    def zero(self, name: str) -> bool:
        """Set the shard of a parameter's gradient to zero, and return True, if the optimizer has not stepped it yet."""

    def unscale(self, dtype: torch.dtype, found_inf: Tensor, inverse_scale: Tensor) -> None:
        """Unscale the shards of this type, and set `found_inf` on all ranks if one is not finite on any rank."""


_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "nbytes", "grad", "_grad", "grad_fn"),
    *("requires_grad", "is_leaf", "retains_grad", "output_nr", "_version", "_backward_hooks"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested"),
)
_METHODS = (
    *("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "register_hook", "__hash__"),
    "register_post_accumulate_grad_hook",
)


def _metadata() -> frozenset[Any]:
    """Return the functions of torch that do not read a tensor's elements."""
    properties = [getattr(Tensor, name, None) for name in _PROPERTIES]
    found = [getattr(p, way) for p in properties if p is not None for way in ("__get__", "__set__", "__delete__")]
    found += [getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)]
    return frozenset([*found, torch.is_floating_point, torch.is_complex, torch.numel])


_METADATA = _metadata()
_ZEROING = frozenset([Tensor.zero_, torch._foreach_zero_])
_UNSCALE: Any = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)  # what a GradScaler calls


class PendingParameter(nn.Parameter):
    """A parameter whose new weights are on their way."""

    _wait: Wait

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return _unguarded(func, args, kwargs)
        for tensor in _tensors_in((args, kwargs)):
            wait_for(tensor)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        wait_for(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait_for(self)
        return self.__reduce_ex__(protocol)


class UnfinishedGradient(Tensor):
    """A gradient of this rank alone, whose average over all ranks exists only in shards."""

    _shards: weakref.ref[Shards]  # a strong reference would be a cycle through torch, which Python cannot collect
    _name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA or func is Tensor.detach_:
            return _unguarded(func, args, kwargs)
        gradients = [tensor for tensor in _tensors_in((args, kwargs)) if type(tensor) is UnfinishedGradient]
        shards = gradients[0]._shards()
        if func in _ZEROING:
            for gradient in gradients:
                if shards is None or not shards.zero(gradient._name):
                    release(gradient)
            return _unguarded(func, args, kwargs)
        if func is _UNSCALE and shards is not None:
            found_inf, inverse_scale = args[1:]
            return shards.unscale(gradients[0].dtype, found_inf, inverse_scale)
        name = getattr(func, "__name__", str(func))
        text = f"{name}: with overlap='forward', gradients are averaged in shards, and .grad has none that can be used"
        raise UsageError(f"{text}. To clip them, call handle.clip_grad_norm_(max_norm) instead of torch's function")


def _unguarded(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors_in(value)
    elif isinstance(values, dict):
        yield from _tensors_in(list(values.values()))


def can_guard(parameter: nn.Parameter) -> bool:
    """Return whether a parameter may become pending: it is not of a class of its own."""
    return type(parameter) in (nn.Parameter, PendingParameter)


def make_pending(parameter: nn.Parameter, wait: Wait) -> None:
    """Let the first use of a parameter call `wait`, which must call `make_ready`."""
    parameter.__class__ = PendingParameter
    parameter._wait = wait  # type: ignore[attr-defined]


def make_ready(parameter: nn.Parameter) -> None:
    """Let a parameter be used again."""
    if type(parameter) is PendingParameter:
        del parameter._wait
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def wait_for(tensor: Tensor) -> None:
    """Wait for the weights of a parameter that is pending. Do nothing for other tensors."""
    if type(tensor) is PendingParameter and (wait := getattr(tensor, "_wait", None)) is not None:
        wait()


def withhold(gradient: Tensor, name: str, shards: Shards) -> None:
    """Forbid the use of the gradient of a parameter."""
    gradient.__class__ = UnfinishedGradient
    gradient._name, gradient._shards = name, weakref.ref(shards)  # type: ignore[attr-defined]


def release(gradient: Tensor) -> None:
    """Allow the use of a gradient again."""
    if type(gradient) is UnfinishedGradient:
        del gradient._shards, gradient._name
        gradient.__class__ = Tensor  # type: ignore[assignment]
