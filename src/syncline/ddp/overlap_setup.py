"""Check the arguments of an exchange that overlaps with the next forward pass, choose its buckets, and create it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from syncline.ddp import reducer
from syncline.ddp.engine import Engine
from syncline.ddp.overlapping import Overlapping, OverlapPolicy
from syncline.ddp.reducer import Reduction
from syncline.dist.agreement import current_device
from syncline.dist.comm import gather_bytes
from syncline.errors import UsageError
from syncline.exchange import Dense, Exchange, Hierarchical, Quantized
from syncline.exchange.hierarchical_halves import levels_of
from syncline.exchange.lossy_halves import GATHERS
from syncline.health.meeting import meeting, same_on_all_ranks
from syncline.overlap.engine import OverlapEngine
from syncline.overlap.shards import check_elementwise
from syncline.predict.bucket_size import best_overlap
from syncline.records.profile import Profile
from syncline.runtime.bucket_policy import Uniform
from syncline.runtime.topology import NetworkOrFile, RankTopology, loaded_from, read_network
from syncline.runtime.validation import ddp_of, only_device, parameters_of


def check_overlap(
    model: nn.Module, exchange: Exchange, overlap: Any, gather: Any, optimizer: Any, lanes: int, no_updates: bool
) -> None:
    """Raise if an argument does not fit an exchange that overlaps with the next forward pass."""
    for problem, is_there in {
        f"overlap is {overlap!r}: it must be 'forward', or left out": overlap != "forward",
        f"overlap='forward' exchanges through Dense, Quantized or Hierarchical, not {exchange!r}: leave one out": (
            not isinstance(exchange, Dense | Quantized | Hierarchical)
        ),
        "overlap='forward' with Hierarchical needs within=Dense() and across=Dense(), and no gather=": (
            isinstance(exchange, Hierarchical)
            and not (exchange.lossless and exchange.across == Dense() and gather == "fp32")
        ),
        "overlap='forward' would lose residuals of unused parameters: build DDP without find_unused_parameters, or use "
        "Dense()": exchange.keeps and ddp_of(model).find_unused_parameters,
        "overlap='forward' steps the optimizer on shards of the weights: pass optimizer=optimizer": optimizer is None,
        f"gather is {gather!r}: it must be one of {', '.join(GATHERS)}": gather not in GATHERS,
        "every, warmup, delay and outer are for updates: leave them out with overlap='forward'": not no_updates,
        "overlap='forward' has one lane: leave lanes out": lanes != 1,
    }.items():
        if is_there:
            raise UsageError(problem)
    if (why_not := why_not_overlap(model)) is not None:
        raise UsageError(why_not)


def why_not_overlap(model: nn.Module, optimizer: Optimizer | None = None) -> str | None:
    """Return why a model, or its optimizer, cannot overlap with the next forward pass, or None if it can."""
    ddp = ddp_of(model)
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in ddp.modules())
    for problem, is_there in {
        "overlap='forward' cannot watch a compiled DDP model: compile the module inside DDP": (
            model is not ddp or ddp._compiled_call_impl is not None
        ),
        "overlap='forward' does not support TorchScript modules: use the modules themselves": scripted,
        "overlap='forward' needs all buckets in every step: build DDP without skip_all_reduce_unused_params": (
            getattr(ddp, "skip_all_reduce_unused_params", False)
        ),
    }.items():
        if is_there:
            return problem
    try:
        if optimizer is not None:
            check_elementwise(optimizer)
    except UsageError as error:
        return str(error)
    return None


def with_best_caps(ddp: DDP, policy: OverlapPolicy, profile: Any, network: NetworkOrFile) -> OverlapPolicy:
    """Collective: return the policy with the best sizes of buckets, or without any if the model's own are best."""
    parameters = {name: parameter for name, parameter in parameters_of(ddp).items() if parameter.requires_grad}
    group, device = ddp.process_group, only_device(parameters)
    with same_on_all_ranks(group, device, "the size of buckets", "attach") as fields:
        if (problem := reducer.why_not_change(ddp)) is not None:
            raise UsageError(f"profile= changes the buckets of the model, but {problem}: leave it out")
        links, own = read_network(network, fields), reducer.own_caps(ddp)
        loaded: Profile = loaded_from("profile", profile, Profile)
        if links is None:
            raise UsageError("the size of buckets depends on the links: pass network= with profile=")
        if {gradient.name: gradient.bytes for gradient in loaded.gradients} != {
            name: parameter.nbytes for name, parameter in parameters.items()
        }:
            raise UsageError("the profile is of another model: make one of this model with `syncline profile`")
        _, caps = best_overlap(loaded, links, caps=own, exchange=policy.exchange, gather=policy.gather)
    with current_device(device), meeting(group, "attach"):
        caps = tuple(json.loads(gather_bytes(group, json.dumps(caps).encode())[0]))  # the choice of the first rank
    return policy if caps == own else replace(policy, caps=caps)


def make_overlapping(
    ddp: DDP,
    policy: OverlapPolicy,
    optimizer: Optimizer,
    make_engine: Callable[..., Engine],
    reduction: Reduction,
    timeout: timedelta,
    topology: RankTopology | None,
    scale: Callable[[], Tensor | None],
) -> Overlapping:
    """Collective: create what overlaps with the next forward pass, and the engine of its first steps."""
    engine = OverlapEngine(
        ddp.process_group,
        parameters_of(ddp),
        optimizer,
        timeout,
        ddp.gradient_as_bucket_view,
        policy.exchange,
        policy.gather,
        scale,
        topology,
    )
    try:
        if isinstance(policy.exchange, Hierarchical) and topology is not None:
            levels_of(topology.topology)  # raises if groups have different sizes
        warm = make_engine(policy=Uniform(policy.exchange if policy.exchange.lossless else Dense(), 1))
    except BaseException:
        engine.close()
        raise
    return Overlapping(ddp, engine, warm, optimizer, policy, reduction, topology)
