"""Test whether ranks can reach each other: two in this process, over the loopback interface, or those of a job.

Under torchrun, every rank writes into the rendezvous store who it is, where it would listen, and whether a sum over all
ranks worked. So rank 0 can name the rank that did not connect, and the one that connected but reached no other rank.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo, Store, TCPStore

from syncline.cluster.environment import wait_for_listener
from syncline.dist import torchrun
from syncline.dist.deadline import TooLateError, run_concurrently, within
from syncline.doctor.interfaces import gloo_choice, interfaces
from syncline.errors import UsageError, first_line
from syncline.measure.topology import host_identity, number

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets, and that a script needs to join a job."""
_LOOPBACK = "127.0.0.1"
_LOOPBACK_S = 3.0
_MARGIN_S = 3.0
"""How much longer ranks wait for an answer than the rank that gives it may take."""
_POLL_S = 0.1


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Information about a rank for the others."""

    host: str
    """An identity that all ranks of one host share."""
    name: str
    listens_on: str
    gpus: int


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the ranks of a job reached each other."""

    ranks: int
    master: str
    problem: str = ""
    missing: tuple[int, ...] = ()
    """Ranks that did not connect."""
    host_of_rank: tuple[int, ...] = ()
    notes: tuple[RankInfo, ...] = ()
    seconds: dict[str, float] = {}
    """Time of the first sum, by backend, for those that worked."""
    failed: dict[str, str] = {}
    """Errors by backend."""

    @property
    def hosts(self) -> int:
        return len(set(self.host_of_rank))


def job_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of the job that started this process; empty if none did."""
    if not {"RANK", "WORLD_SIZE"} & environment.keys():
        return {}
    return {name: environment[name] for name in NEEDED if name in environment}


def try_loopback() -> float:
    """Return the seconds until two ranks in this process have connected and summed over the loopback interface."""
    store, begin = HashStore(), time.monotonic()

    def rank(number: int) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=_LOOPBACK_S)
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        group: Any = ProcessGroupGloo(store, number, 2, options)
        total = torch.full((4,), float(1 + number))
        group.allreduce([total]).wait()
        if total.tolist() != [3.0] * 4:
            raise RuntimeError(f"1 + 2 is {total[0].item():g}")

    run_concurrently(_LOOPBACK_S + _MARGIN_S, [functools.partial(rank, number) for number in range(2)])
    return time.monotonic() - begin


def meet(wait_s: float, environment: Mapping[str, str] = os.environ) -> Meeting | None:
    """Meet the other ranks of the job; return the result on rank 0, and None on the others."""
    rank, ranks, port = (_integer(name, environment) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not 0 <= rank < ranks:
        raise UsageError(f"RANK={rank} and WORLD_SIZE={ranks}: RANK must be 0 to {ranks - 1}")
    address = environment["MASTER_ADDR"]
    master = f"{address}:{port}"
    serves = rank == 0 and not torchrun.keeps_store(environment)
    try:
        if not serves:
            wait_for_listener(address, port, wait_s)
        # Does not wait for other ranks, so that those which are missing can be named.
        store: Store = TCPStore(
            address, port, ranks, serves, timedelta(seconds=wait_s), wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, OSError) as error:
        problem = f"rank {rank} cannot {'listen at' if serves else 'reach'} {master}: {first_line(error)}"
        return Meeting(ranks=ranks, master=master, problem=problem)
    store = PrefixStore(f"syncline doctor {torchrun.attempt(environment)}", store)
    if rank == 0:
        return _lead(store, ranks, master, wait_s)
    _follow(store, rank, ranks, wait_s)
    return None


def _lead(store: Store, ranks: int, master: str, wait_s: float) -> Meeting:
    """Run rank 0's side: collect the others, tell them which backends to try, and collect the results."""
    _introduce(store, 0)
    missing = _wait_for(store, [f"note/{rank}" for rank in range(ranks)], wait_s)
    if missing:
        store.set("try/0", "")
        _wait_for(store, [f"left/{rank}" for rank in range(1, ranks) if rank not in missing], _MARGIN_S)
        return Meeting(ranks=ranks, master=master, missing=tuple(missing))
    notes = tuple(msgspec.json.decode(store.get(f"note/{rank}"), type=RankInfo) for rank in range(ranks))
    hosts = number([note.host for note in notes])
    enough_gpus = all(note.gpus >= hosts.count(host) for note, host in zip(notes, hosts, strict=True))
    backends = ["gloo", "nccl"] if enough_gpus and dist.is_nccl_available() else ["gloo"]
    store.set("try/0", ",".join(backends))
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for backend in backends:
        begin = time.monotonic()
        store.set(f"{backend}/0", _try_sum(backend, store, 0, ranks, wait_s))
        silent = _wait_for(store, [f"{backend}/{rank}" for rank in range(ranks)], wait_s)
        answers = {
            rank: "did not answer" if rank in silent else store.get(f"{backend}/{rank}").decode()
            for rank in range(ranks)
        }
        errors = [f"rank {rank}: {text}" for rank, text in answers.items() if text]
        if errors:
            failed[backend] = "; ".join(errors[:2])
        else:
            seconds[backend] = time.monotonic() - begin
    _wait_for(
        store, [f"left/{rank}" for rank in range(1, ranks)], _MARGIN_S
    )  # rank 0 may serve the store: it leaves last
    return Meeting(ranks=ranks, master=master, host_of_rank=hosts, notes=notes, seconds=seconds, failed=failed)


def _follow(store: Store, rank: int, ranks: int, wait_s: float) -> None:
    """Run the other ranks' side."""
    try:
        _introduce(store, rank)
        if _wait_for(store, ["try/0"], wait_s + _MARGIN_S):
            return
        for backend in filter(None, store.get("try/0").decode().split(",")):
            store.set(f"{backend}/{rank}", _try_sum(backend, store, rank, ranks, wait_s))
        store.set(f"left/{rank}", "")
    except RuntimeError:  # rank 0 has ended
        return


def _introduce(store: Store, rank: int) -> None:
    info = RankInfo(
        host=host_identity(),
        name=os.uname().nodename,
        listens_on=",".join(gloo_choice(interfaces()).names) or "nothing",
        gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
    )
    store.set(f"note/{rank}", msgspec.json.encode(info).decode())


def _wait_for(store: Store, keys: Sequence[str], wait_s: float) -> list[int]:
    """Wait for keys; return the ranks of those that did not appear. (The store's own wait prints to stderr.)"""
    end = time.monotonic() + wait_s
    waiting = list(keys)
    while True:
        waiting = [key for key in waiting if not store.check([key])]
        if not waiting or time.monotonic() > end:
            return [int(key.rpartition("/")[2]) for key in waiting]
        time.sleep(_POLL_S)


def _try_sum(backend: str, store: Store, rank: int, ranks: int, wait_s: float) -> str:
    """Sum over all ranks, and return the error, or nothing if it worked."""
    try:
        within(wait_s, lambda: _sum(backend, PrefixStore(backend, store), rank, ranks, wait_s))
    except (TooLateError, RuntimeError, ValueError, OSError) as error:
        return first_line(error)
    return ""


def _sum(backend: str, store: Store, rank: int, ranks: int, wait_s: float) -> None:
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=max(1.0, wait_s - 1))
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    try:
        total = torch.full((4,), float(1 + rank), device=device)
        dist.all_reduce(total)
        if total.tolist() != [ranks * (ranks + 1) / 2] * 4:
            raise RuntimeError(f"the sum over all ranks is {total[0].item():g}")
    finally:
        dist.destroy_process_group()


def _integer(name: str, environment: Mapping[str, str]) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UsageError(f"{name}={environment[name]!r} is not an integer: was this started by torchrun?") from None
