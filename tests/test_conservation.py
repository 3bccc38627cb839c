"""Nothing is lost on the way through a model that trains: what was applied plus what is kept is what came in.

The laws check this on flat buckets. Here it is checked on weights, through DDP and through `Layerwise`, on real ranks:
over sequences of steps that use some parameters and not others, are skipped by a GradScaler, accumulate under
`no_sync`, go in other buckets than before, and are interrupted by checkpoints; with parameters that lie oddly in
memory; and with plans that mix exchanges.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from ddp_helpers import on_ranks
from syncline.cluster import Rank
from syncline.dist.comm import gather_bytes
from syncline.exchange import EXCHANGES, Exchange, Hierarchical, OkTopk, Quantized
from syncline.exchange import settings as exchange_settings
from syncline.records.plan import Plan, PlannedBucket, PlannedGradient, Where

HOSTS = ((0, 1), (2, 3))


def variants() -> dict[str, Exchange]:
    """Every exchange there is, in settings that send little of buckets as small as these."""
    sparse = {"density": 0.05}
    made: dict[str, Exchange] = {}
    for name, make in EXCHANGES.items():
        exchange = make()
        if isinstance(exchange, Hierarchical):
            across = OkTopk(**sparse) if isinstance(exchange.across, OkTopk) else exchange.across
            shape = "leader" if across.keeps else "sharded"
            made[name] = Hierarchical(across=across, levels=HOSTS, shape=shape, chunks=2)
        else:
            made[name] = exchange if not hasattr(exchange, "density") else type(exchange)(**sparse)
    made["oktopk, fp32"] = OkTopk(**sparse, values="fp32")
    made["oktopk after a warm-up"] = OkTopk(**sparse, warmup=2)
    return made


VARIANTS = variants()


def ranks_of(name: str) -> int:
    """Four ranks on two hosts, or two ranks. Averages over a power of two are exact, so that only an exchange's own
    rounding is left."""
    return 4 if isinstance(VARIANTS[name], Hierarchical) else 2


def is_exact(exchange: Exchange) -> bool:
    """Whether whole numbers are conserved exactly. Scales of `Quantized` are no powers of two, so its residual has more
    digits in every step, until fp32 rounds it."""
    quantized = isinstance(getattr(exchange, "across", exchange), Quantized)
    return exchange.lossless or (exchange.keeps and not quantized)


class Numbers(nn.Module):
    """Its gradients are the whole numbers that it is given, so that sums are exact."""

    SHAPES: ClassVar[dict[str, tuple[int, ...]]] = {
        "plain": (70, 16),
        "small": (40,),
        "channels_last": (24, 4, 5, 5),
        "transposed": (30, 50),
        "strided": (32, 25),
        "scalar": (),
    }

    def __init__(self, dense_only: bool) -> None:
        super().__init__()
        for name, shape in self.SHAPES.items():
            data = torch.zeros(shape)
            if name == "channels_last":
                data = data.to(memory_format=torch.channels_last)
            elif name == "transposed":
                data = torch.zeros(shape[::-1]).t()
            elif name == "strided" and not dense_only:
                data = torch.zeros(shape[0], 2 * shape[1])[:, ::2]
            self.register_parameter(name, nn.Parameter(data))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        total = torch.zeros(())
        for name in reversed(gradients):  # gradients become ready in another order than parameters are defined in
            total = total + (getattr(self, name) * gradients[name]).sum()
        return total


class Step(msgspec.Struct):
    """One step of a sequence."""

    used: list[list[str]]
    """By rank, the parameters that it uses."""
    accumulated: list[list[str]] = []
    """The same of a backward pass under `no_sync` before it; empty for none."""
    infinite: str | None = None
    """A parameter for which one rank's gradient is infinite."""
    then: str = ""
    """`reload` the state afterwards, or `restart` from it with a new model."""


class Sequence(msgspec.Struct):
    exchanges: list[str]
    """One for all buckets, or those of a plan's."""
    host: str
    """`ddp`, or `layerwise`."""
    options: dict[str, bool]
    lanes: int
    scaled: bool
    seed: int
    steps: list[Step]

    @property
    def ranks(self) -> int:
        return ranks_of(self.exchanges[0])


def whole_numbers(sequence: Sequence, rank: int, number: int, which: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(sequence.seed + 1000 * number + 10 * rank + which)
    return {
        name: torch.randint(-2000, 2000, shape, generator=generator).float() for name, shape in Numbers.SHAPES.items()
    }


@dataclass
class Books:
    """What came in, in all, and how far it may be from what was applied and kept."""

    came_in: dict[str, Tensor]
    allowed: dict[str, Tensor]

    @classmethod
    def empty(cls) -> Books:
        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in Numbers.SHAPES.items()}
        return cls(zeros, {name: tensor.clone() for name, tensor in zeros.items()})

    def add(self, sequence: Sequence, number: int, step: Step) -> None:
        bounds = [VARIANTS[name].rounding(torch.float32, sequence.ranks) for name in sequence.exchanges]
        exact = all(is_exact(VARIANTS[name]) for name in sequence.exchanges)
        for which, used in enumerate((step.used, step.accumulated)):
            for rank, names in enumerate(used):
                drawn = whole_numbers(sequence, rank, number, which)
                largest = max(float(tensor.abs().max()) for tensor in drawn.values())
                for name in names:
                    self.came_in[name] += drawn[name].double() / sequence.ranks
                    if not exact:
                        for bound in bounds:
                            self.allowed[name] += bound.of_sum * drawn[name].double().abs()
                            self.allowed[name] += bound.of_largest * largest + bound.absolute

    def wrong(self, model: Numbers, kept: dict[str, dict[str, Tensor]]) -> list[str]:
        """Collective: parameters of which something was lost or applied twice."""
        mine = [
            (torch.zeros(shape) + kept.get(name, {}).get("residual", 0.0)).view(-1)
            for name, shape in Numbers.SHAPES.items()
        ]
        flat = torch.cat(mine)
        dist.all_reduce(flat)
        residuals = dict(zip(Numbers.SHAPES, flat.split([part.numel() for part in mine]), strict=True))
        wrong = []
        for name, parameter in model.named_parameters():
            residual = residuals[name].view(parameter.shape)
            off = (self.came_in[name] + parameter.detach().double() - residual.double()).abs()
            if bool((off > self.allowed[name]).any()):
                wrong.append(f"{name}: off by {float(off.max())}, allowed {float(self.allowed[name].max())}")
        return wrong


def planned(sequence: Sequence, net: nn.Module) -> Plan:
    """A plan by hand: buckets of one or two parameters, each through one of the sequence's exchanges."""
    names = list(dict(net.named_parameters()))
    order = names if not sequence.options.get("find_unused_parameters") else names[::-1]
    draw = random.Random(sequence.seed)
    buckets: list[list[str]] = []
    for name in order:
        if buckets and len(buckets[-1]) < 2 and draw.random() < 0.5:
            buckets[-1].append(name)
        else:
            buckets.append([name])
    chosen = [draw.choice(sequence.exchanges) for _ in buckets]
    return Plan(
        model="numbers",
        gradients=tuple(
            PlannedGradient(name=name, shape=Numbers.SHAPES[name], dtype="float32")
            for names in buckets
            for name in names
        ),
        where=Where(host_of_rank=(0,) * sequence.ranks, backend="gloo", device="cpu"),
        buckets=tuple(
            PlannedBucket(
                parameters=tuple(names),
                lane=index % sequence.lanes,
                exchange=exchange_settings(VARIANTS[name]),
            )
            for index, (names, name) in enumerate(zip(buckets, chosen, strict=True))
        ),
        lanes=sequence.lanes,
        iteration_s=1.0,
        low_s=1.0,
        high_s=1.0,
        compute_s=1.0,
        plain_s=2.0,
        exchange_s=1.0,
        reason="by hand",
        alternatives=(),
        how="",
    )


def attached(sequence: Sequence, net: Numbers, scaler: torch.amp.GradScaler) -> tuple[DDP, syncline.Handle]:
    options: dict[str, Any] = dict(sequence.options)
    if len(sequence.exchanges) > 1:
        model = syncline.wrap(net, planned(sequence, net), scaler=scaler, **options)
        return model, syncline.handle_of(model)
    model = DDP(net, bucket_cap_mb=0.008, **options)
    handle = syncline.attach(model, VARIANTS[sequence.exchanges[0]], lanes=sequence.lanes, scaler=scaler)
    return model, handle


def through_ddp(rank: int, sequence: Sequence) -> list[str]:
    """What was lost on the way, step by step."""
    net, books = Numbers(dense_only=False), Books.empty()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=sequence.scaled)
    model, handle = attached(sequence, net, scaler)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    wrong: list[str] = []
    for number, step in enumerate(sequence.steps):
        optimizer.zero_grad(set_to_none=True)
        for which, used in ((1, step.accumulated), (0, step.used)):
            if not used:
                continue
            drawn = whole_numbers(sequence, rank, number, which)
            if step.infinite is not None and which == 0 and rank == 1:
                drawn[step.infinite].view(-1)[0] = float("inf")
            with model.no_sync() if which else contextlib.nullcontext():
                scaler.scale(model({name: drawn[name] for name in used[rank]})).backward()
        scaler.step(optimizer)
        scaler.update()
        if step.infinite is None:
            books.add(sequence, number, step)
        wrong += [f"step {number}, {text}" for text in books.wrong(net, handle.state_dict()["tensors"])]
        if handle.stats().steps != number + 1:
            wrong.append(f"step {number}: the handle counts {handle.stats().steps} steps")
        if step.then == "reload":
            handle.load_state_dict(handle.state_dict())
        elif step.then == "restart":
            state, weights = handle.state_dict(), net.state_dict()
            handle.detach()
            net = Numbers(dense_only=False)
            net.load_state_dict(weights)
            model, handle = attached(sequence, net, scaler)
            handle.load_state_dict(state)
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    handle.detach()
    return wrong


def through_layerwise(rank: int, sequence: Sequence) -> list[str]:
    net, books = Numbers(dense_only=True), Books.empty()

    def made(net: Numbers) -> syncline.Layerwise:
        return syncline.Layerwise(
            net,
            lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            VARIANTS[sequence.exchanges[0]],
            bucket_mb=0.008,
            lanes=sequence.lanes,
            find_unused_parameters=True,
        )

    trainer = made(net)
    wrong: list[str] = []
    for number, step in enumerate(sequence.steps):
        for which, used in ((1, step.accumulated), (0, step.used)):
            if used:
                drawn = whole_numbers(sequence, rank, number, which)
                with trainer.no_sync() if which else contextlib.nullcontext():
                    trainer({name: drawn[name] for name in used[rank]}).backward()
        books.add(sequence, number, step)
        wrong += [f"step {number}, {text}" for text in books.wrong(net, trainer.state_dict()["tensors"])]
        if step.then:
            state = trainer.state_dict()
            if step.then == "restart":
                trainer.close()
                net = Numbers(dense_only=True)
                trainer = made(net)
            trainer.load_state_dict(state)
    trainer.close()
    return wrong


@st.composite
def sequences(draw: st.DrawFn, name: str, host: str) -> Sequence:
    """A sequence of steps through one exchange, or through a plan that has it for some of its buckets."""
    parameters, ranks = sorted(Numbers.SHAPES), ranks_of(name)
    everything = [parameters] * ranks
    options: dict[str, bool] = {}
    if host == "ddp":
        graph = draw(st.sampled_from(["", "find_unused_parameters", "static_graph", "skip_all_reduce_unused_params"]))
        options = {graph: True} if graph else {}
        if graph == "skip_all_reduce_unused_params":
            options["find_unused_parameters"] = True
        options["gradient_as_bucket_view"] = draw(st.booleans())
    subset = st.lists(st.sampled_from(parameters), min_size=1, unique=True)
    free = host == "layerwise" or "find_unused_parameters" in options
    alike = "skip_all_reduce_unused_params" in options
    fixed = draw(subset) if "static_graph" in options else None

    def usage() -> list[list[str]]:
        if fixed is not None:
            return [fixed] * ranks
        if not free:
            return everything
        return [draw(subset)] * ranks if alike else [draw(subset) for _ in range(ranks)]

    scaled = host == "ddp" and draw(st.booleans())
    steps = []
    for _ in range(draw(st.integers(2, 6))):
        step = Step(usage(), then=draw(st.sampled_from(["", "", "", "reload", "restart"])))
        if not alike and fixed is None and draw(st.integers(0, 3)) == 0:
            step.accumulated = usage()
        common = sorted(step.used[1])
        if scaled and draw(st.integers(0, 2)) == 0:
            step.infinite = draw(st.sampled_from(common))
        steps.append(step)
    steps[-1].then = ""  # no step follows that could show a loss
    exchanges = [name]
    if host == "ddp" and not isinstance(VARIANTS[name], Hierarchical) and draw(st.booleans()):
        exchanges.append("dense" if name != "dense" else "oktopk")
    return Sequence(exchanges, host, options, draw(st.integers(1, 2)), scaled, draw(st.integers(0, 10_000)), steps)


def examples_on_ranks(rank: Rank, name: str, host: str, examples: int) -> None:
    """Rank 0 draws sequences, and all ranks run them; on what is wrong with one, hypothesis looks for a shorter one."""
    runs: dict[str, Callable[[int, Sequence], list[str]]] = {"ddp": through_ddp, "layerwise": through_layerwise}

    def on_all(sequence: Sequence | None) -> list[str] | None:
        sent = msgspec.json.encode(sequence) if rank.rank == 0 else b""
        drawn = msgspec.json.decode(gather_bytes(dist.group.WORLD, sent)[0], type=Sequence | None)
        if drawn is None:
            return None
        wrong = runs[host](rank.rank, drawn)
        return msgspec.json.decode(gather_bytes(dist.group.WORLD, msgspec.json.encode(wrong))[0], type=list[str])

    if rank.rank != 0:
        while on_all(None) is not None:
            pass
        return

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=HealthCheck)
    @given(sequences(name, host))
    def nothing_is_lost(sequence: Sequence) -> None:
        wrong = on_all(sequence)
        assert not wrong, (wrong, msgspec.to_builtins(sequence))

    try:
        nothing_is_lost()
    finally:
        on_all(None)


def conserve(host: str, examples: int) -> None:
    def main(rank: Rank) -> None:
        for name in VARIANTS:
            if ranks_of(name) == rank.world_size:
                examples_on_ranks(rank, name, host, examples)

    for ranks in (2, 4):
        on_ranks(ranks, main, deadline_s=55.0)


def test_nothing_is_lost_through_ddp() -> None:
    conserve("ddp", 3)


def test_nothing_is_lost_through_layerwise() -> None:
    conserve("layerwise", 2)
