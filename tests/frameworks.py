"""Helpers for the tests of frameworks: ranks as torchrun starts them, real digits, a small net and a plan for it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch._dynamo  # DDP imports it, and that takes seconds: once here, not in every rank
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import made_up
from syncline.cluster import ClusterSpec, Rank, launch
from syncline.models.data import digits
from syncline.records.plan import Plan, PlannedBucket, PlannedGradient, Where

EXAMPLES = Path(__file__).parents[1] / "examples"
TIMEOUT_S = 30.0


def on_torchrun_ranks(main: Callable[[Rank], Any], ranks: int = 2, *, group: bool = True) -> list[Any]:
    """Return what `main` returns on each rank of one host; an error of any rank is raised. With `group`, the ranks have
    a process group before `main`, which frameworks then use."""

    def started(rank: Rank) -> Any:
        os.environ["GROUP_RANK"] = "0"  # tells Lightning that torchrun started it
        if group:
            rank.init_process_group(TIMEOUT_S)
        return main(rank)

    return launch(ClusterSpec(hosts=1, per_host=(ranks,)), started, shaped=False, deadline_s=90.0)


def images(count: int) -> TensorDataset:
    data = digits()
    return TensorDataset(data.train_images[:count], data.train_labels[:count])


def small_net() -> nn.Sequential:
    """Return a net with twice as many parameters as a sparse exchange needs to send anything sparsely."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Tanh(), nn.Linear(16, 10))


def sparse_plan(net: nn.Module) -> Plan:
    """Return a plan that tuning might have found: one bucket, on two ranks of one host."""
    trained = list(net.named_parameters())[::-1]
    gradients = tuple(PlannedGradient(name=name, shape=tuple(p.shape), dtype="float32") for name, p in trained)
    exchange = {"type": "OkTopk", "density": 0.05, "values": "bf16", "warmup": 0, "momentum": 0.0}
    buckets = (PlannedBucket(parameters=tuple(name for name, _ in trained), lane=0, exchange=exchange),)
    where = Where(host_of_rank=(0, 0), backend="gloo", device="cpu")
    return made_up.plan(gradients, buckets, where, exchange_s=10.0)


def fingerprint(model: nn.Module) -> str:
    """Return a digest of the weights."""
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().numpy().tobytes())
    return whole.hexdigest()


def states_in(folder: Path) -> dict[str, Any]:
    """Return the metadata of each rank's file in a checkpoint, with the checksums of all tensors."""
    return {path.name: safetensors.safe_open(str(path), framework="pt").metadata() for path in folder.iterdir()}


def distance(one: nn.Module, other: nn.Module) -> float:
    def flat(model: nn.Module) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    return float((flat(one) - flat(other)).abs().max())


SHARES = (20, 12)
"""Unequal batches of two ranks, for `large_batches`."""


def large_batches(size: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of both ranks together, in the order in which `Shares.sampler` deals them."""
    pixels, labels = images(size).tensors
    for epoch in range(epochs):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(epoch))
        for indices in order.split(sum(SHARES)):
            yield pixels[indices], labels[indices]


def trained_on_large_batches(size: int, epochs: int) -> nn.Module:
    """Return a small net that one process has trained on `large_batches`."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for pixels, labels in large_batches(size, epochs):
        optimizer.zero_grad()
        F.cross_entropy(net(pixels), labels).backward()
        optimizer.step()
    return net


@contextlib.contextmanager
def said() -> Any:
    """Capture what Syncline prints."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        yield text


def run_example(name: str, *arguments: str) -> str:
    """Run an example in forked ranks and return its last line. Forking saves importing the frameworks again."""

    def main(rank: Rank) -> str:
        sys.argv = [name, *arguments]
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return text.getvalue()

    first, *others = on_torchrun_ranks(main, group=False)
    assert not any(others), "only rank 0 prints"
    return str(first).splitlines()[-1]


def type_example(name: str, *arguments: str) -> str:
    """Run an example as a user would type it, and return its last line."""
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [str(torchrun), "--standalone", "--nproc-per-node", "2", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
