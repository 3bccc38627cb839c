"""Helpers that commands share: check options, make clusters and process groups from them, and report errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import typer

from syncline import startup
from syncline.cli.commands import ClusterOptions
from syncline.cluster import ClusterSpec, RankFailedError, parse_per_host, parse_rate
from syncline.errors import ClusterError, SynclineError, UsageError, first_line
from syncline.records.profile import Profile, load_profile

_JOINING = timedelta(minutes=10)  # timeout for all ranks to join the process group


def cluster_spec(cluster: ClusterOptions) -> ClusterSpec:
    """Return the cluster that these options describe; raise `UsageError` if they do not describe one."""
    # Not torch.cuda.is_available(): a process that has called it cannot fork ranks that use CUDA.
    if cluster.device == "cuda" and torch.version.cuda is None:
        raise UsageError("--device cuda: this torch was built without CUDA: use cpu, or install a build with CUDA")
    return ClusterSpec(
        hosts=cluster.hosts,
        per_host=parse_per_host(cluster.per_host, cluster.hosts),
        rate_bps=parse_rate(cluster.rate),
        racks=cluster.racks,
        trunk_rate_bps=None if cluster.trunk_rate is None else parse_rate(cluster.trunk_rate),
        rank_order=cluster.rank_order,
        device=cluster.device,
    )


def scaled_profile(name: str, scale: str) -> Profile:
    """Load a profile and multiply its times and sizes by the factors in `scale`, as in `"10,0.05"`."""
    try:
        time_scale, size_scale = (float(part) for part in scale.split(","))
        if not (0 < time_scale < 1e6 and 0 < size_scale <= 1000):
            raise ValueError
    except ValueError:
        raise UsageError(f"--scale {scale!r}: write two positive numbers, for times and sizes, like 10,0.05") from None
    return load_profile(name).scaled(time=time_scale, bytes=size_scale)


def split(text: str) -> list[str]:
    """Split a list of names that are separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def check_positive(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < 1e6:
        raise UsageError(f"{option} {value:g}: must be greater than 0 and less than 1e6")


def check_seconds(option: str, seconds: float) -> None:
    if not 1 <= seconds <= 3600:
        raise UsageError(f"{option} {seconds:g}: must be 1 to 3600 seconds")


def under_torchrun() -> bool:
    """Return whether torchrun, or a similar launcher, has started this process as a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def is_first() -> bool:
    """Return whether this process prints and writes the results: rank 0, or the only process."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def changed(args: Any, *without: str) -> list[str]:
    """Return the options that do not have their default values, as they would be typed."""
    words = []
    for field in msgspec.structs.fields(args):
        value = getattr(args, field.name)
        if value != field.default and field.name not in without:
            words += [f"--{field.name.replace('_', '-')}", *([] if value is True else [f"{value}"])]
    return words


def local_device(name: str) -> torch.device:
    """Return the device of this process. Under torchrun, each rank of a host has its own GPU."""
    if name not in ("cpu", "cuda"):
        raise UsageError(f"--device {name!r}: use cpu or cuda")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU on this machine: use cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextlib.contextmanager
def torchrun_group(device: str) -> Iterator[None]:
    """Make the default process group of the ranks that torchrun has started."""
    where = local_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    try:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_JOINING)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the ranks that torchrun started could not connect: {first_line(error)}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def one_line_errors(command: str) -> Iterator[None]:
    """Print a `SynclineError` as one line and exit with 2 (wrong use) or 1; exit with 130 after Ctrl-C.

    An unexpected exception, on this process or on a rank, keeps its traceback.
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
