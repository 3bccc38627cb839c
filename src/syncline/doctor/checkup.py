"""Examine this machine: what is here, what works, and what to do about what does not.

A new check is a function that returns a `Finding`, and a line in `_findings`. A finding is *needed* if its failure is a
fault of this machine or job. Having no GPU is not a fault; a gloo that cannot sum over the loopback interface is.
"""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path

import msgspec
import psutil
import torch
import torch.distributed as dist

from syncline._version import __version__
from syncline.cluster import ClusterSpec, Rank, launch, why_not_shaped
from syncline.ddp import reducer
from syncline.dist import torchrun
from syncline.doctor import interfaces, rendezvous
from syncline.doctor.interfaces import GLOO, NCCL, Choice, Interface
from syncline.errors import SynclineError, first_line
from syncline.units import count_text, ranks_text

_PREDICT = "syncline predict --profile bert-base-cuda --rate 10gbit --hosts 4,8,64"
"""A command that works wherever the package is installed."""
_PACKAGES = ("mlxtend", "pyroute2", "lightning", "accelerate", "transformers", "tensorboard")
_EXTRAS = {"mlxtend": "demo", "pyroute2": "cluster"}
"""The extras that install optional packages, where they have other names."""
_LOOPBACK_S = 20.0
_REINSTALL = "install another build of torch: see pytorch.org"


class Gpu(msgspec.Struct, frozen=True):
    name: str
    memory_bytes: int


class Finding(msgspec.Struct, frozen=True):
    """The result of one check: whether a task works here, why, and how to repair it."""

    works: bool
    why: str
    remedy: str = ""
    needed: bool = False
    what: str = ""


class Checkup(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = 1
    syncline: str = __version__
    python: str = platform.python_version()
    torch: str = str(torch.__version__)
    cuda: str | None
    nccl: str | None
    triton: str | None
    system: str = f"{platform.system()} {platform.release()}"
    cores: int
    memory_bytes: int
    available_bytes: int
    gpus: tuple[Gpu, ...]
    interfaces: tuple[Interface, ...]
    gloo: Choice
    nccl_interfaces: Choice
    extras: dict[str, str | None]  # versions of optional packages; None for those that are not installed
    job: dict[str, str]  # environment variables of the job that started this process
    meeting: rendezvous.Meeting | None
    findings: tuple[Finding, ...] = ()
    next: str = _PREDICT  # a command that works here, to try next

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
    # These fork: before anything here starts a thread or a GPU.
    why_no_namespaces, loopback = (why_not_shaped(), _gloo_on_loopback()) if first else (None, None)
    met = rendezvous.meet(wait_s) if job.keys() == set(rendezvous.NEEDED) else None
    if not first and met is None:
        return None
    found, memory = interfaces.interfaces(), psutil.virtual_memory()
    versions = {package.name: package.version for package in metadata.distributions()}
    checkup = Checkup(
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if _has_nccl() else None,
        triton=versions.get("triton"),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory.total,
        available_bytes=memory.available,
        gpus=_gpus(),
        interfaces=found,
        gloo=interfaces.gloo_choice(found),
        nccl_interfaces=interfaces.nccl_choice(found),
        extras={package: versions.get(package) for package in _PACKAGES},
        job=job,
        meeting=met,
    )
    checkup = msgspec.structs.replace(checkup, findings=_findings(checkup, loopback, why_no_namespaces))
    next_ = _PREDICT
    if met is not None and met.ranks > 1:
        next_ = "the same torchrun, with: -m syncline probe --output network.json"
    elif why_no_namespaces is None:
        next_ = "syncline demo"
    return checkup if checkup.problems else msgspec.structs.replace(checkup, next=next_)


def _findings(found: Checkup, loopback: Finding | None, why_no_namespaces: str | None) -> tuple[Finding, ...]:
    """Run all checks, in the order in which they are shown. A check returns None if it does not apply."""
    findings = {
        "gradients over gloo": loopback,
        "the ranks of this job": _job(found),
        "restarts by torchrun": _restarts(),
        "gloo between hosts": _gloo_between_hosts(found),
        "gradients over NCCL": _nccl(found),
        "emulated clusters": _emulated_clusters(why_no_namespaces),
        "tune, plans on a live model": _either(
            reducer.can_change(),
            "this torch can rebuild DDP's buckets",
            "this torch cannot rebuild the buckets of a live model",
            "use another torch (2.13 can), or syncline.wrap(net, plan) and syncline.attach",
        ),
        "exact buckets in wrap(net, plan)": _either(
            reducer.caps_are_known(),
            "this torch's DDP takes a size for each bucket",
            "this torch's DDP takes one size for all buckets: a plan's sizes are approximated",
            "use another torch (2.13 does)",
        ),
        "sparse selection on the GPU": _either(
            found.triton is not None, f"triton {found.triton}", "triton is not installed", "pip install triton"
        )
        if found.gpus
        else None,
        "optional packages": _packages(found),
    }
    return tuple(msgspec.structs.replace(finding, what=what) for what, finding in findings.items() if finding)


def _either(works: bool, why: str, why_not: str, remedy: str) -> Finding:
    return Finding(True, why) if works else Finding(False, why_not, remedy)


def _gloo_on_loopback() -> Finding:
    if not dist.is_gloo_available():
        return Finding(False, "this torch was built without gloo", _REINSTALL, needed=True)
    begin_s = time.monotonic()
    try:
        launch(ClusterSpec(hosts=2), _sum, shaped=False, deadline_s=_LOOPBACK_S)
    except (SynclineError, OSError) as error:
        why = f"two ranks cannot connect over the loopback interface: {first_line(error)}"
        return Finding(False, why, "bring it up (ip link set lo up), and allow connections to 127.0.0.1", needed=True)
    took_s = time.monotonic() - begin_s
    return Finding(True, f"two ranks summed over the loopback interface in {took_s:.2f} s", needed=True)


def _sum(rank: Rank) -> None:
    rank.init_process_group(_LOOPBACK_S / 2)
    dist.all_reduce(torch.ones(4))


def _job(found: Checkup) -> Finding | None:
    met = found.meeting
    if not found.job:
        return None
    if met is None:
        missing = ", ".join(name for name in rendezvous.NEEDED if name not in found.job)
        why, remedy = f"its environment lacks {missing}", "start it with torchrun, or unset RANK WORLD_SIZE"
    elif met.missing:
        why = f"{ranks_text(met.missing, 8)} of {met.ranks} did not connect to {met.master}"
        remedy = f"start the same command on every host; each must reach {met.master}"
    elif met.problem:
        why, remedy = met.problem, "check MASTER_ADDR, MASTER_PORT and the network between the hosts"
    elif met.failed:
        why = "; ".join(f"{backend}: {text}" for backend, text in met.failed.items())
        listening = ", ".join(dict.fromkeys(f"{note.listens_on} on {note.name}" for note in met.notes))
        remedy = f"set {GLOO} to interfaces that reach each other (gloo listens on {listening})"
    else:
        times = ", ".join(f"{backend} {seconds:.1f} s" for backend, seconds in met.seconds.items())
        members = f"{count_text(met.ranks, 'rank')} on {count_text(met.hosts, 'host')}"
        return Finding(True, f"{members} connected to {met.master} and summed: {times}", needed=True)
    return Finding(False, why, remedy, needed=True)


def _restarts() -> Finding | None:
    if not torchrun.restarts():
        return None
    return _either(
        not torchrun.keeps_store(),
        f"{count_text(torchrun.restarts(), 'restart')}, each with its own store",
        "torchrun's store outlives the ranks: those of the next attempt find addresses of dead ranks in it",
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and use --standalone or --rdzv-backend c10d",
    )


def _gloo_between_hosts(found: Checkup) -> Finding | None:
    gloo, out = found.gloo, interfaces.outward(found.interfaces)
    if found.meeting is not None and found.meeting.hosts > 1:  # already tried for real
        return None
    export = "give this host an address that others reach" if out is None else f"export {GLOO}={out.name}"
    if gloo.problem:
        chosen = GLOO in os.environ
        return Finding(False, gloo.problem, f"unset {GLOO}, or {export}" if chosen else export, needed=chosen)
    names = ", ".join(gloo.names) or "no interface"
    if all(interfaces.is_loopback(interface) for interface in found.interfaces if interface.name in gloo.names):
        why = f"would listen on {names} ({gloo.why}): other hosts cannot reach it"
        return Finding(False, why, export if out is None else f"{export}, on each host with its own interface")
    return Finding(True, f"would listen on {names} ({gloo.why})")


def _nccl(found: Checkup) -> Finding:
    if found.gpus:
        if not _has_nccl():
            return Finding(False, "this torch was built without NCCL", _REINSTALL)
        choice, gpus = found.nccl_interfaces, count_text(len(found.gpus), "GPU")
        if choice.problem:
            return Finding(False, choice.problem, f"unset {NCCL}, or correct it", needed=True)
        return Finding(True, f"{gpus}; between hosts {', '.join(choice.names)}")
    if not Path("/proc/driver/nvidia/version").exists():
        return Finding(False, "no GPU")
    if torch.version.cuda is None:
        return Finding(False, "there is an NVIDIA driver, but this torch was built without CUDA", _REINSTALL)
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return Finding(False, f"CUDA_VISIBLE_DEVICES={hidden}", "unset it")
    remedy = "compare nvidia-smi's CUDA version with torch.version.cuda"
    return Finding(False, "torch finds no GPU although there is an NVIDIA driver", remedy, needed=True)


def _emulated_clusters(why: str | None) -> Finding:
    if why is None:
        return Finding(True, "a host in a network namespace was started and ended")
    default = "allow user namespaces; see the assumptions"
    remedies = {"SYNCLINE_NO_NAMESPACES": "unset it", "pyroute2": "pip install 'syncline[cluster]'"}
    remedy = next((text for word, text in remedies.items() if word in why), default)
    return Finding(False, f"{why.partition(' (pip')[0]}: ranks use the loopback interface, at its full speed", remedy)


def _packages(found: Checkup) -> Finding:
    missing = [package for package, version in found.extras.items() if version is None]
    listed = [f"{package} {version}" if version else f"no {package}" for package, version in found.extras.items()]
    extras = ",".join(_EXTRAS.get(package, package) for package in missing)
    remedy = f"pip install 'syncline[{extras}]' for those you use" if missing else ""
    return Finding(not missing, ", ".join(listed), remedy)


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    try:
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except RuntimeError:  # the driver counts them but cannot start them
        return ()
    return tuple(Gpu(gpu.name, gpu.total_memory) for gpu in gpus)


def _has_nccl() -> bool:
    return dist.is_nccl_available() and torch.version.cuda is not None
