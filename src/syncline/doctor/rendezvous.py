"""Test whether the ranks of a job can reach each other.

Every rank writes into the rendezvous store who it is, where it would listen, and whether a sum over all
ranks worked. So rank 0 can name the rank that did not connect, and the one that connected but reached no other rank.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from syncline.cluster.environment import wait_for_listener
from syncline.dist import torchrun
from syncline.dist.deadline import TooLateError, within
from syncline.doctor.interfaces import gloo_choice, interfaces
from syncline.errors import UsageError, first_line
from syncline.measure.topology import host_identity, number

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets, and that a script needs to join a job."""
_MARGIN_S = 3.0  # how much longer ranks wait for an answer than the rank that gives it may take
_POLL_S = 0.1


class RankInfo(msgspec.Struct, frozen=True):
    """Information about a rank for the others."""

    host: str  # an identity that all ranks of one host share
    name: str
    listens_on: str
    gpus: int


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the ranks of a job reached each other."""

    ranks: int
    master: str
    problem: str = ""
    missing: tuple[int, ...] = ()  # ranks that did not connect
    host_of_rank: tuple[int, ...] = ()
    notes: tuple[RankInfo, ...] = ()
    seconds: dict[str, float] = {}  # time of the first sum, by backend, for those that worked
    failed: dict[str, str] = {}  # errors by backend

    @property
    def hosts(self) -> int:
        return len(set(self.host_of_rank))


def job_variables() -> dict[str, str]:
    """Return the variables of the job that started this process; empty if none did."""
    job = {name: os.environ[name] for name in NEEDED if name in os.environ}
    return job if {"RANK", "WORLD_SIZE"} & job.keys() else {}


def meet(wait_s: float) -> Meeting | None:
    """Meet the other ranks of the job; return the result on rank 0, and None on the others."""
    try:
        rank, ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError as error:
        text = f"RANK, WORLD_SIZE and MASTER_PORT must be integers: was this started by torchrun? ({error})"
        raise UsageError(text) from None
    if not 0 <= rank < ranks:
        raise UsageError(f"RANK={rank} and WORLD_SIZE={ranks}: RANK must be 0 to {ranks - 1}")
    address, serves = os.environ["MASTER_ADDR"], rank == 0 and not torchrun.keeps_store()
    met = Meeting(ranks=ranks, master=f"{address}:{port}")
    try:
        if not serves:
            wait_for_listener(address, port, wait_s)
        # Does not wait for other ranks, so that those which are missing can be named.
        store: Store = TCPStore(
            address, port, ranks, serves, timedelta(seconds=wait_s), wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, OSError) as error:
        problem = f"rank {rank} cannot {'listen at' if serves else 'reach'} {met.master}: {first_line(error)}"
        return msgspec.structs.replace(met, problem=problem)
    store = PrefixStore(f"syncline doctor {torchrun.attempt()}", store)
    if rank == 0:
        return _lead(store, met, wait_s)
    with contextlib.suppress(RuntimeError):  # rank 0 has ended
        _introduce(store, rank)
        if not _wait_for(store, "try", [0], wait_s + _MARGIN_S):
            results = {backend: _try_sum(backend, store, rank, ranks, wait_s)[0] for backend in _read(store, "try", 0)}
            _write(store, "result", rank, results)
    return None


def _lead(store: Store, met: Meeting, wait_s: float) -> Meeting:
    """Run rank 0's side: collect the others, tell them which backends to try, and collect the results.

    Rank 0 may serve the store, so it leaves when all others have written their results.
    """
    _introduce(store, 0)
    others = range(1, met.ranks)
    if missing := _wait_for(store, "note", others, wait_s):
        _write(store, "try", 0, [])
        _wait_for(store, "result", [rank for rank in others if rank not in missing], _MARGIN_S)
        return msgspec.structs.replace(met, missing=tuple(missing))
    notes = msgspec.convert([_read(store, "note", rank) for rank in range(met.ranks)], tuple[RankInfo, ...])
    hosts = number([note.host for note in notes])
    enough_gpus = all(note.gpus >= hosts.count(host) for note, host in zip(notes, hosts, strict=True))
    backends = ["gloo", "nccl"] if enough_gpus and dist.is_nccl_available() else ["gloo"]
    _write(store, "try", 0, backends)
    own = {backend: _try_sum(backend, store, 0, met.ranks, wait_s) for backend in backends}
    silent = _wait_for(store, "result", others, wait_s)
    results = {rank: {} if rank in silent else _read(store, "result", rank) for rank in others}
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for backend, (own_error, own_s) in own.items():
        texts = {0: own_error, **{rank: result.get(backend, "did not answer") for rank, result in results.items()}}
        if errors := [f"rank {rank}: {text}" for rank, text in texts.items() if text]:
            failed[backend] = "; ".join(errors[:2])
        else:
            seconds[backend] = own_s
    return msgspec.structs.replace(met, host_of_rank=hosts, notes=notes, seconds=seconds, failed=failed)


def _introduce(store: Store, rank: int) -> None:
    listens_on = ",".join(gloo_choice(interfaces()).names) or "nothing"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    _write(store, "note", rank, RankInfo(host_identity(), os.uname().nodename, listens_on, gpus))


def _write(store: Store, what: str, rank: int, value: Any) -> None:
    store.set(f"{what}/{rank}", msgspec.json.encode(value).decode())


def _read(store: Store, what: str, rank: int) -> Any:
    return msgspec.json.decode(store.get(f"{what}/{rank}"))


def _wait_for(store: Store, what: str, ranks: Sequence[int], wait_s: float) -> list[int]:
    """Wait for values; return the ranks whose value did not appear. (The store's own wait prints to stderr.)"""
    end = time.monotonic() + wait_s
    waiting = list(ranks)
    while True:
        waiting = [rank for rank in waiting if not store.check([f"{what}/{rank}"])]
        if not waiting or time.monotonic() > end:
            return waiting
        time.sleep(_POLL_S)


def _try_sum(backend: str, store: Store, rank: int, ranks: int, wait_s: float) -> tuple[str, float]:
    """Sum over all ranks, and return the error, or an empty text if it worked, and the time that it took."""

    def sum_up() -> None:
        device, timeout = torch.device("cpu"), timedelta(seconds=max(1.0, wait_s - 1))
        if backend == "nccl":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        prefixed = PrefixStore(backend, store)
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=ranks, timeout=timeout)
        try:
            total = torch.ones(4, device=device)
            dist.all_reduce(total)
            if total.tolist() != [ranks] * 4:
                raise RuntimeError(f"the sum of {ranks} ones is {total[0].item():g}")
        finally:
            dist.destroy_process_group()

    begin_s = time.monotonic()
    try:
        within(wait_s, sum_up)
    except (TooLateError, RuntimeError, ValueError, OSError) as error:
        return first_line(error), 0.0
    return "", time.monotonic() - begin_s
