"""Models with a method of data-parallel training attached, on the ranks of a cluster: Syncline's methods and peers'.

The peers are the real implementations: PyTorch's hooks, `PostLocalSGDOptimizer` and FSDP2; `DiLoCo` of torchft, with
its manager and lighthouse, over gloo; and `OnebitAdam` of DeepSpeed, with its `CompressedBackend`, over gloo.

A method's name may end in `:warmN`, for a warm-up of N % of the steps, and in `xF`, for F times the steps, with a
schedule of that length. The names:

- `ddp`; `fp16-hook`; `powersgd-R` of rank R; `post-local-H`, which averages weights every H steps; `diloco-H`, of
  torchft, with an exchange every H steps; `1-bit-adam`. Their warm-ups, and PowerSGD's first steps, are plain DDP.
- an exchange of `syncline.exchange.EXCHANGES`, such as `bf16`, `int4` or `hierarchical+int4`.
- `oktopk-updates`, and `local-H` for updates every H steps; with `-late`, they are applied a step later; with
  `hierarchical+` before it, they are summed inside hosts first. `outer-H` exchanges dense updates with an outer
  Nesterov step. Warm-ups exchange gradients in 4 bits.
- `fsdp` and `hsdp` are PyTorch's FSDP2 among all ranks, and with replicas; `fsdp+EXCHANGE`, `hsdp+EXCHANGE` and
  `hsdp+local-H` with Syncline.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import peers
import syncline
from syncline.bench.sharded import shard_model
from syncline.cluster import Rank
from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, Exchange, Hierarchical
from syncline.records.network import Network

ONE_BUCKET_MB = 1000  # PowerSGD fails on gloo with more than one bucket
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""The outer optimizer of DiLoCo, with the settings of its paper."""
MakeOptimizer = Callable[[Any], Optimizer]


@dataclass(frozen=True)
class Method:
    """A method with its warm-up and its length, as its name says."""

    base: str
    warm_share: float
    factor: float

    @classmethod
    def named(cls, name: str, share: float) -> Method:
        """Parse a name. `share` is the warm-up's share of the steps if the name has none."""
        match = re.fullmatch(r"(.+?)(?::warm(\d+))?(?:x(\d+(?:\.\d+)?))?", name)
        assert match is not None
        warm = share if match[2] is None else int(match[2]) / 100
        return cls(match[1], warm, float(match[3] or 1))

    @property
    def number(self) -> int:
        """The number in the method's name: a rank or a period."""
        return next(int(part) for part in self.base.split("-") if part.isdigit())

    @property
    def warm_method(self) -> str | None:
        """The method of the warm-up, or None without one."""
        if self.base.startswith(("powersgd", "post-local", "diloco", "1-bit-adam")):
            return "ddp"
        inside, _, what = self.base.rpartition("+")
        if what == "oktopk-updates" or what.startswith(("local", "outer")):
            return f"{inside}+int4" if inside else "int4"
        return None

    @property
    def period(self) -> int:
        """The number of steps in which everything is exchanged once."""
        return self.number if self.base.rpartition("+")[2].startswith(("post-local", "diloco", "local", "outer")) else 1

    def warmup(self, steps: int) -> int:
        return round(self.warm_share * steps) if self.warm_method else 0


class Trainee:
    """A model that is trained by a method, on one rank."""

    def __init__(self, model: Any, optimizer: Any, inner: Optimizer | None = None, clip: float | None = None) -> None:
        self.model, self.optimizer, self.inner, self.clip = model, optimizer, inner or optimizer, clip
        self.handle: syncline.Handle | None = None
        self.synchronises: Callable[[], bool] = lambda: True
        """Whether DDP averages the gradients of the next step."""
        self.after_step: Callable[[], None] = lambda: None
        self.close: Callable[[], None] = lambda: None

    def step(self, loss_of: Callable[[nn.Module], Tensor]) -> None:
        with contextlib.nullcontext() if self.synchronises() else self.model.no_sync():
            loss = loss_of(self.model)
            self.optimizer.zero_grad()
            loss.backward()
        if self.clip is not None:
            if self.handle is not None:
                self.handle.clip_grad_norm_(self.clip)
            else:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.after_step()

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """Return the model to evaluate: with the weights that Syncline's ranks agreed on, or the mean over ranks.

        Collective.
        """
        if not isinstance(self.model, DDP):
            yield self.model
        elif self.handle is not None:
            with self.handle.synced():
                yield self.model.module
        else:
            mean = copy.deepcopy(self.model.module)
            for tensor in mean.state_dict().values():
                if tensor.is_floating_point():
                    dist.all_reduce(tensor.div_(dist.get_world_size()))
            yield mean


def prepare(
    method: Method,
    net: nn.Module,
    optimize: MakeOptimizer,
    rank: Rank,
    *,
    warmup: int = 0,
    clip: float | None = None,
    network: Network | None = None,
) -> Trainee:
    """Build DDP or FSDP2 around a network, and attach a method. Collective.

    Args:
        method: The method.
        net: The network, with the same weights on all ranks.
        optimize: Makes the optimizer of parameters.
        rank: The rank of this process.
        warmup: The number of steps of the warm-up.
        clip: The norm to which gradients are clipped.
        network: The network, for exchanges that choose their paths.
    """
    base = method.base
    if base.startswith(("fsdp", "hsdp")):
        return _sharded(method, net, optimize, rank, warmup, clip)
    if base == "1-bit-adam":
        return _one_bit_adam(net, optimize, rank, warmup, clip)
    ddp = DDP(net, bucket_cap_mb=ONE_BUCKET_MB if base.startswith("powersgd") else 25)
    inner = optimize(ddp.parameters())
    trainee = Trainee(ddp, inner, clip=clip)
    exchange, options = _exchange(method)
    if exchange is not None:
        options |= {"optimizer": inner, "warmup": warmup} if options else {}
        trainee.handle = syncline.attach(ddp, exchange, network=network, **options)
    elif base == "fp16-hook":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif base.startswith("powersgd"):
        state = powerSGD_hook.PowerSGDState(None, method.number, start_powerSGD_iter=max(2, warmup))
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif base.startswith("post-local"):
        alone = [dist.new_group([other]) for other in range(dist.get_world_size())][dist.get_rank()]
        local = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=warmup)
        ddp.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=method.number, warmup_steps=warmup)
        trainee.optimizer = PostLocalSGDOptimizer(inner, averager)
    elif base.startswith("diloco"):
        _start_diloco(trainee, method.number, rank, warmup)
    elif base != "ddp":
        raise UsageError(f"no method is called {base}; see benchmarks/trainees.py")
    return trainee


def _exchange(method: Method) -> tuple[Exchange | None, dict[str, Any]]:
    """Return Syncline's exchange for a method, with the arguments of `attach` if updates are exchanged."""
    if method.base in EXCHANGES:
        return EXCHANGES[method.base](), {}
    inside, _, what = method.base.rpartition("+")
    exchange: Exchange
    if what == "oktopk-updates":
        exchange, options = syncline.OkTopk(density=0.01), {"every": 1}
    elif what.startswith("local"):
        options = {"every": method.number, "delay": int(what.endswith("-late"))}
        exchange = syncline.ChunkedTopk(density=0.03)
    elif what.startswith("outer"):
        exchange, options = syncline.Dense(), {"every": method.number, "outer": syncline.Nesterov()}
    else:
        return None, {}
    return (Hierarchical(across=exchange) if inside == "hierarchical" else exchange), options


def _sharded(
    method: Method, net: nn.Module, optimize: MakeOptimizer, rank: Rank, warmup: int, clip: float | None
) -> Trainee:
    kind, _, what = method.base.partition("+")
    per_host = rank.spec.per_host[0]
    model, between = shard_model(net, torch.device("cpu"), per_host, native=not what, replicas=kind == "hsdp")
    inner = optimize(model.parameters())
    trainee = Trainee(model, inner, clip=clip)
    if what:
        exchange, options = _exchange(Method(what, method.warm_share, method.factor))
        options |= {"optimizer": inner, "warmup": warmup} if options else {}
        trainee.handle = syncline.attach(model, exchange, replicate=between, **options)
    return trainee


def _start_diloco(trainee: Trainee, every: int, rank: Rank, warmup: int) -> None:
    """Let torchft's DiLoCo take over after the warm-up."""
    taken, context, manager = 0, contextlib.ExitStack(), peers.torchft_manager(rank)

    def start() -> None:
        from torchft.local_sgd import DiLoCo

        net = trainee.model.module
        outer = torch.optim.SGD(net.parameters(), **OUTER)
        context.enter_context(DiLoCo(manager, [net], trainee.inner, outer, sync_every=every, use_bucketization=True))

    def after_step() -> None:
        nonlocal taken
        taken += 1
        if taken == warmup:
            start()

    def close() -> None:
        context.close()
        manager.shutdown(wait=False)

    if not warmup:
        start()
    trainee.synchronises, trainee.after_step, trainee.close = lambda: taken < warmup, after_step, close


def _one_bit_adam(net: nn.Module, optimize: MakeOptimizer, rank: Rank, warmup: int, clip: float | None) -> Trainee:
    """Give DeepSpeed's OnebitAdam all weights as one flat parameter, as DeepSpeed's engine does."""
    ddp = DDP(net)
    parameters = list(ddp.parameters())
    flat = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    for parameter, part in zip(parameters, flat.detach().split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
    usual = optimize([flat]).param_groups[0]
    optimizer, engine = peers.one_bit_adam(flat, usual, rank, freeze_step=max(1, warmup))
    trainee = Trainee(ddp, _Flat(optimizer, flat, parameters), optimizer, clip=clip)
    trainee.synchronises = lambda: engine.enable_backward_allreduce
    flat.grad = torch.zeros_like(flat)
    optimizer.step()  # the first one only allocates buffers
    return trainee


@dataclass(frozen=True)
class _Flat:
    """An optimizer of one flat parameter, whose parts are the parameters of a model."""

    optimizer: Optimizer
    flat: nn.Parameter
    parameters: list[nn.Parameter]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        self.flat.grad = torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])
        self.optimizer.step()
