"""What is here, what works, and what to do about what does not."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata

import msgspec
import psutil
import torch

from syncline._version import __version__
from syncline.cluster import why_not_shaped
from syncline.dist import torchrun
from syncline.doctor import meeting, trials
from syncline.doctor.interfaces import Choice, Interface, gloo_choice, interfaces, nccl_choice
from syncline.doctor.trials import EXTRAS, Finding, Gpu

PREDICT = "syncline predict --profile bert-base-cuda --rate 10gbit --hosts 4,8,64"
"""Needs nothing but the package."""


class Checkup(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = 1
    syncline: str
    python: str
    torch: str
    cuda: str | None
    nccl: str | None
    triton: str | None
    system: str
    cores: int
    memory_bytes: int
    available_bytes: int
    gpus: tuple[Gpu, ...]
    interfaces: tuple[Interface, ...]
    gloo: Choice
    nccl_interfaces: Choice
    extras: dict[str, str | None]
    """Versions of packages; None for those that are not installed."""
    job: dict[str, str]
    """The variables of the job that started this process."""
    meeting: meeting.Meeting | None
    findings: tuple[Finding, ...]
    next: str
    """A command that works here."""

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if one.needed and not one.works)


def examine(wait_s: float = 30.0) -> Checkup | None:
    """Looks and tries; None on ranks other than 0 of a job. `wait_s`: for ranks that torchrun has started."""
    job = meeting.variables()
    first = job.get("RANK", "0") == "0"
    shaped = why_not_shaped() if first else None  # forks: before anything here starts a thread or wakes a GPU
    incomplete = [name for name in meeting.NEEDED if job and name not in job]
    met = meeting.meet(wait_s) if job and not incomplete else None
    if not first and met is None:
        return None
    found = interfaces()
    gloo, nccl = gloo_choice(found), nccl_choice(found)
    gpus = trials.gpus()
    triton = _version("triton")
    extras = {package: _version(package) for package in EXTRAS}
    findings = (
        trials.loopback(),
        *([trials.job(met, incomplete)] if job else []),
        *([trials.restarts()] if torchrun.restarts() else []),
        *([] if met is not None and met.hosts > 1 else [trials.between_hosts(found, gloo)]),
        trials.nccl(gpus, nccl),
        trials.emulation(shaped),
        trials.live_plans(),
        trials.wrapped_plans(),
        trials.private_parts(),
        trials.selection(gpus, triton),
        trials.shared_gpu(gpus),
        trials.digits(extras),
        trials.frameworks(extras),
    )
    memory = psutil.virtual_memory()
    return Checkup(
        syncline=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if trials.has_nccl() else None,
        triton=triton,
        system=f"{platform.system()} {platform.release()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory.total,
        available_bytes=memory.available,
        gpus=gpus,
        interfaces=found,
        gloo=gloo,
        nccl_interfaces=nccl,
        extras=extras,
        job=job,
        meeting=met,
        findings=findings,
        next=_next(findings, shaped is None, extras, met),
    )


def _next(findings: Sequence[Finding], shaped: bool, extras: dict[str, str | None], met: meeting.Meeting | None) -> str:
    """What brings somebody furthest here; without process groups a prediction still does."""
    broken = [one for one in findings if one.needed and not one.works]
    if broken:
        return PREDICT
    if met is not None and met.ranks > 1:
        return "the same torchrun, with: -m syncline probe --output network.json"
    if not shaped:
        return PREDICT
    return "syncline demo" if extras["mlxtend"] is not None else "syncline probe --hosts 4 --rate 200mbit"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
