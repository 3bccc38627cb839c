"""What commands have in common: clusters, devices and process groups made of options, and errors in one line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import typer

from syncline import startup
from syncline.cli.commands.common import ClusterOptions
from syncline.cluster import ClusterSpec, RankFailedError, parse_per_host, parse_rate
from syncline.errors import ClusterError, SynclineError, UsageError, first_line

_JOINING = timedelta(minutes=10)
"""How long ranks wait for each other."""


def cluster_spec(cluster: ClusterOptions) -> ClusterSpec:
    """The cluster that these options describe, or a `UsageError`."""
    if (
        cluster.device == "cuda" and torch.version.cuda is None
    ):  # asking for a GPU would keep CUDA from ranks that are forked
        raise UsageError("--device cuda: this torch was built without CUDA: use cpu, or install another build")
    return ClusterSpec(
        hosts=cluster.hosts,
        per_host=parse_per_host(cluster.per_host, cluster.hosts),
        rate_bps=parse_rate(cluster.rate),
        racks=cluster.racks,
        trunk_rate_bps=None if cluster.trunk_rate is None else parse_rate(cluster.trunk_rate),
        rank_order=cluster.rank_order,
        device=cluster.device,
    )


def scales(text: str) -> tuple[float, float]:
    """`"10,0.05"` → factors for a profile's times and sizes."""
    try:
        time_scale, size_scale = (float(part) for part in text.split(","))
        if not (0 < time_scale < 1e6 and 0 < size_scale <= 1000):
            raise ValueError
    except ValueError:
        raise UsageError(f"--scale {text!r}: write two positive numbers, for times and sizes, like 10,0.05") from None
    return time_scale, size_scale


def under_torchrun() -> bool:
    """Whether this process is one of several ranks already."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def is_first() -> bool:
    """Whether this process is the one that speaks and writes."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def refuse_cluster_options(context: typer.Context) -> None:
    """Under torchrun: the cluster is there, and an option that describes another would be ignored without a word."""
    describing = ("hosts", "per_host", "rate", "racks", "trunk_rate", "rank_order")
    for name in describing:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} describes an emulated cluster, and torchrun has started a real one: omit it")


def local_device(name: str) -> torch.device:
    """This process's own device; under torchrun each rank of a host has another GPU."""
    if name not in ("cpu", "cuda"):
        raise UsageError(f"--device {name!r}: use cpu or cuda")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here: use cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextlib.contextmanager
def torchrun_group(device: str) -> Iterator[None]:
    """The default process group of the ranks that torchrun has started."""
    where = local_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    try:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_JOINING)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the ranks that torchrun started did not meet: {first_line(error)}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def one_line_errors(command: str) -> Iterator[None]:
    """Around a command's work: what Syncline raises on purpose becomes one line, and 2 (wrong use) or 1; Ctrl-C is 130.

    Only a rank that fails in a way nobody foresaw keeps its traceback.
    """
    startup.end()
    try:
        yield
    except SynclineError as error:
        typer.echo(f"{command}: {error}", err=True)
        wrong_use = isinstance(error, (UsageError, ClusterError)) and not isinstance(error, RankFailedError)
        raise typer.Exit(2 if wrong_use else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
