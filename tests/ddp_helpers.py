"""Ranks over real gloo, small models, and the comparison of an attached model with plain DDP."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch._dynamo  # DDP imports it, and that takes seconds: once here, not in every rank
import torch.distributed as dist
import torch.distributed.run as torch_run
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.cluster.processes import fork

TIMEOUT_S = 30.0
SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.001}
"""About a kilobyte, so that a small model has several buckets."""


@dataclass(frozen=True)
class Way:
    """One way to attach."""

    exchange: syncline.Exchange
    lanes: int = 1
    error: float = 0.0
    """How far gradients may be from plain DDP's, as a part of the largest; 0 means bit-equal."""


EXACT = (Way(syncline.Dense()), Way(syncline.Dense(), lanes=2))
LOSSY = (Way(syncline.Dense(wire="bf16"), error=0.02), Way(syncline.Dense(wire="fp16"), lanes=2, error=0.004))
WAYS = (*EXACT, *LOSSY)


def on_ranks(
    ranks: int, main: Callable[[Rank], Any], *, timeout_s: float = TIMEOUT_S, deadline_s: float = 90.0
) -> list[Any]:
    """What `main` returns on each of `ranks` processes that have a process group; any rank's error is raised."""

    def started(rank: Rank) -> Any:
        rank.init_process_group(timeout_s)
        return main(rank)

    return launch(ClusterSpec(hosts=ranks), started, shaped=False, deadline_s=deadline_s)


def forked_torchrun(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run torchrun on two ranks, in `folder`, as a fork of this process that forks its ranks: none imports torch again.

    Args:
        folder: The working directory. Output and errors are written to files in another one beside it.
        arguments: Further options of torchrun, the script, and its arguments.
        environment: Further environment variables.

    Returns:
        The exit status, the output and the errors.
    """
    written = folder.with_name(f"{folder.name}-torchrun")
    written.mkdir()

    def main() -> int:
        os.setsid()
        os.chdir(folder)
        os.environ |= {"OMP_NUM_THREADS": "1", **environment}
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(written / name, os.O_WRONLY | os.O_CREAT), descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w", buffering=1))
        torch_run.main(["--standalone", "--nproc-per-node=2", "--run-path", "--start-method=fork", *arguments])
        return 0

    launcher = psutil.Process(fork(main))
    try:
        status = launcher.wait(90)
    except BaseException:
        os.killpg(launcher.pid, signal.SIGKILL)
        raise
    return status, (written / "stdout").read_text(), (written / "stderr").read_text()


class Mlp(nn.Module):
    """Its layers run in another order than they are defined in, so that DDP's buckets change after the first step."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, 4)
        self.first = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make()


def batch(rank: int, step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*(shape or (8, 16)), generator=generator)


@dataclass
class Trained:
    """What a training run left behind."""

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    """After each step, by parameter."""
    final: dict[str, Tensor] = field(default_factory=dict)
    """The model's parameters and buffers at the end."""


Step = Callable[[nn.Module, torch.optim.Optimizer, int], None]
"""Runs the step of a number: forward, backward, update."""


def train(model: nn.Module, step: Step, steps: int) -> Trained:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    trained = Trained()
    for number in range(steps):
        optimizer.zero_grad()
        step(model, optimizer, number)
        trained.gradients.append(gradients(model))
    trained.final = copy.deepcopy(model.state_dict())
    return trained


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()
    }


def assert_trains_like_plain_ddp(
    make: Callable[[], nn.Module], step: Step, *, steps: int = 4, ways: Sequence[Way] = WAYS, **options: Any
) -> Trained:
    """Runs the same steps on plain DDP and, from the same start, every way; compares every gradient of every step.

    Returns plain DDP's run, for what else there is to say about it.
    """
    options = {**SMALL_BUCKETS, **options}
    plain = train(DDP(seeded(make), **options), step, steps)
    for way in ways:
        model = DDP(seeded(make), **options)
        handle = syncline.attach(model, way.exchange, lanes=way.lanes)
        assert_alike(train(model, step, steps), plain, way)
        handle.detach()
    return plain


def assert_alike(trained: Trained, plain: Trained, way: Way) -> None:
    assert len(trained.gradients) == len(plain.gradients)
    for number, (mine, theirs) in enumerate(zip(trained.gradients, plain.gradients, strict=True)):
        _assert_close(mine, theirs, way, f"{way}, gradients of step {number}")
    _assert_close(trained.final, plain.final, way, f"{way}, at the end")


def _assert_close(mine: dict[str, Any], theirs: dict[str, Any], way: Way, where: str) -> None:
    assert mine.keys() == theirs.keys(), where
    largest = max((float(t.abs().max()) for t in theirs.values() if t is not None), default=0.0)
    for name, their in theirs.items():
        my = mine[name]
        if their is None or my is None:
            assert my is their, f"{where}: {name} is {my}, plain DDP has {their}"
        elif way.error == 0.0:
            assert torch.equal(my, their), f"{where}: {name} is not bit-equal, off by {(my - their).abs().max()}"
        else:
            off = float((my - their).abs().max())
            assert off <= way.error * largest, f"{where}: {name} is off by {off}, the largest is {largest}"


def square_loss_step(rank: Rank) -> Step:
    """The plainest step: the mean square of the output on this rank's own batch."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        model(batch(rank.rank, number)).square().mean().backward()
        optimizer.step()

    return step


def refusal(action: Callable[[], Any], error: type[Exception] = syncline.UsageError) -> str:
    """The one line with which `action` is refused."""
    try:
        action()
    except error as refused:
        text = str(refused)
        assert "\n" not in text and text, text
        return text
    raise AssertionError(f"nothing was raised where {error.__name__} was expected")


class Branches(nn.Module):
    """A trunk and three heads, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.trunk(x)))


def branch_step(rank: Rank) -> Step:
    """Ranks use different heads of `Branches`; the third is nobody's."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        head = (rank.rank + number // 2) % 2
        model(batch(rank.rank, number), head).square().mean().backward()
        optimizer.step()

    return step


class MixedTypes(nn.Module):
    """Layers of several types: DDP gives each type buckets of its own."""

    def __init__(self, *types: torch.dtype) -> None:
        super().__init__()
        types = types or (torch.float32, torch.bfloat16, torch.float16, torch.float32)
        self.layers = nn.ModuleList([nn.Linear(16, 16, dtype=dtype) for dtype in types])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()


class Images(nn.Module):
    """Convolutions with batch normalisation, in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.norm(self.first(x))))


def image_step(rank: Rank) -> Step:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        images = batch(rank.rank, number, 4, 3, 8, 8).to(memory_format=torch.channels_last)
        model(images * (1 + rank.rank)).square().mean().backward()
        optimizer.step()

    return step


def open_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def native_threads() -> int:
    """Gloo's own among them, which Python does not see, but not the heartbeat's, which live as long as the group."""
    heartbeats = [
        thread for thread in threading.enumerate() if thread.name in ("syncline-heartbeat", "syncline-watchdog")
    ]
    return len(list(Path("/proc/self/task").iterdir())) - len(heartbeats)


def assert_back_to(groups: int, threads: int) -> None:
    """A thread that was joined may take the kernel a moment longer to remove; one that leaked stays for good."""
    end = time.monotonic() + 10
    while time.monotonic() < end and native_threads() > threads:
        os.sched_yield()
    assert (open_groups(), native_threads()) == (groups, threads)
