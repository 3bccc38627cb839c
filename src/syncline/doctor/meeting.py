"""Do ranks find each other? Two of them in this process, over the loopback interface; or those that torchrun started.

Under torchrun everyone leaves notes in the rendezvous store: who it is, where it would listen, and what became of a sum
over all ranks. So rank 0 can name the rank that did not come, and the one that came and reached nobody.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo, Store, TCPStore

from syncline.dist import torchrun
from syncline.dist.deadline import TooLateError, together, within
from syncline.doctor.interfaces import gloo_choice, interfaces
from syncline.errors import UsageError
from syncline.measure.topology import host_identity, number

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets, and a script that joins a job needs."""
_LOOPBACK = "127.0.0.1"
_LOOPBACK_S = 3.0
_MARGIN_S = 3.0
"""That whoever waits for an answer waits longer than whoever gives it."""


_AGAIN_S = 0.1


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others of itself."""

    host: str
    """By which ranks of one host are known."""
    name: str
    listens_on: str
    gpus: int


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the ranks that torchrun started."""

    ranks: int
    master: str
    problem: str = ""
    missing: tuple[int, ...] = ()
    """Ranks that did not come."""
    host_of_rank: tuple[int, ...] = ()
    notes: tuple[Note, ...] = ()
    seconds: dict[str, float] = {}
    """By backend, until all had summed for the first time; only where it worked."""
    failed: dict[str, str] = {}
    """By backend."""

    @property
    def hosts(self) -> int:
        return len(set(self.host_of_rank))

    @property
    def works(self) -> bool:
        return not self.problem and not self.missing and not self.failed


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Of the job that started this process, if one did."""
    if not {"RANK", "WORLD_SIZE"} & environment.keys():
        return {}
    return {name: environment[name] for name in NEEDED if name in environment}


def try_loopback() -> float:
    """Seconds until two ranks in this process have met and summed over the loopback interface; or the error."""
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

    together(_LOOPBACK_S + _MARGIN_S, [functools.partial(rank, number) for number in range(2)])
    return time.monotonic() - begin


def meet(wait_s: float, environment: Mapping[str, str] = os.environ) -> Meeting | None:
    """Meets the other ranks; what came of it on rank 0, and None on the others, which say nothing."""
    rank, ranks = (_whole(name, environment) for name in ("RANK", "WORLD_SIZE"))
    if not 0 <= rank < ranks:
        raise UsageError(f"RANK={rank} and WORLD_SIZE={ranks}: a rank is one of 0 to {ranks - 1}")
    address, port = environment["MASTER_ADDR"], _whole("MASTER_PORT", environment)
    master = f"{address}:{port}"
    ours = rank == 0 and not torchrun.keeps_store(environment)
    try:
        if not ours:
            _reach(address, port, wait_s)
        # Without waiting for anyone: so that whoever is missing can be named.
        store: Store = TCPStore(
            address, port, ranks, ours, timedelta(seconds=wait_s), wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, OSError) as error:
        verb = "cannot listen at" if ours else "does not reach"
        return Meeting(ranks=ranks, master=master, problem=f"rank {rank} {verb} {master}: {line(error)}")
    store = PrefixStore(f"syncline doctor {torchrun.attempt(environment)}", store)
    if rank == 0:
        return _host(store, ranks, master, wait_s)
    _guest(store, rank, ranks, wait_s)
    return None


def _reach(address: str, port: int, wait_s: float) -> None:
    """Until somebody listens there: torch's own attempts end in pages of C++."""
    end = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() + _AGAIN_S > end:
                raise
            time.sleep(_AGAIN_S)


def _host(store: Store, ranks: int, master: str, wait_s: float) -> Meeting:
    """Rank 0's side."""
    store.set("note/0", msgspec.json.encode(_note()).decode())
    missing = _waited(store, [f"note/{rank}" for rank in range(ranks)], wait_s)
    if missing:
        store.set("try/0", "")
        _waited(store, [f"left/{rank}" for rank in range(1, ranks) if rank not in missing], _MARGIN_S)
        return Meeting(ranks=ranks, master=master, missing=tuple(missing))
    notes = tuple(msgspec.json.decode(store.get(f"note/{rank}"), type=Note) for rank in range(ranks))
    hosts = number([note.host for note in notes])
    backends = ["gloo", *(["nccl"] if _each_has_a_gpu(notes, hosts) else [])]
    store.set("try/0", ",".join(backends))
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for backend in backends:
        begin = time.monotonic()
        store.set(f"{backend}/0", _tried(backend, store, 0, ranks, wait_s))
        silent = _waited(store, [f"{backend}/{rank}" for rank in range(ranks)], wait_s)
        said = {rank: store.get(f"{backend}/{rank}").decode() for rank in range(ranks) if rank not in silent}
        complaints = {**{rank: text for rank, text in said.items() if text}, **dict.fromkeys(silent, "did not answer")}
        if complaints:
            failed[backend] = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(complaints.items())[:2])
        else:
            seconds[backend] = time.monotonic() - begin
    _waited(store, [f"left/{rank}" for rank in range(1, ranks)], _MARGIN_S)  # the store may be ours: last out
    return Meeting(ranks=ranks, master=master, host_of_rank=hosts, notes=notes, seconds=seconds, failed=failed)


def _guest(store: Store, rank: int, ranks: int, wait_s: float) -> None:
    """Everyone else's."""
    try:
        store.set(f"note/{rank}", msgspec.json.encode(_note()).decode())
        if _waited(store, ["try/0"], wait_s + _MARGIN_S):
            return
        for backend in filter(None, store.get("try/0").decode().split(",")):
            store.set(f"{backend}/{rank}", _tried(backend, store, rank, ranks, wait_s))
        store.set(f"left/{rank}", "")
    except RuntimeError:  # rank 0 is gone, and will be missed by those who see it
        return


def _note() -> Note:
    found = interfaces()
    choice = gloo_choice(found)
    return Note(
        host=host_identity(),
        name=os.uname().nodename,
        listens_on=",".join(choice.names) or "nothing",
        gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
    )


def _each_has_a_gpu(notes: Sequence[Note], hosts: Sequence[int]) -> bool:
    enough = [note.gpus >= list(hosts).count(host) for note, host in zip(notes, hosts, strict=True)]
    return dist.is_nccl_available() and all(enough)


def _waited(store: Store, keys: Sequence[str], wait_s: float) -> list[int]:
    """Waits for these keys; the numbers at the end of those that did not come. (The store's own wait is not quiet.)"""
    end = time.monotonic() + wait_s
    waiting = list(keys)
    while True:
        waiting = [key for key in waiting if not store.check([key])]
        if not waiting or time.monotonic() > end:
            return [int(key.rpartition("/")[2]) for key in waiting]
        time.sleep(_AGAIN_S)


def _tried(backend: str, store: Store, rank: int, ranks: int, wait_s: float) -> str:
    """A sum over all ranks: empty where it is right, otherwise what went wrong."""
    try:
        within(wait_s, lambda: _sum(backend, PrefixStore(backend, store), rank, ranks, wait_s))
    except TooLateError as error:
        return str(error)
    except (RuntimeError, ValueError, OSError) as error:
        return line(error)
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


def _whole(name: str, environment: Mapping[str, str]) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UsageError(f"{name}={environment[name]!r} is not a whole number: was this started by torchrun?") from None


def line(error: Exception) -> str:
    """What an error says, without where in torch it was raised."""
    said = getattr(error, "strerror", None) or str(error)
    first = next((line for line in said.splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"\[(enforce fail at )?/\S*\] ?", "", first).strip()
