"""Measure a cluster's links with the collectives that exchanges use, on all ranks at once.

Every figure comes from collectives among the real number of ranks, never from a sum of point-to-point rates, so that
it includes the cost of the processors. Control messages use a separate gloo group, also when NCCL is measured.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from syncline.dist.agreement import agree
from syncline.dist.comm import GroupComm, backend_of, gather_bytes, group_device, open_connections
from syncline.errors import SynclineError, UsageError, first_line
from syncline.exchange import WORLD, Topology, Work, wire
from syncline.measure import topology
from syncline.measure.fit import fit
from syncline.measure.network_fit import ITEM_BYTES, SMALL, STREAMS, Readings, even_elements, measured_kinds
from syncline.measure.sampling import REST_S, Entry, Issue, Progress, Sampler
from syncline.measure.steps import describe_hardware
from syncline.records.network import Network

_SIZES = (1e3, 4e3, 16e3, 64e3, 128e3, 256e3, 512e3, 1e6, 2e6, 4e6, 16e6, 32e6)
_ALL_REDUCE_ONLY = (1e3, 128e3, 512e3, 2e6, 16e6)  # sizes at which only the all-reduce is measured
_FAST_SIZES = (128e6, 512e6)  # further sizes for fast links
_FAST_S = 0.1  # links that carry 32 MB in less time are measured with `_FAST_SIZES`, too
# The all-reduce gets more time: most exchanges use it, and link rates and start-ups are derived from it.
_ALL_REDUCE_WEIGHT = 3.0
_SCATTERED = 64e3  # up to this size processors decide the time and samples scatter, so more samples are needed
_TINY = 4_000
_CHAIN = 8
_FEW_HOSTS = 8


@dataclass(frozen=True)
class _Level:
    """A level of the topology, with the group of this rank if it belongs to one."""

    name: str
    ranks: int
    comm: GroupComm | None


def probe(*, budget_s: float = 45.0, kinds: Sequence[str] = wire.KINDS, on_progress: Progress | None = None) -> Network:
    """Measure the links between all ranks of the default process group. Collective.

    Args:
        budget_s: About how many seconds to measure for.
        kinds: The collectives to measure. They must include `all_reduce`.
        on_progress: Called on rank 0 with the seconds spent and the budget.

    Returns:
        The network, the same on every rank.

    Raises:
        UsageError: There is no process group with two or more ranks, or an argument is not valid.
        SynclineError: A collective failed.
    """
    if not dist.is_initialized():
        raise UsageError("probe needs a process group: run it under torchrun, or on emulated hosts")
    if dist.get_world_size() < 2:
        raise UsageError("probe needs at least two ranks: there is no link to measure with one")
    if not budget_s > 0:
        raise UsageError(f"budget_s must be greater than 0, not {budget_s:g}")
    if unknown := [kind for kind in kinds if kind not in (*wire.KINDS, wire.REDUCE_SCATTER)]:
        raise UsageError(f"no collective is called {unknown[0]}; known: {', '.join(wire.KINDS)}")
    if "all_reduce" not in kinds:
        raise UsageError("probe needs all_reduce among its kinds: link rates and start-ups are derived from it")
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(120.0, 4 * budget_s)))
    try:
        agree(control, {"budget_s": budget_s, "kinds": list(kinds)}, "how to probe")
        return _Prober(control, budget_s, tuple(kinds), on_progress).network()
    except RuntimeError as error:
        if isinstance(error, SynclineError | torch.cuda.OutOfMemoryError):
            raise
        raise SynclineError(
            f"a collective failed while probing; has another rank ended? {first_line(error)}"
        ) from error
    finally:
        dist.destroy_process_group(control)


class _Prober:
    def __init__(
        self, control: dist.ProcessGroup, budget_s: float, kinds: tuple[str, ...], on_progress: Progress | None
    ) -> None:
        self._control, self._budget_s, self._kinds = control, budget_s, kinds
        world = dist.group.WORLD
        assert world is not None  # noqa: S101 - probe has checked
        self._backend = backend_of(world)
        self._device = group_device(world)
        identities = [data.decode() for data in gather_bytes(control, topology.host_identity().encode())]
        self._one_boot = len({identity.split()[0] for identity in identities}) == 1
        self._host_of_rank = topology.number(identities)
        self._hosts = max(self._host_of_rank) + 1
        self._leaders = [self._host_of_rank.index(host) for host in range(self._hosts)]
        self._readings = Readings(self._backend, self._host_of_rank)
        progress = on_progress if dist.get_rank() == 0 else None
        self._sampler = Sampler(control, self._device, self._readings, budget_s, progress, one_clock=self._one_boot)
        self._groups: list[dist.ProcessGroup] = []
        self._streams: list[GroupComm | None] = []

    def network(self) -> Network:
        try:
            self._streams = [self._group(range(dist.get_world_size())) for _ in range(max(STREAMS))]
            self._sampler.measure_meeting()
            levels = self._levels()
            self._sweep(levels, 0.6 * self._budget_s)
            self._measure_overlap(0.15 * self._budget_s)
            self._measure_startups(0.05 * self._budget_s)
            burst_bytes = self._measure_burst(0.08 * self._budget_s)
            matrix = self._measure_matrix(0.08 * self._budget_s, burst_bytes)
            data = b""
            if dist.get_rank() == 0:
                ranks_at = {level.name: level.ranks for level in levels}
                cluster = self._unmeasured_network(matrix)
                data = msgspec.json.encode(self._readings.fitted(cluster, ranks_at, self._kinds, burst_bytes))
            return msgspec.json.decode(gather_bytes(self._control, data)[0], type=Network)
        finally:
            for group in self._groups:
                dist.destroy_process_group(group)

    def _unmeasured_network(self, matrix: list[list[float]]) -> Network:
        """Return a network with the topology only, without links and collectives."""
        samples = sum(map(len, self._readings.seconds.values()))
        return Network(
            backend=self._backend,
            device=self._device.type,
            host_of_rank=self._host_of_rank,
            rack_of_host=topology.racks(matrix) if self._hosts > 2 else (0,) * self._hosts,
            links=(),
            collectives=(),
            in_flight=1,
            matrix_bytes_per_s=tuple(tuple(row) for row in matrix),
            one_machine=self._one_boot and self._hosts > 1,
            where=describe_hardware(self._device),
            how=f"probed with torch {torch.__version__}, {samples} samples",
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )

    def _group(self, ranks: Sequence[int]) -> GroupComm | None:
        """Create a group and open its connections, so that the first sample does not include that. Collective."""
        group = dist.new_group(list(ranks), backend=self._backend)
        if dist.get_rank() not in ranks:
            return None
        self._groups.append(group)
        native = dataclasses.replace(Topology.flat(len(ranks), self._backend), paced_bytes=wire.NEVER_BYTES)
        comm = GroupComm(group, native)
        open_connections(comm)
        return comm

    def _levels(self) -> list[_Level]:
        levels = [_Level(WORLD, dist.get_world_size(), self._streams[0])]
        members = [[rank for rank, of in enumerate(self._host_of_rank) if of == host] for host in range(self._hosts)]
        if len(members) > 1 and any(len(ranks) > 1 for ranks in members):
            comms = [self._group(ranks) for ranks in members if len(ranks) > 1]
            own = next((comm for comm in comms if comm is not None), None)
            levels.append(_Level("local", max(map(len, members)), own))
            levels.append(_Level("hosts", len(members), self._group(self._leaders)))
        return levels

    def _sweep(self, levels: Sequence[_Level], budget_s: float) -> None:
        """Measure every collective at every level and size, up to the longest call that the budget allows."""
        # The world's all-reduce may take longest, because link rates come from its largest sizes. For the others, more
        # samples are better than larger sizes.
        entries = []
        kinds = [(level, kind) for level in levels for kind in measured_kinds(self._kinds, level.ranks, self._backend)]
        for level, kind in kinds:
            share = 12 if (level.name, kind) == (WORLD, "all_reduce") else max(12, 4 * len(kinds))
            sizes = [size for size in _SIZES if kind == "all_reduce" or size not in _ALL_REDUCE_ONLY]
            entries += self._pilot(level, kind, sizes, budget_s / share)
        self._sampler.repeat(entries, budget_s - self._sampler.elapsed_s())

    def _pilot(self, level: _Level, kind: str, sizes: Sequence[float], longest_s: float) -> list[Entry]:
        """Return entries for the sizes that take at most about `longest_s`; large ones are sampled once to find out."""
        entries: list[Entry] = []
        before = (0.0, 0.0)
        for size in (*sizes, *_FAST_SIZES):
            numel = even_elements(size, level.ranks)
            most_s = longest_s if size in sizes else min(longest_s, 4 * _FAST_S)
            if before[0] and before[1] * size / before[0] > most_s:
                break
            issue = self._sampler.collective(level.comm, kind, numel)
            weight = (_ALL_REDUCE_WEIGHT if kind == "all_reduce" else 1.0) * (2.0 if size <= _SCATTERED else 1.0)
            entry = Entry((level.name, kind, numel), issue, level.comm is not None, weight, self._chain(size))
            if size >= 1e6:
                before = (size, self._sampler.take([entry])[0])
                self._readings.add(entry.key, before[1])
            entries.append(entry)
        return entries

    def _measure_overlap(self, budget_s: float) -> None:
        """Measure several collectives at once, on separate groups."""
        large = self._readings.large()
        entries = []
        for kind in [kind for kind in ("all_reduce", "all_to_all") if kind in self._kinds]:
            for size in (*SMALL, large) if kind == "all_reduce" else (large,):
                numel = even_elements(size, dist.get_world_size())
                chain = self._chain(size)
                alone = self._sampler.collective(self._streams[0], kind, numel)
                entries.append(Entry(("streams", kind, numel, 1), alone, chain=chain))
                for streams in STREAMS if kind == "all_reduce" else (2,):
                    calls = [self._sampler.collective(self._streams[i], kind, numel, i) for i in range(streams)]
                    entries.append(Entry(("streams", kind, numel, streams), _issue_all(calls), chain=chain))
        self._sampler.repeat(entries, budget_s)

    def _chain(self, size: float) -> int:
        """Return the number of collectives per sample. Tiny collectives over sockets scatter by half, and take less
        time than the meeting before a sample, so several are timed together. NCCL's do not scatter, and would overlap
        in their queue."""
        return _CHAIN if self._backend == "gloo" and size <= max(SMALL) else 1

    def _measure_startups(self, budget_s: float) -> None:
        """Measure a tiny all-reduce among fewer hosts, with one rank of each."""
        counts = sorted({2, 3, self._hosts // 2, self._hosts} & set(range(2, self._hosts + 1)))
        entries = []
        for count in counts:
            comm = self._group(self._leaders[:count])
            issue = self._sampler.collective(comm, "all_reduce", even_elements(_TINY, count))
            entries.append(Entry(("startup", count), issue, comm is not None, chain=self._chain(_TINY)))
        if entries:
            self._sampler.repeat(entries, budget_s)

    def _measure_burst(self, budget_s: float) -> float:
        """Return the bytes that an idle link carries before its rate applies, from single messages of several sizes."""
        if self._hosts == 1:
            return 0.0
        pair = (self._leaders[0], self._leaders[1])
        sizes = sorted({int(size) for size in np.geomspace(8e3, max(256e3, self._readings.rate() * 0.05), 9)})
        entries = [Entry(("message", size), self._messages([pair], size), dist.get_rank() in pair) for size in sizes]
        self._sampler.repeat(entries, budget_s, most=9)
        samples = {size: self._readings.seconds["message", size] for size in sizes}
        lines = fit(samples, switches=False).lines
        if lines.breakpoint is None or lines.last.s_per_byte <= lines.first.s_per_byte:
            return 0.0
        return max(0.0, lines.first.intercept_s - lines.last.intercept_s) / lines.last.s_per_byte

    def _measure_matrix(self, budget_s: float, burst_bytes: float) -> list[list[float]]:
        """Return bytes per second from host to host, without the burst, while every host sends to one other."""
        hosts, leaders = self._hosts, self._leaders
        if hosts < 2:
            return []
        size = int(max(256e3, min(64e6, self._readings.rate() * 0.02)) + 6 * burst_bytes)
        rates = [[0.0] * hosts for _ in range(hosts)]
        affordable = int(budget_s / (hosts * (0.03 + 2 * REST_S)))
        enough = max(3 if hosts <= _FEW_HOSTS else 1, min(3, affordable))
        # One late process makes a link look slow, and slow links look like racks. So apparent racks are measured again,
        # and the best rate of each link counts: real racks remain.
        for repeat in range(4 * enough):
            if repeat >= enough and not self._sampler.largest(len(set(topology.racks(rates))) > 1):
                break
            for shift in range(1, hosts):
                receivers = [leaders[(host + shift) % hosts] for host in range(hosts)]
                issue = self._messages(list(zip(leaders, receivers, strict=True)), size)
                for host, seconds in enumerate(self._sampler.arrivals(issue, receivers)):
                    other = (host + shift) % hosts
                    rates[host][other] = max(rates[host][other], (size - burst_bytes) / seconds)
        return rates

    def _messages(self, pairs: Sequence[tuple[int, int]], size: int) -> Issue:
        """Return a function that sends one message from the first to the second rank of each pair."""
        rank, numel = dist.get_rank(), max(1, size // ITEM_BYTES)
        if not any(rank in pair for pair in pairs):
            return tuple
        world = self._streams[0]
        assert world is not None  # noqa: S101 - every rank is in it
        group = world.group  # its connections are open; NCCL would need all ranks to open new ones

        def start() -> Sequence[Work]:
            buffer = self._sampler.buffer
            operations = [dist.P2POp(dist.isend, buffer(numel, 0), to, group) for by, to in pairs if rank == by]
            operations += [dist.P2POp(dist.irecv, buffer(numel, 1), by, group) for by, to in pairs if rank == to]
            return cast(Sequence[Work], dist.batch_isend_irecv(operations))

        return start


def _issue_all(calls: Sequence[Issue]) -> Issue:
    return lambda: [work for call in calls for work in call()]
