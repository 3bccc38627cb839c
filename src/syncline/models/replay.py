"""A model that computes nothing and takes exactly as long as a recorded one.

Eight ranks on a laptop's two cores cannot compute ResNet-50 at a GPU's pace, but they can wait at it. A
`ReplayModel` has real parameters of the recorded shapes; its forward sleeps, and its backward hands out
each gradient at its recorded offset. DDP's hooks fire at these times and real bytes travel, so the overlap
of computation and communication is measured over a real network while the cores stay free for it.

Deadlines are absolute, counted from the start of backward: sleeps overshoot a little each time, and over
hundreds of parameters relative ones would add up to a slower model than the recorded one.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from syncline.errors import UsageError
from syncline.records.profile import BUFFER_ITEM_BYTES, ITEM_BYTES, Profile

POOL_ELEMENTS = 1 << 18
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


class ReplayModel(nn.Module):
    """Replays the forward and backward of a profile; the optimizer's `update_s` is left to the optimizer.

    Inputs are ignored; the output is a scalar whose `backward` takes the recorded time. Gradients are
    random numbers from `seed`, other ones in each step: give each rank its own seed. They do not depend on
    the loss, nor on its scale.

    With a `rank` of those that the profile was measured on it has that rank's own pace, so that a straggler is replayed
    as one; any other has the medians. Buffers are real too, one per type: DDP broadcasts them before every forward.

    Parameters start at zero everywhere, so DDP may skip its first broadcast (`init_sync=False`).
    """

    def __init__(self, profile: Profile, seed: int = 0, rank: int | None = None) -> None:
        super().__init__()
        self._profile = profile = _at_pace_of(profile, rank)
        self._noise = _Noise(seed)
        # Models list their parameters about in forward order, and DDP's first buckets rely on it.
        self._in_forward_order = [
            (_add_parameter(self, g.name, torch.zeros(g.shape, dtype=DTYPES[g.dtype])), g.ready_s)
            for g in reversed(profile.gradients)
        ]
        taken = {gradient.name.partition(".")[0] for gradient in profile.gradients}
        for entry in profile.buffers:
            name = f"buffer_{entry.dtype}"
            while name in taken:
                name += "_"
            elements = entry.bytes // BUFFER_ITEM_BYTES[entry.dtype]
            self.register_buffer(name, torch.zeros(elements, dtype=getattr(torch, entry.dtype)))

    def forward(self, *_: object, **__: object) -> Tensor:
        deadline_s = time.monotonic() + self._profile.forward_s
        backward = _Backward(self._noise)
        x = torch.zeros((), device=next(self.parameters()).device, requires_grad=True)
        # Autograd comes here last: what a model computes after its last gradient takes time too.
        x = _until(x, None, backward, self._profile.backward_s)
        for name, ready_s in self._in_forward_order:
            x = _until(x, self.get_parameter(name), backward, ready_s)
        x = _start(x, backward)
        _sleep_until(deadline_s)  # after the graph is built, so that building it is part of the recorded time
        return x


class _Noise:
    """Random numbers that cost a copy: slices of a small pool, each starting elsewhere.

    Not a buffer of the module, or DDP would make it equal on all ranks.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Small enough that an optimizer's steps keep the parameters finite.
        self._pool = 1e-3 * torch.randn(POOL_ELEMENTS, generator=generator)
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._offset = 0

    def like(self, parameter: Tensor) -> Tensor:
        """A new tensor each time: autograd makes it the parameter's `grad`, and DDP writes into that."""
        flat = torch.empty(parameter.numel(), device=parameter.device, dtype=parameter.dtype)
        pool = self._pool_for(parameter)
        done = 0
        while done < flat.numel():
            piece = pool[self._offset : self._offset + flat.numel() - done]
            flat[done : done + piece.numel()].copy_(piece)
            done += piece.numel()
            self._offset = (self._offset + piece.numel()) % POOL_ELEMENTS
        return flat.view(parameter.shape)

    def _pool_for(self, parameter: Tensor) -> Tensor:
        key = (parameter.device, parameter.dtype)
        if key not in self._copies:
            self._copies[key] = self._pool.to(*key)
        return self._copies[key]


class _Backward:
    """One backward pass: when it began, and what its gradients are made of."""

    def __init__(self, noise: _Noise) -> None:
        self.noise = noise
        self.start_s = 0.0

    def begin(self) -> None:
        self.start_s = time.monotonic()

    def wait_for(self, offset_s: float) -> None:
        _sleep_until(self.start_s + offset_s)


class _Start(torch.autograd.Function):
    """Last in forward, so first in backward: starts its clock."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: _Backward) -> Tensor:
        ctx.backward_pass = backward
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.backward_pass.begin()
        return grad, None


class _Until(torch.autograd.Function):
    """Yields a parameter's gradient at its time, or only lets time pass where there is no parameter.

    One per parameter: autograd fixes no order among the gradients that one function returns.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor | None, backward: _Backward, offset_s: float) -> Tensor:
        ctx.parameter = None if parameter is None else parameter.detach()
        ctx.backward_pass, ctx.offset_s = backward, offset_s
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        # Made before the wait, so that the copy is over when the deadline comes.
        gradient = ctx.backward_pass.noise.like(ctx.parameter) if ctx.needs_input_grad[1] else None
        ctx.backward_pass.wait_for(ctx.offset_s)
        return grad, gradient, None, None


def _at_pace_of(profile: Profile, rank: int | None) -> Profile:
    own = next((times for times in profile.ranks if times.rank == rank), None)
    if own is None:
        return profile
    pace = own.backward_s / profile.backward_s if profile.backward_s else 1.0
    gradients = tuple(msgspec.structs.replace(g, ready_s=g.ready_s * pace) for g in profile.gradients)
    return msgspec.structs.replace(
        profile, gradients=gradients, forward_s=own.forward_s, backward_s=own.backward_s, update_s=own.update_s
    )


def _start(x: Tensor, backward: _Backward) -> Tensor:
    return _Start.apply(x, backward)  # type: ignore[no-any-return, no-untyped-call]


def _until(x: Tensor, parameter: Tensor | None, backward: _Backward, offset_s: float) -> Tensor:
    return _Until.apply(x, parameter, backward, offset_s)  # type: ignore[no-any-return, no-untyped-call]


def _sleep_until(deadline_s: float) -> None:
    """Never returns early. Sleeping releases the interpreter to the threads that communicate."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        time.sleep(left_s)


def _add_parameter(root: nn.Module, name: str, value: Tensor) -> str:
    """Registers a parameter under its dotted name, making the modules on the way."""
    *path, last = name.split(".")
    module = root
    try:
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(value))
    except (AttributeError, KeyError) as error:
        raise UsageError(f"no module can hold a parameter called {name} beside the others of the profile") from error
    return name
