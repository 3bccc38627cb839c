"""Measure what computation and exchanges take from each other, in training steps of the model itself.

When the first gradients of a step are ready, a bucket is submitted to a lane. The exchange runs all its passes over the
bucket, but its collectives carry only some bytes, so that the rate of the links does not matter. The same happens again
when the optimizer has stepped. All ranks do this together, because they share processors in training, too. Times on a
quiet machine are subtracted: predictions take those from the network.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.dist.agreement import current_device
from syncline.dist.comm import GroupComm, backend_of, close_lanes, open_lanes
from syncline.dist.lane import Job
from syncline.exchange import Comm, Dense, Exchange, Layout, State, Topology, wire
from syncline.exchange import Work as IssuedWork
from syncline.measure.overhead import SilentComm, fit_work
from syncline.measure.steps import Clock, Subject, checked_loss, run_on_all_ranks
from syncline.measure.tiny_comm import TinyComm, issue_tiny
from syncline.records.profile import Contention, UnderLoad

_ROUNDS, _WARMUP = 6, 2
_CHAIN, _QUIET_SAMPLES = 8, 4
_LARGEST_BYTES = 25 << 20
_REAL_BYTES = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Size of the all-reduce whose bytes are really sent, to find what they take from computation."""
_MOST_TAKEN, _MOST_CROWDED = 0.9, 4.0
_MOST_REST = 0.8
"""If more of an exchange runs after backward, too little of it runs beside backward to tell how long that takes."""
_TIMEOUT = timedelta(seconds=120)


def measure_contention(
    model: nn.Module,
    step: Callable[[nn.Module], Tensor],
    optimizer: torch.optim.Optimizer | None,
    exchanges: Mapping[str, Callable[[], Exchange]],
    topology: Topology,
    *,
    group: dist.ProcessGroup | None = None,
    rounds: int = _ROUNDS,
) -> Contention:
    """Measure what computation and exchanges take from each other. Collective over the ranks of `group`.

    With an optimizer, the steps train the model. Times are means over `rounds` steps of each exchange, in turns.

    Args:
        model: The model, without DDP.
        step: A function that runs one forward pass and returns the loss.
        optimizer: The model's optimizer, if it is to step, too.
        exchanges: The exchanges, by name. Plain all-reduces are measured in any case, as `dense`.
        topology: The topology of the group.
        group: The ranks that train together. Default: the default process group.
        rounds: Number of measured steps of each exchange and size.
    """
    whole = group or dist.group.WORLD
    assert whole is not None  # noqa: S101 - the caller has a process group
    subject = Subject.of(model)
    meter = _Meter(subject, step, optimizer, topology, whole)
    with current_device(subject.device):
        try:
            return meter.measured({"dense": Dense, **exchanges}, rounds)
        finally:
            meter.close()


@dataclass
class _Trial:
    """An exchange of buckets of one size, and the marks of its rounds."""

    name: str
    nbytes: int
    exchange: Exchange
    start: Tensor
    lanes: list[tuple[Tensor, State, Comm]]  # the bucket, its state and its comm on each lane
    waits: bool
    backward: list[tuple[Any, Any]] = field(default_factory=list)
    beside: list[tuple[Any, Any]] = field(default_factory=list)  # submitted, ended: while the model computes
    alone: list[tuple[Any, Any]] = field(default_factory=list)
    pair: list[tuple[Any, Any]] = field(default_factory=list)  # two lanes at once

    @property
    def calls(self) -> Mapping[tuple[str, str], int]:
        """Collectives of one bucket."""
        comm = self.lanes[0][2] if self.lanes else None
        if not isinstance(comm, TinyComm):
            return {}
        buckets = len(self.beside) + len(self.alone) + len(self.pair)
        return {key: round(count / max(1, buckets)) for key, count in comm.calls.items()}


class _Times(msgspec.Struct, frozen=True):
    """The seconds of one rank, in each round."""

    backward: list[float]
    overlapped: list[float]  # from the bucket's submission until it ended or backward did
    beside: list[float]
    alone: list[float]
    pair: list[float]


class _Meter:
    def __init__(
        self,
        subject: Subject,
        step: Callable[[nn.Module], Tensor],
        optimizer: torch.optim.Optimizer | None,
        topology: Topology,
        group: dist.ProcessGroup,
    ) -> None:
        self._subject, self._step, self._optimizer = subject, step, optimizer
        self._topology, self._group = topology, group
        self._device, self._clock = subject.device, Clock(subject.device)
        self._on_gradient: Callable[[], None] = lambda: None
        self._hooks = subject.on_gradients(lambda _: self._gradient())
        with_backend = dataclasses.replace(topology, backend=backend_of(group))
        self._groups, self._lanes = open_lanes(group, _TIMEOUT, 2, self._device, with_backend)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        close_lanes(self._lanes, self._groups)

    def _gradient(self) -> None:
        submit, self._on_gradient = self._on_gradient, lambda: None
        submit()

    def measured(self, exchanges: Mapping[str, Callable[[], Exchange]], rounds: int) -> Contention:
        gradient_bytes = sum(parameter.nbytes for parameter in self._subject.parameters.values())
        largest = min(_LARGEST_BYTES, max(gradient_bytes, 1 << 16))
        # They divide evenly by the ranks, so that all would send equal parts.
        part_bytes = 4 * self._topology.ranks
        sizes = [part_bytes << max(0, int(math.log2(size / part_bytes))) for size in (largest / 8, largest)]
        plain = _Trial("", 0, Dense(), torch.empty(0), [], False)
        trials = [self._trial(name, make(), size) for name, make in exchanges.items() for size in sizes]
        real = self._trial("", Dense(), _REAL_BYTES[self._device.type], real=True)
        everything = [plain, real, *trials]
        for number in range(_WARMUP + rounds):
            for trial in everything:
                self._take(trial)
            if number + 1 == _WARMUP:
                for trial in everything:
                    self._forget(trial)
        self._clock.settle()
        mine = [self._times(trial) for trial in everything]
        ranks = [
            msgspec.json.decode(answer, type=list[_Times])
            for answer in run_on_all_ranks(self._group, lambda: msgspec.json.encode(mine))
        ]
        quiet = self._quiet({key for trial in trials for key in trial.calls})
        plain_s = _mean_over_ranks([rank[0].backward for rank in ranks])
        fitted = {}
        for name in dict.fromkeys(trial.name for trial in trials):
            parts = [index for index, trial in enumerate(everything) if trial.name == name and trial.lanes]
            parts = [index for index in parts if everything[index] is not real]
            startups = [sum(quiet[key] * count for key, count in everything[index].calls.items()) for index in parts]
            measured = [[rank[index] for rank in ranks] for index in parts]
            fitted[name] = _under_load(sizes, measured, startups, plain_s)
        sent = wire.sent_bytes("all_reduce", real.nbytes // 4, 4, self._topology.ranks, self._topology.backend)
        sending = [rank[1] for rank in ranks]
        return Contention(
            exchanges=fitted,
            taken_s_per_byte=_taken_s_per_byte(sending, plain_s, sent),
            sending=max(1.0, _beside_s(sending) / _since_last([rank.alone for rank in sending])),
        )

    def _trial(self, name: str, exchange: Exchange, nbytes: int, real: bool = False) -> _Trial:
        numel, lanes = nbytes // 4, []
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(numel, generator=generator, dtype=torch.float32).to(self._device)
        for groups in self._groups:
            echoing = SilentComm(self._topology, echo=True)
            flat = start.clone()
            state = exchange.prepare(Layout.flat(numel, device=self._device), echoing)
            if not real:
                exchange.run(flat, state, echoing)
            comm: Comm = groups.comm if real else TinyComm(self._topology, comm=groups.comm)
            lanes.append((flat, state, comm))
        return _Trial(name, nbytes, exchange, start, lanes, exchange.waits)

    def _forget(self, trial: _Trial) -> None:
        for marks in (trial.backward, trial.beside, trial.alone, trial.pair):
            marks.clear()
        for _, _, comm in trial.lanes:
            if isinstance(comm, TinyComm):
                comm.calls.clear()

    def _take(self, trial: _Trial) -> None:
        """Take one step beside which a bucket is exchanged, and exchange more buckets after it."""
        futures: list[Any] = []
        for flat, _, _ in trial.lanes:
            flat.copy_(trial.start)  # repeated sums would overflow
        self._subject.model.zero_grad()
        run_on_all_ranks(self._group, lambda: b"")
        loss = checked_loss(self._step(self._subject.model))
        if trial.lanes:
            self._on_gradient = lambda: futures.append(self._submit(trial, 0, trial.beside))
        began = self._clock.mark()
        loss.backward()
        trial.backward.append((began, self._clock.mark()))
        self._on_gradient = lambda: None
        if self._optimizer is not None:
            self._optimizer.step()
        for future in futures:
            future.wait()
        if not trial.lanes:
            return
        self._submit(trial, 0, trial.alone).wait()
        marks: list[tuple[Any, Any]] = []
        both = [self._submit(trial, lane, marks) for lane in range(len(trial.lanes))]
        for future in both:
            future.wait()
        self._clock.settle()
        since_first = functools.partial(self._clock.seconds, marks[0][0])
        submitted, ended = zip(*marks, strict=True)
        trial.pair.append((min(submitted, key=since_first), max(ended, key=since_first)))

    def _submit(self, trial: _Trial, lane: int, into: list[tuple[Any, Any]]) -> Any:
        flat, state, comm = trial.lanes[lane]
        submitted = self._clock.mark()

        def run() -> IssuedWork | None:
            state.begin(0, None)
            if not state.average(1 / self._topology.ranks):
                flat.mul_(1 / self._topology.ranks)
            return trial.exchange.run(flat, state, comm)

        def done(job: Job) -> None:
            finite = state.finite(flat)
            if state.settles:
                state.settle(finite)
            into.append((submitted, self._clock.mark()))

        job = Job(0, lane, flat, run, trial.waits)
        job.on_done = done
        return self._lanes[lane].submit(job)

    def _times(self, trial: _Trial) -> _Times:
        seconds = self._clock.seconds
        overlapped = []
        for (began, ended), (submitted, done) in zip(trial.backward, trial.beside, strict=False):
            until_s = min(seconds(began, ended), seconds(began, done))
            overlapped.append(until_s - seconds(began, submitted))
        durations = [[seconds(*pair) for pair in pairs] for pairs in (trial.beside, trial.alone, trial.pair)]
        return _Times([seconds(*pair) for pair in trial.backward], overlapped, *durations)

    def _quiet(self, keys: set[tuple[str, str]]) -> dict[tuple[str, str], float]:
        """Return the seconds of tiny collectives on a quiet machine, one after the other."""
        comm, medians = self._groups[0].comm, list[float]()
        for level, kind in sorted(keys):
            own = comm if level == self._topology.whole.name else comm.level(level)
            samples = []
            for _ in range(_QUIET_SAMPLES):
                run_on_all_ranks(self._group, lambda: b"")
                before = self._clock.mark()
                for _ in range(_CHAIN if own is not None else 0):
                    issue_tiny(cast(GroupComm, own), kind, self._device).wait()
                after = self._clock.mark()
                self._clock.settle()
                samples.append(self._clock.seconds(before, after) / _CHAIN)
            medians.append(statistics.median(samples))
        answers = run_on_all_ranks(self._group, lambda: msgspec.json.encode(medians))
        ranks = [msgspec.json.decode(answer, type=list[float]) for answer in answers]
        return dict(zip(sorted(keys), map(max, zip(*ranks, strict=True)), strict=True))


def _mean_over_ranks(ranks: Sequence[Sequence[float]]) -> float:
    return statistics.mean(map(statistics.median, ranks))


def _usual(rounds: Sequence[float]) -> float:
    """Return the mean without the largest value. Waiting for a processor takes either no time or milliseconds, and the
    steps of a training sum up many such times: a median would leave them out."""
    ordered = sorted(rounds)
    return statistics.mean(ordered[:-1] or ordered)


def _since_last(ranks: Sequence[Sequence[float]]) -> float:
    """Return the usual time of a bucket from when the last rank submitted it: that rank's is the shortest."""
    return _usual([min(times) for times in zip(*ranks, strict=True)])


def _lost_s(ranks: Sequence[_Times], plain_s: float) -> float:
    """Return how much longer backward takes beside an exchange."""
    return max(0.0, _mean_over_ranks([rank.backward for rank in ranks]) - plain_s)


def _under_load(
    sizes: Sequence[int], measured: Sequence[Sequence[_Times]], startups: Sequence[float], plain_s: float
) -> UnderLoad:
    beside, alone, pairs = [], [], []
    lost_s = worked_s = 0.0
    for ranks, startup_s in zip(measured, startups, strict=True):
        alone_s = _since_last([rank.alone for rank in ranks])
        pair_s = _since_last([rank.pair for rank in ranks])
        beside_s = _beside_s(ranks)
        own_s = [max(1e-6, seconds - startup_s) for seconds in (beside_s, alone_s)]
        beside.append(max(own_s))
        alone.append(own_s[1])
        pairs.append(max(1e-6, pair_s - startup_s))
        lost_s += _lost_s(ranks, plain_s)
        worked_s += _overlapped_s(ranks) * own_s[0] / max(own_s[0], beside_s)
    return UnderLoad(
        beside=fit_work(sizes, beside),
        alone=fit_work(sizes, alone),
        crowded=min(_MOST_CROWDED, max(1.0, sum(pairs) / sum(alone))),
        taken=min(_MOST_TAKEN, lost_s / worked_s) if worked_s > 0 else 0.0,
    )


def _overlapped_s(ranks: Sequence[_Times]) -> float:
    """Return for how long an exchange ran beside backward."""
    all_s = _since_last([rank.beside for rank in ranks])
    return min(all_s, _mean_over_ranks([rank.overlapped for rank in ranks]))


def _beside_s(ranks: Sequence[_Times]) -> float:
    """Return how long an exchange would take if the model computed all the time."""
    all_s, overlapped_s = _since_last([rank.beside for rank in ranks]), _overlapped_s(ranks)
    alone_s = _since_last([rank.alone for rank in ranks])
    rest = (all_s - overlapped_s) / alone_s  # the share of the exchange that ran after backward
    return overlapped_s / (1 - rest) if rest < _MOST_REST else max(all_s, alone_s)


def _taken_s_per_byte(ranks: Sequence[_Times], plain_s: float, sent: int) -> float:
    overlapped_s, took_s = _overlapped_s(ranks), _since_last([rank.beside for rank in ranks])
    return _lost_s(ranks, plain_s) / overlapped_s * took_s / sent if overlapped_s > 0 else 0.0
