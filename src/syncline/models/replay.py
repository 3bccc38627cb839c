"""A model that computes nothing and takes as long as a recorded one: ranks on a laptop wait as a GPU would compute.

Its forward uses each parameter at some time, and its backward returns each gradient at the recorded time, so DDP's
hooks run at these times and send real bytes while the cores are free for communication. Deadlines are absolute, from
the start of a pass, so that the errors of sleeps do not add up. A profile has no times of uses. They are taken to be
the mirror image of backward: a parameter whose gradient is ready after a share x of backward is used after a share
1 − x of forward. If a use has to wait for the parameter, everything that follows is as much later.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from syncline.errors import UsageError
from syncline.records.profile import BUFFER_ITEM_BYTES, Profile

POOL_ELEMENTS = 1 << 18


class ReplayModel(nn.Module):
    """Replays the forward and backward of a profile, but not the optimizer's `update_s`.

    Inputs are ignored, and the output is a scalar. Gradients are random, from a `seed` that each rank should have for
    itself, and differ in each step. Buffers are real, one per dtype, and DDP broadcasts them before every forward.
    Parameters are zero on all ranks, so DDP may skip its first broadcast (`init_sync=False`).

    With `rank`, the times are those of this rank of the profile, so that a straggler stays one; otherwise, and for
    ranks that are not in the profile, they are the medians.
    """

    def __init__(self, profile: Profile, seed: int = 0, rank: int | None = None) -> None:
        super().__init__()
        self._profile = profile = _at_pace_of(profile, rank)
        self.pace = 1.0
        """Factor of all times from the next step on, for a rank that computes a larger or smaller batch."""
        self._noise = _Noise(seed)
        # Models list their parameters roughly in forward order, and DDP's first buckets rely on that.
        # Autograd runs the first one last: a model may compute for some time after its last gradient.
        self._in_forward_order: list[tuple[str | None, float]] = [(None, profile.backward_s)]
        for gradient in reversed(profile.gradients):
            self._in_forward_order.append((gradient.name, gradient.ready_s))
            _add_parameter(self, gradient.name, torch.zeros(gradient.shape, dtype=getattr(torch, gradient.dtype)))
        for entry in profile.buffers:
            elements = entry.bytes // BUFFER_ITEM_BYTES[entry.dtype]
            self.register_buffer(f"_replayed_{entry.dtype}", torch.zeros(elements, dtype=getattr(torch, entry.dtype)))

    def forward(self, *_: object, **__: object) -> Tensor:
        start_s, pace = time.monotonic(), self.pace
        forward_s, backward_s = pace * self._profile.forward_s, pace * self._profile.backward_s
        begun_s: list[float] = []  # when backward began
        x = torch.zeros((), device=next(self.parameters()).device, requires_grad=True)
        for name, recorded_s in self._in_forward_order:
            offset_s = pace * recorded_s
            parameter = None if name is None else self.get_parameter(name)
            if parameter is not None and type(parameter) is not nn.Parameter:  # it may have to wait for its weights
                _sleep_until(start_s + forward_s * (1 - offset_s / backward_s if backward_s else 0.0))
                used_s = time.monotonic()
                parameter.detach()
                start_s += time.monotonic() - used_s
            x = _Until.apply(x, parameter, self._noise, begun_s, offset_s)  # type: ignore[no-untyped-call]
        if x.requires_grad:
            x.register_hook(lambda _: begun_s.append(time.monotonic()))
        _sleep_until(start_s + forward_s)  # after the graph is built: building it is part of the recorded time
        return x


class _Noise:
    """Random numbers as cheap as a copy: slices of a small pool. The pool is not a buffer of the module, because DDP
    would make it equal on all ranks."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # So small that parameters stay finite after many optimizer steps.
        self._pool = 1e-3 * torch.randn(POOL_ELEMENTS, generator=generator)
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._offset = 0

    def like(self, parameter: Tensor) -> Tensor:
        """Return a new tensor: autograd makes it the parameter's `grad`, and DDP writes into it."""
        key, count = (parameter.device, parameter.dtype), parameter.numel()
        if key not in self._copies:
            self._copies[key] = self._pool.to(*key)
        pool = self._copies[key]
        first = pool[self._offset : self._offset + count]
        whole, rest = divmod(count - first.numel(), POOL_ELEMENTS)
        self._offset = (self._offset + count) % POOL_ELEMENTS
        return torch.cat([first, *[pool] * whole, pool[:rest]]).view(parameter.shape)


class _Until(torch.autograd.Function):
    """Waits until an offset and returns the gradient of its parameter, if it has one.

    Each parameter has its own, because autograd guarantees no order among the gradients that one function returns.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parameter: Tensor | None, noise: _Noise, begun_s: list[float], offset_s: float
    ) -> Tensor:
        ctx.parameter = None if parameter is None else parameter.detach()
        ctx.noise, ctx.begun_s, ctx.offset_s = noise, begun_s, offset_s
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Before the wait, so that the copy does not delay the gradient.
        gradient = ctx.noise.like(ctx.parameter) if ctx.needs_input_grad[1] else None
        _sleep_until(ctx.begun_s[-1] + ctx.offset_s)
        return grad, gradient, None, None, None


def _at_pace_of(profile: Profile, rank: int | None) -> Profile:
    """Return the profile with the times of this rank; unchanged if it was not measured."""
    own = next((times for times in profile.ranks if times.rank == rank), None)
    if own is None:
        return profile
    pace = own.backward_s / profile.backward_s if profile.backward_s else 1.0
    gradients = tuple(msgspec.structs.replace(g, ready_s=g.ready_s * pace) for g in profile.gradients)
    times = {"forward_s": own.forward_s, "backward_s": own.backward_s, "update_s": own.update_s}
    return msgspec.structs.replace(profile, gradients=gradients, **times)


def _sleep_until(deadline_s: float) -> None:
    """Sleep until a time, never shorter. Sleeping releases the GIL for the threads that communicate."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        time.sleep(left_s)


def _add_parameter(root: nn.Module, name: str, value: Tensor) -> None:
    """Register a parameter under its dotted name, and add the modules on its path."""
    *path, last = name.split(".")
    module = root
    try:
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(value))
    except (AttributeError, KeyError) as error:
        problem = f"no module can have a parameter {name} beside the other parameters"
        raise UsageError(f"the profile cannot be replayed: {problem}") from error
