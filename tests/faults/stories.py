"""The programs that the ranks of a cell run: small trainings that record every step and pass the places of faults."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import made_up
import syncline
from ddp_helpers import Mlp, batch, seeded
from faults.injury import Injury, UserError, fill, mount_small_disk, small_files
from faults.journal import Journal, hashed, read
from syncline.cluster import Rank
from syncline.dist import comm
from syncline.exchange import Comm, Dense, Exchange, Layout, OkTopk, Quantized, State, settings
from syncline.runtime import checkpoint
from syncline.runtime.local_tensors import local_part

WIDTH = 160
BUCKET_MB = 0.05
STEPS = 7
SPARSE = OkTopk(density=0.1, values="fp32")
FEW_BITS = Quantized(bits=4)
DISK_BYTES = 4 << 20
_END_S = 60.0
_STUCK_S = 25.0


# --- meeting ----------------------------------------------------------------------------------------------------


def join(rank: Rank, timeout_s: float) -> None:
    """Join as under torchrun: an agent beside rank 0 serves the store and outlives every rank."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank.rank == 0:
        listener = socket.create_server((address, port))
        if os.fork() == 0:
            os.close(rank._pipe)
            _ = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
            while True:  # until the cluster ends
                signal.pause()
        listener.close()
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_END_S))
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size, timeout=timeout)


def end_like_a_script(error: BaseException) -> None:
    """Do what Python does after an uncaught exception, and a forked rank would not do."""
    sys.last_value = error
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries complain about the state that a fork copied
    atexit._run_exitfuncs()


# --- exchanges that strike --------------------------------------------------------------------------------------

_injury: Injury | None = None
"""The injury of this rank, for places deep inside the library."""


def _strike_in(place: str) -> None:
    if _injury is not None and _injury.armed and _injury.place == place:
        _injury.strike()


@dataclass(frozen=True)
class PreparedDense(Dense):
    def prepare(self, layout: Layout, comm: Comm) -> State:
        _strike_in("prepare")
        return super().prepare(layout, comm)


@dataclass(frozen=True)
class PreparedOkTopk(OkTopk):
    def prepare(self, layout: Layout, comm: Comm) -> State:
        _strike_in("prepare")
        return super().prepare(layout, comm)


def striking(exchange: Exchange) -> Exchange:
    """Return the same exchange with the place `prepare`."""
    fields = {field.name: getattr(exchange, field.name) for field in dataclasses.fields(exchange)}  # type: ignore[arg-type]
    if isinstance(exchange, OkTopk):
        return PreparedOkTopk(**fields)
    assert isinstance(exchange, Dense)
    return PreparedDense(**fields)


# --- training ---------------------------------------------------------------------------------------------------


class Subject:
    """A model in training, with its handle or trainer."""

    def __init__(self, rank: Rank, told: Told, journal: Journal, injury: Injury | None) -> None:
        self.rank, self.journal, self.injury = rank, journal, injury
        exchange = told.exchange
        self.step_s = 0.05
        net = seeded(lambda: Mlp(WIDTH))
        self.number = -1
        net.middle.register_forward_pre_hook(lambda *_: self.at("forward"))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000, enabled=told.scaled)
        self.model: Any
        self.holder: Any
        self.part = 0
        mesh: Any = None
        if told.sharded:
            net, mesh, self.part = _sharded(net, told.sharded, rank)
            self.model = net
        elif not told.layerwise:
            self.model = DDP(net, bucket_cap_mb=BUCKET_MB)
        self.at("before", -1)
        with _warming(self):
            if told.layerwise:
                self.optimizer: torch.optim.Optimizer | None = None
                self.model = self.holder = syncline.Layerwise(
                    net, lambda p: torch.optim.SGD(p, lr=0.05), exchange, bucket_mb=BUCKET_MB
                )
            else:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
                options: dict[str, Any] = {"scaler": self.scaler if told.scaled else None}
                if told.every:
                    options |= {"every": told.every, "delay": told.delay, "warmup": 0, "optimizer": self.optimizer}
                if told.sharded == "replicas":
                    options["replicate"] = mesh["replicate"]
                if told.overlap:
                    options |= {"overlap": "forward", "optimizer": self.optimizer}
                self.holder = syncline.attach(self.model, exchange, **options)
        if told.sharded:  # gradients of shards have no hooks
            net.first.register_forward_hook(lambda *args: _at_gradient(args[-1], lambda: self.at("hook")))
        else:
            net.first.weight.register_hook(lambda _: self.at("hook"))
        self.net = net
        self.at("after", -1)

    def at(self, place: str, step: int | None = None) -> None:
        if self.injury is not None:
            self.injury.at(place, self.number if step is None else step)

    def step(self, number: int, *, factor: float = 1.0) -> None:
        self.number = number
        began_s = time.monotonic()
        self.journal.note("begin", step=number)
        self.at("before")
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        loss = self.model(batch(self.rank.rank, number, 8, WIDTH)).square().mean() * factor
        self.scaler.scale(loss).backward()
        self.at("after")
        if self.optimizer is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.journal.note("commit", step=number, **self.described())
        self.step_s = time.monotonic() - began_s
        self.at("between")

    def described(self) -> dict[str, Any]:
        state = self.holder.state_dict()
        with contextlib.nullcontext() if self.optimizer is None else self.holder.synced():
            parameters = hashed(map(local_part, self.net.parameters()))
        kept = [kinds[kind] for _, kinds in sorted(state["tensors"].items()) for kind in sorted(kinds)]
        buckets = sorted((one.bucket, one.lane, one.bytes, one.exchange) for one in self.holder.stats().buckets)
        return {
            "parameters": parameters,
            "layout": f"{settings(self.holder.exchange)} {buckets}",
            "kept": hashed(kept),
            "finite": all(bool(torch.isfinite(local_part(parameter)).all()) for parameter in self.net.parameters()),
            "part": self.part,
        }

    def ask_for_state(self, folder: Path) -> None:
        """Ask for the state after a failure, and record whether it was refused."""
        asked: dict[str, Callable[[], object]] = {
            "state_dict": self.holder.state_dict,
            "save": lambda: self.holder.save(folder / f"after-{self.rank.rank}"),
        }
        for what, ask in asked.items():
            try:
                ask()
            except syncline.SynclineError:
                self.journal.note("asked", what=what, refused=True)
            else:
                self.journal.note("asked", what=what, refused=False)

    def close(self) -> None:
        (self.holder.close if isinstance(self.holder, syncline.Layerwise) else self.holder.detach)()


def _sharded(net: Any, how: str, rank: Rank) -> tuple[Any, Any, int]:
    """Shard a model, on each of two hosts or among all ranks. Return it, the mesh, and the shard of this rank."""
    ranks = rank.world_size
    if how == "replicas":
        mesh: Any = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    for module in (net.middle, net.last, net):
        fully_shard(module, mesh=mesh["shard"])
    return net, mesh, mesh["shard"].get_local_rank()


def _at_gradient(output: torch.Tensor, call: Callable[[], None]) -> None:
    """Call a function when the gradient of a tensor is known."""
    if output.requires_grad:
        output.register_hook(lambda _: call())


@contextlib.contextmanager
def _warming(subject: Subject) -> Iterator[None]:
    """Add the places `connecting`, where groups are made, and `inside`, where they open their connections."""
    make, warm = comm._new_group, comm.open_connections

    def strike_and_make(*arguments: Any, **options: Any) -> Any:
        subject.at("connecting", -1)
        return make(*arguments, **options)

    def strike_and_warm(*arguments: Any, **options: Any) -> Any:
        subject.at("inside", -1)
        return warm(*arguments, **options)

    with mock.patch.multiple(comm, _new_group=strike_and_make, open_connections=strike_and_warm):
        yield


# --- stories ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """The settings of a story."""

    exchange: Exchange
    layerwise: bool = False
    every: int = 0
    """Steps between exchanges of updates; 0 for gradients."""
    delay: int = 0
    overlap: bool = False
    sharded: str = ""
    """`replicas` or `shards`, for a model of FSDP with or without replicas."""
    fault: str = ""
    leaves_out: int | None = None
    """A step that no rank makes."""
    scaled: bool = False
    steps: int = STEPS


def train(rank: Rank, told: Told, journal: Journal, injury: Injury | None, folder: Path) -> None:
    """Train for some steps with a fault. Ask for the state before raising an error of the training."""
    subject = Subject(rank, told, journal, injury)
    try:
        for number in range(told.steps):
            if number == told.leaves_out:
                continue
            spoiled = told.fault in ("nan", "inf") and injury is not None and number == injury.step
            if spoiled and injury is not None:
                injury.strike()
            if told.fault == "caught" and number == FAULT_STEP:
                subject.injury = subject.injury or Injury("caught", "forward", number, journal)
                with contextlib.suppress(UserError):
                    subject.step(number)
                continue
            subject.step(number, factor=float(told.fault) if spoiled else 1.0)
    except UserError:
        raise
    except RuntimeError as error:
        if injury is None or injury.fault in ("stop", "cut"):
            journal.raised(error)
            subject.ask_for_state(folder)
            subject.close()
            journal.note("closed")
            raise SurvivedError from error
        raise
    subject.close()


FAULT_STEP = 3


class SurvivedError(Exception):
    """This rank has raised an error, which its journal contains."""


def keep_model(folder: Path, subject: Subject) -> None:
    """Save the weights beside the checkpoint of the exchange, named by step."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = subject.holder.stats().steps
    path = folder / f"model-{steps}-{subject.rank.rank}.safetensors"
    path.write_bytes(safetensors.torch.save({name: p.detach() for name, p in subject.net.named_parameters()}))


def save(rank: Rank, told: Told, journal: Journal, injury: Injury | None, folder: Path) -> None:
    """Save twice, the second time with a fault."""
    victim = injury is not None
    saved = folder / "saved"
    disk = folder / "disk" if told.fault.startswith("enospc") else saved
    if told.fault.startswith("enospc") and rank.rank == 0:
        mount_small_disk(disk, DISK_BYTES)
    subject = Subject(rank, told, journal, injury)
    for number in range(told.steps):
        if number == 3:
            keep_model(folder / "models", subject)
            subject.holder.save(disk)
        if number == 5:
            keep_model(folder / "models", subject)
            if told.fault.startswith("enospc") and rank.rank == 0:
                size = max(path.stat().st_size for path in disk.iterdir())
                fill(disk, (2 * size + 16384) if told.fault == "enospc one" else 8192)
            dist.barrier()
            _save_again(subject, told, disk, victim=victim)
            if told.fault.startswith("enospc"):
                dist.barrier()  # all ranks have cleaned up
                if rank.rank == 0:
                    (disk / "filler").unlink()
                    shutil.copytree(disk, saved)
        subject.step(number)
    subject.close()


def _save_again(subject: Subject, told: Told, folder: Path, *, victim: bool) -> None:
    subject.number = SAVE_STEP
    if told.fault.startswith("enospc"):
        subject.journal.note("fault", fault=told.fault)
    limit = small_files(256) if told.fault == "efbig" and victim else contextlib.nullcontext()
    subject.at("before")
    try:
        with limit, _saving(subject):
            subject.holder.save(folder)
    except syncline.SynclineError as error:
        subject.journal.raised(error)
        if told.fault not in ("efbig", "enospc", "enospc one"):
            raise SurvivedError from error
    if told.fault == "efbig" and victim:
        subject.journal.note("fault", fault="efbig")
    subject.at("after")


SAVE_STEP = 1000
"""The step number of faults that strike while saving."""


@contextlib.contextmanager
def _saving(subject: Subject) -> Iterator[None]:
    """Add the places `draft` and `placing`, where drafts are written and put in place."""
    write, place = checkpoint.write_draft, checkpoint.put_in_place

    def written(*arguments: Any, **options: Any) -> Any:
        draft = write(*arguments, **options)
        subject.at("draft")
        return draft

    def placed(*arguments: Any, **options: Any) -> Any:
        subject.at("placing")
        return place(*arguments, **options)

    with mock.patch.multiple(checkpoint, write_draft=written, put_in_place=placed):
        yield


def resume(rank: Rank, told: Told, folder: Path) -> None:
    """Train in new processes, once without interruption and once from the checkpoint."""
    for name in ("whole", "resumed"):
        journal = Journal(folder / name, rank.rank)
        subject = Subject(rank, told, journal, None)
        first = 0
        if name == "resumed":
            candidates = {path.name.split("-")[1] for path in (folder / "models").iterdir()}
            first = _load(subject, folder, sorted(map(int, candidates)))
        for number in range(first, STEPS):
            subject.step(number)
        subject.close()
        journal.note("done")


def _load(subject: Subject, folder: Path, steps: list[int]) -> int:
    """Load the newest weights that fit the checkpoint of the exchange, and return their step."""
    for step in reversed(steps):
        path = folder / "models" / f"model-{step}-{subject.rank.rank}.safetensors"
        subject.net.load_state_dict(safetensors.torch.load(path.read_bytes()))
        try:
            subject.holder.load(folder / "saved")
        except syncline.SynclineError:  # Layerwise recognises weights of another step
            continue
        if (found := subject.holder.stats().steps) != step:
            continue
        return int(found)
    raise AssertionError(f"no checkpoint could be loaded from {folder}")


def tune(rank: Rank, told: Told, journal: Journal, injury: Injury | None, folder: Path) -> None:
    """Tune, and check that the weights stay the same whatever happens."""
    net = seeded(lambda: Mlp(WIDTH))
    model = DDP(net, bucket_cap_mb=BUCKET_MB)
    inputs = batch(rank.rank, 0, 8, WIDTH)
    hosts = tuple(host for host in range(rank.spec.hosts) for _ in rank.spec.ranks_of(host))
    network = made_up.network(hosts, mbit=1.0)
    calls = {"profile": 0, "plain": 0, "plan": 0}

    def step(given: nn.Module) -> None:
        part = "profile" if not isinstance(given, DDP) else "plan" if _attached(given) else "plain"
        calls[part] += 1
        if injury is not None and injury.armed and injury.place in (part, f"{part} hook") and calls[part] == 3:
            if injury.place == part:
                injury.strike()
            else:
                net.first.weight.register_hook(lambda _: injury.strike() if injury.armed else None)
        spoiled = injury is not None and injury.fault in ("nan", "inf") and not injury.armed
        (given(inputs).square().mean() * (float(told.fault) if spoiled else 1.0)).backward()

    before = hashed(net.parameters())
    try:
        tuned = syncline.tune(model, step, allow=("bf16",), budget_s=5, network=network, quiet=True)
    except RuntimeError as error:
        if isinstance(error, UserError) or (injury is not None and injury.fault not in ("stop", "cut")):
            raise
        journal.raised(error)
        journal.note("asked", what="other weights", refused=hashed(net.parameters()) == before)
        raise SurvivedError from error
    journal.note("asked", what="other weights", refused=hashed(net.parameters()) == before)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for number in range(3):
        optimizer.zero_grad()
        model(batch(rank.rank, number, 8, WIDTH)).square().mean().backward()
        optimizer.step()
        journal.note("commit", step=number, parameters=hashed(net.parameters()), layout="", kept="", finite=True)
    if tuned.handle is not None:
        tuned.handle.detach()


def _attached(model: DDP) -> bool:
    try:
        syncline.handle_of(model)
    except syncline.UsageError:
        return False
    return True


Story = Callable[[Rank, Told, Journal, "Injury | None", Path], None]


def live(rank: Rank, story: Story, told: Told, folder: Path, injury: Injury | None, timeout_s: float) -> None:
    """Run one story in a process that joins first and ends like a script."""
    global _injury
    _injury = injury
    journal = Journal(folder, rank.rank)
    stacks = (folder / f"stacks-{rank.rank}.txt").open("w")
    faulthandler.dump_traceback_later(_STUCK_S, file=stacks)  # shows where a rank hangs
    join(rank, timeout_s)
    try:
        story(rank, told, journal, injury, folder)
        journal.note("done")
    except SurvivedError:
        pass
    except BaseException as error:
        if not (injury is not None and injury.fault in ("oom", "raise", "linger")):
            journal.raised(error)
            raise
        journal.note("own", type=type(error).__name__, text=str(error))
        if injury.fault == "linger":
            _wait_for_others(rank, folder)
        end_like_a_script(error)
        raise


def _wait_for_others(rank: Rank, folder: Path) -> None:
    """Wait as in a user's `except` clause, with everything still open, until all others have raised."""
    end_s = time.monotonic() + _END_S
    while time.monotonic() < end_s:
        journals = read(folder, rank.world_size)
        if all(
            any(entry["event"] in ("raised", "done") for entry in journal)
            for number, journal in enumerate(journals)
            if number != rank.rank
        ):
            return
        time.sleep(0.1)
