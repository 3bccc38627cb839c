"""Examine this machine: what is here, what works, and what to do about what does not."""

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
from syncline.doctor import checks, rendezvous
from syncline.doctor.checks import EXTRAS, Finding, Gpu, Machine
from syncline.doctor.interfaces import Choice, Interface, gloo_choice, interfaces, nccl_choice

_PREDICT = "syncline predict --profile bert-base-cuda --rate 10gbit --hosts 4,8,64"
"""A command that works wherever the package is installed."""


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
    """Versions of optional packages; None for those that are not installed."""
    job: dict[str, str]
    """Environment variables of the job that started this process."""
    meeting: rendezvous.Meeting | None
    findings: tuple[Finding, ...]
    next: str
    """A command that works here, to try next."""

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.needed and not finding.works)


def examine(wait_s: float = 30.0) -> Checkup | None:
    """Examine this machine and, under torchrun, the job.

    Args:
        wait_s: How long to wait for the other ranks of the job.

    Returns:
        The results. None on ranks other than 0, except on a rank that cannot reach rank 0.
    """
    job = rendezvous.job_variables()
    first = job.get("RANK", "0") == "0"
    why_no_namespaces = why_not_shaped() if first else None  # forks: before anything here starts a thread or a GPU
    met = rendezvous.meet(wait_s) if job.keys() == set(rendezvous.NEEDED) else None
    if not first and met is None:
        return None
    found, memory = interfaces(), psutil.virtual_memory()
    versions = {package: _version(package) for package in (*EXTRAS, "triton")}
    machine = Machine(
        checks.find_gpus(), found, gloo_choice(found), nccl_choice(found), versions, why_no_namespaces, job, met
    )
    findings = tuple(checks.run_checks(machine))
    return Checkup(
        syncline=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if checks.has_nccl() else None,
        triton=versions["triton"],
        system=f"{platform.system()} {platform.release()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory.total,
        available_bytes=memory.available,
        gpus=machine.gpus,
        interfaces=found,
        gloo=machine.gloo,
        nccl_interfaces=machine.nccl,
        extras={package: versions[package] for package in EXTRAS},
        job=job,
        meeting=met,
        findings=findings,
        next=_next_command(findings, machine),
    )


def _next_command(findings: Sequence[Finding], machine: Machine) -> str:
    if any(finding.needed and not finding.works for finding in findings):
        return _PREDICT
    if machine.met is not None and machine.met.ranks > 1:
        return "the same torchrun, with: -m syncline probe --output network.json"
    if machine.why_no_namespaces is not None:
        return _PREDICT
    return "syncline probe --hosts 4 --rate 200mbit" if machine.versions["mlxtend"] is None else "syncline demo"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
