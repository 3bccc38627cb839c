"""Measures a cluster's links with the collectives that exchanges use, on all ranks at once.

Every figure comes from collectives at the real number of ranks, never from a sum of point-to-point rates: what
processors cost is then in it. A sample is one collective from a standing start: rank 0 names a moment a little ahead,
links rest until then, all ranks start, and the time runs from when the last one starts to when the last one ends.
Sizes and kinds take turns, so that a disturbance hits all alike. How often each size is repeated follows from a pilot
and the time that there is.

All ranks call `probe` together. Control messages go over a gloo group of their own, also where NCCL is measured.
"""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from syncline.dist.agreement import agree
from syncline.dist.comm import GroupComm, backend_of, gather_bytes, group_device
from syncline.errors import SynclineError, UsageError, first_line
from syncline.exchange import WORLD, Counter, Topology, Work, wire
from syncline.measure import topology
from syncline.measure.fit import fit
from syncline.measure.network_fit import ITEM_BYTES, SMALL, STREAMS, Key, Readings, whole
from syncline.measure.steps import describe_hardware
from syncline.records.network import Network

REST_S = 0.012
"""How long links rest before a sample: shapers regain their credit meanwhile."""
_SIZES = (1e3, 4e3, 16e3, 64e3, 128e3, 256e3, 512e3, 1e6, 2e6, 4e6, 16e6, 32e6)
_FAST_SIZES = (128e6, 512e6)
_ALL_REDUCE_WEIGHT = 3.0
"""It is what most exchanges use, and what links and start-ups are known from."""
_SCATTERED = 64e3
"""Up to this size processors decide, and samples scatter: they need more of them."""
_FAST_S = 0.1
"""Links that carry 32 MB in less are swept with larger sizes, too."""
_TINY = 4_000
_CHAIN = 8
_FEW_HOSTS = 8

Progress = Callable[[float, float], None]
Issue = Callable[[], Sequence[Work]]


@dataclass(frozen=True)
class _Entry:
    """One thing to measure again and again: `issue` starts it on the ranks that take part."""

    key: Key
    issue: Issue
    taking_part: bool = True
    weight: float = 1.0
    """Of the time that there is."""
    chain: int = 1
    """How many follow each other in one sample, which is then their mean."""


@dataclass(frozen=True)
class _Level:
    """Ranks that meet, in groups that do not overlap; this rank's group, if it is in one."""

    name: str
    ranks: int
    comm: GroupComm | None


def probe(*, budget_s: float = 45.0, kinds: Sequence[str] = wire.KINDS, on_progress: Progress | None = None) -> Network:
    """Collective over the default process group → the same Network on every rank, after about `budget_s`."""
    if not dist.is_initialized():
        raise UsageError("probe needs a process group: run it under torchrun, or on emulated hosts")
    if dist.get_world_size() < 2:
        raise UsageError("probe needs at least two ranks: there is no link to measure with one")
    if not budget_s > 0:
        raise UsageError(f"the budget is {budget_s:g} s: probing needs some time")
    if unknown := [kind for kind in kinds if kind not in wire.KINDS]:
        raise UsageError(f"no collective is called {unknown[0]}; known: {', '.join(wire.KINDS)}")
    if "all_reduce" not in kinds:
        raise UsageError("probe needs all_reduce among its kinds: it is what links and start-ups are known from")
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(120.0, 4 * budget_s)))
    try:
        agree(control, {"budget_s": budget_s, "kinds": list(kinds)}, "how to probe")
        return _Prober(control, budget_s, tuple(kinds), on_progress).network()
    except RuntimeError as error:
        if isinstance(error, SynclineError | torch.cuda.OutOfMemoryError):
            raise
        told = f"a collective failed while probing; has another rank ended? {first_line(error)}"
        raise SynclineError(told) from error
    finally:
        dist.destroy_process_group(control)


class _Prober:
    def __init__(
        self, control: dist.ProcessGroup, budget_s: float, kinds: tuple[str, ...], on_progress: Progress | None
    ) -> None:
        self._control, self._budget_s, self._kinds = control, budget_s, kinds
        self._on_progress = on_progress if dist.get_rank() == 0 else None
        self._start_s = time.monotonic()
        world = dist.group.WORLD
        assert world is not None  # noqa: S101 - probe has checked
        self._backend = backend_of(world)
        self._device = group_device(world)
        identities = [data.decode() for data in gather_bytes(control, topology.host_identity().encode())]
        self._boots = {identity.split()[0] for identity in identities}
        self._hosts = topology.number(identities)
        self._clock_lead_s = self._estimate_clock_lead()
        self._readings = Readings(self._backend, self._hosts)
        self._groups: list[dist.ProcessGroup] = []
        self._streams: list[GroupComm | None] = []
        self._buffers: list[Tensor] = []
        self._meeting_s = 0.0

    def network(self) -> Network:
        try:
            self._streams = [self._group(range(dist.get_world_size())) for _ in range(max(STREAMS))]
            self._meeting_s = self._measure_meeting()
            levels = self._levels()
            self._sweep(levels, 0.6 * self._budget_s)
            self._measure_overlap(0.15 * self._budget_s)
            self._measure_startups(0.05 * self._budget_s)
            burst_bytes = self._measure_burst(0.08 * self._budget_s)
            matrix = self._measure_matrix(0.08 * self._budget_s, burst_bytes)
            data = b""
            if dist.get_rank() == 0:
                ranks_at = {level.name: level.ranks for level in levels}
                found = self._readings.fitted(self._cluster(matrix), ranks_at, self._kinds, burst_bytes)
                data = msgspec.json.encode(found)
            return msgspec.json.decode(gather_bytes(self._control, data)[0], type=Network)
        finally:
            for group in self._groups:
                dist.destroy_process_group(group)

    def _cluster(self, matrix: list[list[float]]) -> Network:
        """Who sits where, before anything is known of links and collectives."""
        hosts = max(self._hosts) + 1
        samples = sum(map(len, self._readings.seconds.values()))
        return Network(
            backend=self._backend,
            device=self._device.type,
            host_of_rank=self._hosts,
            rack_of_host=topology.racks(matrix) if hosts > 2 else (0,) * hosts,
            links=(),
            collectives=(),
            in_flight=1,
            matrix_bytes_per_s=tuple(tuple(row) for row in matrix),
            one_machine=len(self._boots) == 1 and hosts > 1,
            where=describe_hardware(self._device),
            how=f"probed with torch {torch.__version__}, {samples} samples",
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )

    # --- groups, clocks, samples --------------------------------------------------------------------------------

    def _group(self, ranks: Sequence[int]) -> GroupComm | None:
        """Collective over the world. Connections are opened here, not in the first sample."""
        group = dist.new_group(list(ranks), backend=self._backend)
        if dist.get_rank() not in ranks:
            return None
        self._groups.append(group)
        comm = GroupComm(group, Topology.flat(len(ranks), self._backend), Counter())
        tensor = torch.zeros(comm.size, device=self._device)
        comm.all_to_all(torch.zeros_like(tensor), tensor).wait()
        comm.all_reduce(tensor).wait()
        return comm

    def _levels(self) -> list[_Level]:
        levels = [_Level(WORLD, dist.get_world_size(), self._streams[0])]
        members = [[r for r, host in enumerate(self._hosts) if host == one] for one in range(max(self._hosts) + 1)]
        if len(members) > 1 and any(len(ranks) > 1 for ranks in members):
            mine = [self._group(ranks) for ranks in members if len(ranks) > 1]
            own = next((comm for comm in mine if comm is not None), None)
            levels.append(_Level("local", max(map(len, members)), own))
            levels.append(_Level("hosts", len(members), self._group([ranks[0] for ranks in members])))
        return levels

    def _estimate_clock_lead(self) -> float:
        """How far this rank's clock is ahead of rank 0's: the middle of the quickest of some round trips."""
        if len(self._boots) == 1:
            return 0.0
        lead_s, rank = 0.0, dist.get_rank()
        for other in range(1, dist.get_world_size()):
            best_s = float("inf")
            for _ in range(16):
                mark = torch.zeros(1, dtype=torch.float64)
                if rank == other:
                    asked = time.monotonic()
                    dist.send(mark, 0, group=self._control)
                    dist.recv(mark, 0, group=self._control)
                    answered = time.monotonic()
                    if answered - asked < best_s:
                        best_s, lead_s = answered - asked, (asked + answered) / 2 - float(mark)
                elif rank == 0:
                    dist.recv(mark, other, group=self._control)
                    mark[0] = time.monotonic()
                    dist.send(mark, other, group=self._control)
        return lead_s

    def _take(self, entries: Sequence[_Entry]) -> dict[int, float]:
        """One sample of each, in this order → seconds by place."""
        marks = torch.full((len(entries), 2), -torch.inf, dtype=torch.float64)
        for place, entry in enumerate(entries):
            self._meet()
            if entry.taking_part:
                marks[place] = self._timed(entry.issue, entry.chain)
        last = marks.clone()
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self._control)
        if self._on_progress is not None:
            self._on_progress(min(time.monotonic() - self._start_s, self._budget_s), self._budget_s)
        return {
            place: max(1e-7, float(end - start)) / entry.chain
            for place, (entry, (start, end)) in enumerate(zip(entries, last, strict=True))
        }

    def _meet(self) -> None:
        """Returns on all ranks at the same moment, after the links have rested. Everyone has to be done before."""
        dist.barrier(group=self._control)
        moment = torch.tensor([self._now() + REST_S], dtype=torch.float64)
        dist.broadcast(moment, 0, group=self._control)
        while (left_s := float(moment) - self._now()) > 0:
            time.sleep(left_s)

    def _now(self) -> float:
        return time.monotonic() - self._clock_lead_s

    def _timed(self, issue: Issue, chain: int = 1) -> Tensor:
        start = self._now()
        for _ in range(chain):
            for work in issue():
                work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return torch.tensor([start, self._now()], dtype=torch.float64)

    def _repeat(self, entries: Sequence[_Entry], budget_s: float, most: int = 60) -> None:
        """As many turns as the budget allows: cheap entries often, dear ones at least once. A first sample is not kept
        where there are many: it touches memory that later ones find warm."""
        began = time.monotonic()
        fresh = [entry for entry in entries if entry.key not in self._readings.seconds]
        firsts = self._take(fresh)
        for place, seconds in firsts.items():
            self._readings.add(fresh[place].key, seconds)
        spent_s = self._agreed(time.monotonic() - began)
        costs = [entry.chain * self._readings.seconds[entry.key][0] + self._meeting_s for entry in entries]
        counts = _share_out(budget_s - spent_s, costs, [entry.weight for entry in entries], most)
        for entry, count in zip(entries, counts, strict=True):
            if count > 3:
                self._readings.seconds[entry.key].clear()
        for turn in range(max(counts)):
            due = [
                place
                for place, count in enumerate(counts)
                if (turn + 1) * count // max(counts) > turn * count // max(counts)
            ]
            random.Random(turn).shuffle(due)  # noqa: S311 - an order, the same on all ranks
            for place, seconds in self._take([entries[index] for index in due]).items():
                self._readings.add(entries[due[place]].key, seconds)

    def _agreed(self, value: float) -> float:
        """The largest of all ranks' values: what all of them decide by."""
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)
        return float(tensor)

    def _buffer(self, numel: int, place: int) -> Tensor:
        while len(self._buffers) <= place:
            self._buffers.append(torch.zeros(0, device=self._device))
        if self._buffers[place].numel() < numel:
            # Zeros, whose sums stay zeros; written, so that their memory is there.
            self._buffers[place] = torch.ones(numel, device=self._device).zero_()
        return self._buffers[place][:numel]

    def _issue(self, comm: GroupComm | None, kind: str, numel: int, place: int = 0) -> Issue:
        if comm is not None:
            numel -= numel % comm.size  # on the smaller of unequal hosts, parts are a little smaller

        def start() -> Sequence[Work]:
            if comm is None:
                return ()
            whole = self._buffer(numel, 2 * place)
            if kind == "all_reduce":
                return (comm.all_reduce(whole),)
            if kind == "all_to_all":
                return (comm.all_to_all(self._buffer(numel, 2 * place + 1), whole),)
            if kind == "all_gather":
                return (comm.all_gather(whole, self._buffer(numel // comm.size, 2 * place + 1)),)
            return (comm.reduce(whole, 0) if kind == "reduce" else comm.broadcast(whole, 0),)

        if comm is not None:  # memory is there before the first sample
            self._buffer(numel, 2 * place)
            self._buffer(numel, 2 * place + 1)
        return start

    # --- what is measured ---------------------------------------------------------------------------------------

    def _measure_meeting(self) -> float:
        """What every sample costs beside itself."""
        nothing = _Entry((), lambda: ())
        self._take([nothing])
        began = time.monotonic()
        self._take([nothing] * 5)
        return self._agreed(time.monotonic() - began) / 5

    def _sweep(self, levels: Sequence[_Level], budget_s: float) -> None:
        """Every kind at every level, by size, up to what one call may take."""
        # Links are known from the largest all-reduces. The others share what is left: rather more often than larger.
        sweeps = len(levels) * len(self._kinds)
        entries = []
        for level in levels:
            for kind in self._kinds:
                first = (level.name, kind) == (WORLD, "all_reduce")
                sizes = [size for size in _SIZES if kind == "all_reduce" or size not in (1e3, 128e3, 512e3, 2e6, 16e6)]
                entries += self._pilot(level, kind, sizes, budget_s / (12 if first else max(12, 4 * sweeps)))
        self._repeat(entries, budget_s - self._agreed(time.monotonic() - self._start_s))

    def _pilot(self, level: _Level, kind: str, sizes: Sequence[float], longest_s: float) -> list[_Entry]:
        entries: list[_Entry] = []
        before = (0.0, 0.0)
        for size in (*sizes, *_FAST_SIZES):
            numel = whole(size, level.ranks)
            most_s = longest_s if size in sizes else min(longest_s, 4 * _FAST_S)
            if before[0] and before[1] * size / before[0] > most_s:
                break
            issue = self._issue(level.comm, kind, numel)
            weight = (_ALL_REDUCE_WEIGHT if kind == "all_reduce" else 1.0) * (2.0 if size <= _SCATTERED else 1.0)
            entry = _Entry((level.name, kind, numel), issue, level.comm is not None, weight, self._chain(size))
            if size >= 1e6:
                before = (size, self._take([entry])[0])
                self._readings.add(entry.key, before[1])
            entries.append(entry)
        return entries

    def _measure_overlap(self, budget_s: float) -> None:
        """Several at once: on groups of their own, on one group, one after the other."""
        large = self._readings.large()
        entries = []
        for kind in [kind for kind in ("all_reduce", "all_to_all") if kind in self._kinds]:
            for size in (*SMALL, large) if kind == "all_reduce" else (large,):
                numel = whole(size, dist.get_world_size())
                one = self._issue(self._streams[0], kind, numel)
                chain = self._chain(size)
                entries.append(_Entry(("streams", kind, numel, 1), one, chain=chain))
                for streams in STREAMS if kind == "all_reduce" else (2,):
                    calls = [self._issue(self._streams[i], kind, numel, i) for i in range(streams)]
                    entries.append(_Entry(("streams", kind, numel, streams), _together(calls), chain=chain))
                if size in SMALL:
                    calls = [self._issue(self._streams[0], kind, numel, i) for i in range(4)]
                    entries.append(_Entry(("in flight", kind, numel, 4), _together(calls), chain=chain))
        self._repeat(entries, budget_s)

    def _chain(self, size: float) -> int:
        """Tiny ones over sockets scatter by half, and the meeting before costs more than they do: so several at a time.
        NCCL's do not scatter, and would overlap in their queue."""
        return _CHAIN if self._backend == "gloo" and size <= max(SMALL) else 1

    def _measure_startups(self, budget_s: float) -> None:
        """A tiny all-reduce among fewer hosts, one rank of each."""
        leaders = [self._hosts.index(host) for host in range(max(self._hosts) + 1)]
        counts = tuple(sorted({2, 3, len(leaders) // 2, len(leaders)} & set(range(2, len(leaders) + 1))))
        entries = []
        for count in counts:
            comm = self._group(leaders[:count])
            numel = whole(_TINY, count)
            issue = self._issue(comm, "all_reduce", numel)
            entries.append(_Entry(("startup", count), issue, comm is not None, chain=self._chain(_TINY)))
        if entries:
            self._repeat(entries, budget_s)

    def _measure_burst(self, budget_s: float) -> float:
        """What a rested link lets pass at once: from one message, by size, from a host to another."""
        if max(self._hosts) == 0:
            return 0.0
        sender, receiver = self._hosts.index(0), self._hosts.index(1)
        rate = self._readings.rate()
        sizes = sorted({int(size) for size in np.geomspace(8e3, max(256e3, rate * 0.05), 9)})
        entries = [
            _Entry(("message", size), self._message([(sender, receiver)], size), dist.get_rank() in (sender, receiver))
            for size in sizes
        ]
        self._repeat(entries, budget_s, most=9)
        samples = {size: self._readings.seconds["message", size] for size in sizes}
        lines = fit(samples, switches=False).lines
        if lines.breakpoint is None or lines.late_s_per_byte <= lines.s_per_byte:
            return 0.0
        return max(0.0, lines.intercept_s - lines.late_intercept_s) / lines.late_s_per_byte

    def _measure_matrix(self, budget_s: float, burst_bytes: float) -> list[list[float]]:
        """Bytes per second from host to host, while every host sends to one other; a burst's credit does not count."""
        hosts = max(self._hosts) + 1
        if hosts < 2:
            return []
        leaders = [self._hosts.index(host) for host in range(hosts)]
        size = int(max(256e3, min(64e6, self._readings.rate() * 0.02)) + 6 * burst_bytes)
        rates = [[0.0] * hosts for _ in range(hosts)]
        affordable = int(budget_s / (hosts * (0.03 + 2 * REST_S)))
        enough = max(3 if hosts <= _FEW_HOSTS else 1, min(3, affordable))
        # One late process makes a link look slow, and slow links look like racks: what looks like them is measured
        # again, since racks stay, and of a link that is only late now and then the best counts.
        for repeat in range(4 * enough):
            if repeat >= enough and not self._agreed(len(set(topology.racks(rates))) > 1):
                break
            for shift in range(1, hosts):
                pairs = [(leaders[host], leaders[(host + shift) % hosts]) for host in range(hosts)]
                seconds = self._arrivals(pairs, size)
                for host in range(hosts):
                    other = (host + shift) % hosts
                    best = (size - burst_bytes) / seconds[leaders[other]]
                    rates[host][other] = best if not repeat else max(rates[host][other], best)
        return rates

    def _arrivals(self, pairs: Sequence[tuple[int, int]], size: int) -> dict[int, float]:
        """Seconds by receiving rank, from when the last rank started."""
        rank = dist.get_rank()
        message = self._message(pairs, size) if any(rank in pair for pair in pairs) else tuple
        marks = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64)
        self._meet()
        marks[rank] = self._timed(message)
        dist.all_reduce(marks, group=self._control)
        start = float(marks[:, 0].max())
        return {receiver: max(1e-7, float(marks[receiver, 1]) - start) for _, receiver in pairs}

    def _message(self, pairs: Sequence[tuple[int, int]], size: int) -> Issue:
        rank, numel = dist.get_rank(), max(1, size // ITEM_BYTES)
        everyone = self._streams[0]
        assert everyone is not None  # noqa: S101 - every rank is in it
        group = everyone.group  # NCCL opens connections lazily, and wants all ranks for that: here they are open

        def start() -> Sequence[Work]:
            operations = [dist.P2POp(dist.isend, self._buffer(numel, 0), to, group) for by, to in pairs if rank == by]
            operations += [dist.P2POp(dist.irecv, self._buffer(numel, 1), by, group) for by, to in pairs if rank == to]
            return cast(Sequence[Work], dist.batch_isend_irecv(operations))

        return start


def _share_out(budget_s: float, costs: Sequence[float], weights: Sequence[float], most: int) -> list[int]:
    """How often each may be repeated: time by weight, and what some do not use goes to the others."""
    counts = [0] * len(costs)
    left_s, left_weight = budget_s, sum(weights)
    for place in sorted(range(len(costs)), key=lambda place: costs[place] / weights[place]):
        share_s = max(0.0, left_s) * weights[place] / left_weight
        counts[place] = min(most, int(share_s / costs[place]))
        left_s -= counts[place] * costs[place]
        left_weight -= weights[place]
    return counts


def _together(calls: Sequence[Issue]) -> Issue:
    return lambda: [work for call in calls for work in call()]
