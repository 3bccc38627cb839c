"""Search for the best schedule: which gradients form a bucket, the number of lanes, and the exchange of each bucket.

It simulates the exact optimum for one lane (`fusion.optimal`) with each exchange, DDP's own buckets, constant sizes and
the published planners; for few gradients, all layouts. From the best few it moves boundaries between buckets, changes
lanes and swaps exchanges, as long as that helps. It is deterministic: its effort is counted in simulated collectives.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, Dense, Exchange, default_lanes, wire
from syncline.plan import fusion
from syncline.predict import Prediction, Schedule, predict
from syncline.predict.exchange_time import pricing, topology_of
from syncline.predict.schedule import DDP_CAPS, MIB, real_dtype
from syncline.records.bucket_caps import caps_of, filled
from syncline.records.network import Network
from syncline.records.profile import Profile

ALLOWED = {
    "bf16": ("bf16", "hierarchical+bf16"),
    "fp16": ("fp16",),
    "int8": ("int8",),
    "int4": ("int4", "hierarchical+int4"),
    "int3": ("int3",),
    "sparse": ("oktopk", "hierarchical+oktopk"),
}
"""Names for `allow`, the gentlest first, and the lossy exchanges that each adds to the lossless ones."""
LEAST_GAIN = 0.02  # smallest share of a step that a plan must save; otherwise plain DDP is kept
_CONSTANT = (0.04, 0.2, 1.0, 4.0)  # bucket sizes to try, as multiples of DDP's: 1, 5, 25 and 100 MB by default
_LANES = (1, 2, 4)
_EFFORT = 9_000  # approximate number of collectives that are simulated to improve the starting points
_LARGEST = 600  # schedules with more collectives per step than this, and than gradients, are not simulated
_PER_BUCKET = 1e-4  # share of a step that another bucket must save: each adds a hook, a copy and a collective
_FEW = 8  # up to this number of gradients, all layouts are simulated
_STARTS = 3  # number of layouts that are improved
_SEARCHED = "searched"

Buckets = tuple[tuple[int, ...], ...]  # indices into the profile's gradients
_PUBLISHED: dict[str, tuple[Callable[[fusion.Gradients], fusion.Sizes], int]]
_PUBLISHED = {"wfbp": (fusion.wfbp, 1), "mgwfbp": (fusion.mgwfbp, 1), "asc": (fusion.asc, 2)}
"""Published planners, and their number of lanes."""


@dataclass(frozen=True)
class Candidate:
    """A schedule and its predicted time."""

    name: str
    schedule: Schedule
    seconds: float


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    plain: Prediction
    best: Prediction  # the best allowed schedule; `plain` if none is faster
    candidates: tuple[Candidate, ...]  # the best schedule of each kind, sorted by time

    @property
    def nothing(self) -> bool:
        """Whether plain DDP is kept, because nothing saves enough."""
        return self.best.iteration_s >= (1 - LEAST_GAIN) * self.plain.iteration_s


def check_allowed(allow: Sequence[str]) -> tuple[str, ...]:
    """Return the names in a fixed order, each once. Raises `UsageError` for an unknown name."""
    if isinstance(allow, str):
        raise UsageError(f"allow={allow!r}: pass a tuple of names, like ({allow!r},)")
    for name in allow:
        if name not in ALLOWED:
            raise UsageError(f"allow={name!r}: must be one of {', '.join(ALLOWED)}")
    return tuple(name for name in ALLOWED if name in allow)


def options(network: Network, allow: Sequence[str] = ()) -> dict[str, Exchange]:
    """Return the exchanges to choose from on this network, by name, lossless ones first."""
    names = ["dense", "hierarchical", *(name for kind in check_allowed(allow) for name in ALLOWED[kind])]
    leveled = network.ranks > network.hosts > 1
    if network.hosts > network.racks > 1:  # found by the probe, which may not have measured what levels need
        leveled = leveled or {measured.kind for measured in network.collectives} >= set(wire.KINDS)
    return {name: EXCHANGES[name]() for name in names if leveled or not name.startswith("hierarchical")}


def search(
    profile: Profile,
    network: Network,
    allow: Sequence[str] = (),
    paced: bool = False,
    caps: Sequence[int] = DDP_CAPS,
    own_buckets: bool = False,
) -> SearchResult:
    """Search for the best schedule. `make_plan` describes the arguments."""
    found = _Search(profile, network, options(network, allow), paced, caps)
    return found.run_with_own_buckets() if own_buckets else found.run()


def named(profile: Profile, network: Network, name: str) -> Schedule:
    """Return the schedule of a published planner: `wfbp`, `mgwfbp` or `asc`."""
    planner, lanes = _PUBLISHED[name]
    dense = _Search(profile, network, {"dense": Dense()}, False, DDP_CAPS)
    return dataclasses.replace(dense.schedule(dense.cut(planner(dense.linear())), ["dense"], lanes), name=name)


class _Search:
    def __init__(
        self, profile: Profile, network: Network, exchanges: dict[str, Exchange], paced: bool, caps: Sequence[int]
    ) -> None:
        self._profile, self._network, self._exchanges = profile, network, exchanges
        self._own, self._cap = filled(profile.gradients, caps), caps[-1]
        self._topology = topology_of(network)
        self._phases = functools.cache(
            lambda name, numel, dtype: len(exchanges[name].cost(numel, dtype, self._topology).phases)
        )
        self._predict = functools.partial(predict, profile, network, paced=paced, topology=self._topology)
        self._known: dict[tuple[object, ...], float] = {}
        self._effort = 0
        self._kinds: dict[str, Candidate] = {}
        by_dtype = collections.Counter[str]()
        for gradient in profile.gradients:
            by_dtype[gradient.dtype] += gradient.bytes
        self._dtype = real_dtype(by_dtype.most_common(1)[0][0])
        self._uneven = len(by_dtype) > 1 or not all(gradient.bytes for gradient in profile.gradients)
        total = max(1, profile.gradient_bytes)
        self._grid = np.unique(np.concatenate([[0.0], np.geomspace(min(256.0, total), total, 48)]))

    def run(self) -> SearchResult:
        plain = self._predict(Schedule("ddp", self._own))
        starts = [self._try("DDP's buckets", self._own, [name], 1) for name in self._exchanges]
        starts += [*self._common_layouts(), *self._fused()]
        if len(self._profile.gradients) <= _FEW:
            starts += self._all_layouts()
        ranked = sorted({_key(start.schedule): start for start in starts}.values(), key=_rank)
        return self._result(plain, min((self._improve(start) for start in ranked[:_STARTS]), key=_rank))

    def run_with_own_buckets(self) -> SearchResult:
        """Compare exchanges and lanes for DDP's own buckets."""
        tried = [self._try("DDP's buckets", self._own, [name], lanes) for name in self._exchanges for lanes in _LANES]
        return self._result(self._predict(Schedule("ddp", self._own)), min(tried, key=_rank))

    def _result(self, plain: Prediction, best: Candidate) -> SearchResult:
        kinds = sorted(self._kinds.values(), key=lambda candidate: candidate.seconds)
        chosen = self._predict(best.schedule)
        return SearchResult(plain, chosen if chosen.iteration_s < plain.iteration_s else plain, tuple(kinds))

    def _common_layouts(self) -> Iterator[Candidate]:
        """Try constant sizes with each exchange, and the published planners."""
        multiples = [max(1, int(self._cap * part)) for part in _CONSTANT]
        parts = [self._profile.gradient_bytes // parts + 1 for parts in (1, 2, 3, 4, 6, 8, 12, 16)]
        for name, exchange in self._exchanges.items():
            lanes = default_lanes(exchange, self._network.backend)
            for cap in sorted({*multiples, *parts}) if name == "dense" else parts[::2]:
                yield self._try(f"buckets of {cap / MIB:.3g} MB", filled(self._profile.gradients, [cap]), [name], lanes)
        for name, (planner, lanes) in _PUBLISHED.items():
            yield self._try(name, self.cut(planner(self.linear())), ["dense"], lanes)

    def _fused(self) -> Iterator[Candidate]:
        """Try the optimum for one lane, also with cheaper start-ups, because more lanes hide a part of them."""
        every = {name: self._table(name) for name in self._exchanges}
        alone = [{name: table} for name, table in every.items()]
        for tables in [*alone, every] if len(every) > 1 else alone:
            least = np.min(np.stack(list(tables.values())), axis=0)
            for lanes, share in ((1, 1.0), (2, 1.0), (2, 0.5), (4, 0.25)):
                table = least - (1 - share) * least[0] + _PER_BUCKET * self._profile.step_s
                buckets = self.cut(fusion.optimal(self._gradients(self._interpolated(table))))
                sizes = Schedule("plan", buckets).bucket_bytes(self._profile)
                times = {name: self._interpolated(table)(np.array(sizes)) for name, table in tables.items()}
                names = [min(times, key=lambda name: times[name][index]) for index in range(len(sizes))]
                yield self._try("optimal fusion", buckets, names, lanes)

    def _all_layouts(self) -> Iterator[Candidate]:
        for cuts in itertools.product((0, 1), repeat=len(self._profile.gradients) - 1):
            groups = itertools.groupby(itertools.accumulate((0, *cuts)))
            buckets = self.cut([len(list(group)) for _, group in groups])
            for name, lanes in itertools.product(self._exchanges, _LANES):
                yield self._try("fusion", buckets, [name], lanes)

    def _improve(self, start: Candidate) -> Candidate:
        """Follow improving moves until none is left, or the effort is spent."""
        best, limit = start, self._effort + _EFFORT // _STARTS
        while self._effort < limit:
            for buckets, names, lanes in self._moves(best.schedule):
                neighbour = self._try(_SEARCHED, buckets, names, lanes)
                if improved := _rank(neighbour) < _rank(best) * (1 - 1e-6):
                    best = neighbour
                if improved or self._effort >= limit:
                    break
            else:
                break
        return best

    def _moves(self, schedule: Schedule) -> Iterator[tuple[Buckets, list[str], int]]:
        """Yield the neighbours of a schedule, first those that change the last buckets."""
        names, lanes = [name for name, _ in schedule.each], schedule.lanes
        yield from ((schedule.buckets, names, other) for other in _LANES if other != lanes)
        for index in reversed(range(len(names))):
            for name in self._exchanges:
                if name != names[index]:
                    yield schedule.buckets, [*names[:index], name, *names[index + 1 :]], lanes
        if self._uneven:
            return  # moving one boundary would move others
        sizes = [len(indices) for indices in schedule.buckets]
        for index in reversed(range(len(sizes))):
            size, after = sizes[index], sizes[index + 1 :]
            for part in sorted({1, size // 4, size // 2, 3 * size // 4, size - 1}):
                if 0 < part < size:
                    split = [*sizes[:index], part, size - part, *after]
                    yield self.cut(split), [*names[: index + 1], *names[index:]], lanes
            if index:
                before, previous = sizes[: index - 1], sizes[index - 1]
                yield self.cut([*before, previous + size, *after]), [*names[: index - 1], *names[index:]], lanes
                for shift in (1, -1, 4, -4, 16, -16):
                    if -previous < shift < size:
                        yield self.cut([*before, previous + shift, size - shift, *after]), names, lanes

    def _gradients(self, cost_s: Callable[[fusion.Floats], fusion.Floats]) -> fusion.Gradients:
        ready_s = np.array([gradient.ready_s for gradient in self._profile.gradients])
        nbytes = np.array([float(gradient.bytes) for gradient in self._profile.gradients])
        return fusion.Gradients(ready_s, nbytes, cost_s)

    def _interpolated(self, table: fusion.Floats) -> Callable[[fusion.Floats], fusion.Floats]:
        return lambda nbytes: np.interp(nbytes, self._grid, table)

    def linear(self) -> fusion.Gradients:
        """Return the gradients with the cost that the published planners assume: start-up and seconds per byte."""
        table = self._table("dense")
        half = int(np.searchsorted(self._grid, self._grid[-1] / 2))
        span = self._grid[-1] - self._grid[half]
        slope = (table[-1] - table[half]) / span if span > 0 else 0.0
        return self._gradients(fusion.line(float(table[0]), float(slope)))

    def cut(self, sizes: Sequence[int]) -> Buckets:
        """Return buckets of the given numbers of gradients, split further where dtypes are mixed."""
        ends = itertools.accumulate(sizes)
        buckets = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
        if not self._uneven:
            return buckets
        dtypes = [gradient.dtype for gradient in self._profile.gradients]
        parts = [(indices, dtype) for indices in buckets for dtype in dict.fromkeys(dtypes[i] for i in indices)]
        return tuple(tuple(index for index in indices if dtypes[index] == dtype) for indices, dtype in parts)

    def schedule(self, buckets: Buckets, names: Sequence[str], lanes: int) -> Schedule:
        """Return a schedule. `names` has the exchange of each bucket; the last one repeats."""
        if self._uneven:  # DDP makes other buckets from the caps of these if dtypes are mixed or gradients empty
            buckets = filled(self._profile.gradients, caps_of(self._profile.gradients, buckets))
        names = [*names, *[names[-1]] * len(buckets)][: len(buckets)]
        each = tuple((name, self._exchanges[name]) for name in names)
        return Schedule("plan", buckets, self._exchanges[names[0]], names[0], lanes, each=each)

    def _table(self, name: str) -> fusion.Floats:
        """Return the times of single buckets of the grid's sizes with an exchange."""
        exchange, seconds = self._exchanges[name], pricing(self._network)
        overheads = self._profile.overheads
        work = overheads.work.get(name) if overheads is not None else None
        table = np.zeros(len(self._grid))
        for index, nbytes in enumerate(self._grid if self._network.ranks > 1 else ()):
            cost = exchange.cost(max(1, int(nbytes) // self._dtype.itemsize), self._dtype, self._topology)
            own_s = work.fixed_s + work.s_per_byte * nbytes if work is not None else 0.0
            table[index] = seconds(cost) + own_s
        return table

    def _try(self, name: str, buckets: Buckets, names: Sequence[str], lanes: int) -> Candidate:
        """Simulate a schedule, unless that has been done, and remember it if it is the best of its kind."""
        schedule = self.schedule(buckets, names, lanes)
        key = _key(schedule)
        if key not in self._known:
            contents = zip(schedule.each, schedule.contents(self._profile), strict=True)
            collectives = sum(self._phases(exchange_name, *content) for (exchange_name, _), content in contents)
            if collectives > max(_LARGEST, len(self._profile.gradients)):
                return Candidate(name, schedule, math.inf)
            self._effort += 10 + collectives + len(self._profile.gradients) // 50
            self._known[key] = self._predict(schedule).iteration_s
        seconds, used = self._known[key], list(schedule.exchanges)
        kind = f"{'buckets' if name.startswith('buckets of') else name} {' '.join(used)}"
        if name != _SEARCHED and (kind not in self._kinds or seconds < self._kinds[kind].seconds):
            through = used[0] if len(used) == 1 else f"{len(used)} exchanges"
            with_lanes = f", {lanes} lanes" if lanes > 1 else ""
            self._kinds[kind] = Candidate(f"{name}, {through}{with_lanes}", schedule, seconds)
        return Candidate(name, schedule, seconds)


def _key(schedule: Schedule) -> tuple[object, ...]:
    return schedule.buckets, tuple(name for name, _ in schedule.each), schedule.lanes


def _rank(candidate: Candidate) -> float:
    return candidate.seconds * (1 + _PER_BUCKET * len(candidate.schedule.buckets))
