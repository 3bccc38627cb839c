"""The schedule of a step: its buckets, with their lanes and exchanges."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, ChunkedTopk, Dense, Exchange, OkTopk, default_lanes, for_updates
from syncline.records.bucket_caps import filled
from syncline.records.pieces import buffer_period, fragments_of
from syncline.records.plan import MAX_LANES
from syncline.records.profile import BUFFER_ITEM_BYTES, Gradient, Profile

MIB = 1024 * 1024
DDP_CAPS = (MIB, 25 * MIB)
"""Bytes at which plain DDP closes its buckets by default. The first bucket is small, so that sending starts early."""


@dataclass(frozen=True)
class Updates:
    """An exchange of the optimizer's updates instead of gradients, with the settings of `attach`, after the warm-up."""

    exchange_name: str  # the name under which a profile has the exchange's own work
    exchange: Exchange
    every: int = 1
    delay: int = 0


OVERLAP = "overlap"
"""The name of the lossless exchange whose second half runs behind the next forward pass."""
UPDATES: dict[str, Updates] = {
    "oktopk-updates": Updates("oktopk", OkTopk(density=0.01)),
    "local-15": Updates("topk-chunks", ChunkedTopk(density=0.03), every=15),
    "local-15-late": Updates("topk-chunks", ChunkedTopk(density=0.03), every=15, delay=1),
}
"""Exchanges of updates by the names that predictions and the bench use."""


@dataclass(frozen=True)
class Fragment:
    """Weights or buffers that are exchanged together in some steps, instead of a bucket of gradients."""

    elements: int
    dtype: torch.dtype
    period: int  # the fragment is exchanged in one of this many steps
    turn: int  # index of that step, from 0 to period - 1
    is_buffers: bool = False


@dataclass(frozen=True)
class Schedule:
    """Buckets in the order in which they are launched. A bucket is a tuple of indices into the profile's gradients.

    With `updates`, there is a fragment in place of each bucket, which is empty.
    """

    name: str
    buckets: tuple[tuple[int, ...], ...]
    exchange: Exchange = field(default_factory=Dense)
    exchange_name: str = "dense"
    lanes: int = 1
    bucket_mb: float | None = None
    each: tuple[tuple[str, Exchange], ...] = ()  # name and exchange of each bucket, if they differ between buckets
    updates: Updates | None = None
    fragments: tuple[Fragment, ...] = ()
    overlaps: bool = False  # weights are gathered behind the next forward pass
    gather: str = "fp32"  # the format in which they are gathered

    @property
    def bucket_exchanges(self) -> tuple[tuple[str, Exchange], ...]:
        """Name and exchange of each bucket."""
        return self.each or ((self.exchange_name, self.exchange),) * len(self.buckets)

    @property
    def exchanges(self) -> dict[str, Exchange]:
        """All exchanges of the schedule, by name."""
        return dict(self.bucket_exchanges)

    @property
    def lossless(self) -> bool:
        in_full = all(exchange.lossless for exchange in self.exchanges.values()) and self.gather == "fp32"
        return self.updates is None and in_full

    @property
    def periods(self) -> tuple[int, ...]:
        """For each bucket, the number of steps in which it is exchanged once."""
        return tuple(fragment.period for fragment in self.fragments) or (1,) * len(self.buckets)

    @classmethod
    def of(
        cls,
        profile: Profile,
        name: str = "ddp",
        lanes: int | None = None,
        bucket_mb: float | None = None,
        backend: str = "nccl",
    ) -> Schedule:
        """Return a schedule with DDP's buckets and one exchange for all of them: `ddp`, or the name of an exchange; or
        with fragments, for a name of `UPDATES`. By default, `bucket_mb` is DDP's, and `lanes` is that of `attach`,
        which depends on the backend."""
        known = ("ddp", *EXCHANGES, *UPDATES, OVERLAP)
        if name not in known:
            raise UsageError(f"no exchange is called {name!r}; known: {', '.join(known)}")
        exchange_name = "dense" if name in ("ddp", OVERLAP) else name
        exchange = UPDATES[name].exchange if name in UPDATES else EXCHANGES[exchange_name]()
        lanes = default_lanes(exchange, backend) if lanes is None else lanes
        if not 1 <= lanes <= MAX_LANES:
            raise UsageError(f"lanes is {lanes}: there may be 1 to {MAX_LANES}")
        if name in ("ddp", OVERLAP) and lanes != 1:
            what = "plain DDP" if name == "ddp" else name
            raise UsageError(f"{what} has one lane; for several, name an exchange: dense,lanes=4")
        if bucket_mb is not None and not 0 < bucket_mb < 1e6:
            raise UsageError(f"bucket_mb is {bucket_mb:g}: a bucket needs a positive size, in MB")
        if name in UPDATES:
            if bucket_mb is not None:
                raise UsageError(f"{name} exchanges updates, not DDP's buckets: leave bucket_mb out")
            return cls.of_updates(profile, name, UPDATES[name], lanes)
        buckets = ddp_buckets(profile.gradients, bucket_mb)
        return cls(name, buckets, exchange, exchange_name, lanes, bucket_mb, overlaps=name == OVERLAP)

    @classmethod
    def of_updates(cls, profile: Profile, name: str, updates: Updates, lanes: int) -> Schedule:
        """Return the schedule of an exchange of updates, with the fragments of `attach` for a model with these
        gradients, in the reverse of the order in which they are ready."""
        exchange = for_updates(updates.exchange, updates.every)
        fragments = fragments_in(profile, updates.every)
        each = tuple(
            ("dense", Dense()) if fragment.is_buffers else (updates.exchange_name, exchange) for fragment in fragments
        )
        buckets: tuple[tuple[int, ...], ...] = ((),) * len(fragments)
        named = cls(name, buckets, exchange, updates.exchange_name, lanes, each=each)
        return dataclasses.replace(named, updates=updates, fragments=fragments)

    @classmethod
    def parse(cls, profile: Profile, text: str, backend: str = "nccl") -> Schedule:
        """Parse a schedule like `ddp`, `dense,lanes=4` or `bf16,bucket_mb=5`."""
        name, *options = text.split(",")
        values: dict[str, float] = {}
        for option in options:
            match = re.fullmatch(r"(lanes|bucket_mb)=(\d{1,9}(?:\.\d{1,9})?)", option.strip())
            if match is None:
                raise UsageError(f"plan {text!r}: write it like ddp, dense,lanes=4 or bf16,bucket_mb=5")
            if match[1] in values:
                raise UsageError(f"plan {text!r}: {match[1]} is given twice")
            values[match[1]] = float(match[2])
        if not (lanes := values.get("lanes", 1.0)).is_integer():
            raise UsageError(f"plan {text!r}: lanes must be a whole number")
        whole = int(lanes) if "lanes" in values else None
        return cls.of(profile, name.strip(), lanes=whole, bucket_mb=values.get("bucket_mb"), backend=backend)

    def bucket_bytes(self, profile: Profile) -> list[int]:
        """Return the bytes of each bucket."""
        if self.fragments:
            return [fragment.elements * fragment.dtype.itemsize for fragment in self.fragments]
        return [sum(profile.gradients[index].bytes for index in indices) for indices in self.buckets]

    def contents(self, profile: Profile) -> list[tuple[int, torch.dtype]]:
        """Return the number of elements and the dtype of each bucket."""
        if self.fragments:
            return [(fragment.elements, fragment.dtype) for fragment in self.fragments]
        dtypes = (real_dtype(profile.gradients[indices[0]].dtype) for indices in self.buckets)
        sizes = zip(self.bucket_bytes(profile), dtypes, strict=True)
        return [(nbytes // dtype.itemsize, dtype) for nbytes, dtype in sizes]

    def one_by_one(self) -> Schedule:
        """Return the schedule with one bucket for every gradient. Fragments, which wait for no gradient, stay."""
        if self.updates is not None:
            return self
        buckets = zip(self.buckets, self.bucket_exchanges, strict=True)
        each = {gradient: exchange for bucket, exchange in buckets for gradient in bucket}
        singles = tuple((gradient,) for gradient in sorted(each))
        return dataclasses.replace(self, buckets=singles, each=tuple(each[gradient] for (gradient,) in singles))

    def describe(self) -> str:
        """Return the schedule as `parse` reads it."""
        lanes = f",lanes={self.lanes}" if self.lanes > 1 else ""
        return f"{self.name}{lanes}" + ("" if self.bucket_mb is None else f",bucket_mb={self.bucket_mb:g}")


def real_dtype(name: str) -> torch.dtype:
    """Return the dtype of a bucket: DDP stores complex numbers as pairs of real ones."""
    dtype: torch.dtype = getattr(torch, {"complex64": "float32", "complex128": "float64"}.get(name, name))
    return dtype


def fragments_in(profile: Profile, every: int) -> tuple[Fragment, ...]:
    """Return the fragments into which `attach` divides a model with these gradients, and its buffers."""
    weights = {
        gradient.name: torch.empty(gradient.shape, dtype=real_dtype(gradient.dtype), device="meta")
        for gradient in reversed(profile.gradients)
    }
    buffers = {
        entry.dtype: torch.empty(entry.bytes // BUFFER_ITEM_BYTES[entry.dtype], dtype=dtype, device="meta")
        for entry in profile.buffers
        if (dtype := real_dtype(entry.dtype)).is_floating_point
    }
    found = []
    for tensors, period, is_buffers in ((weights, every, False), (buffers, buffer_period(every), True)):
        for turn, pieces in fragments_of(tensors, 1 if is_buffers else every):
            dtype = torch.promote_types(tensors[pieces[0].name].dtype, torch.float32)
            elements = sum(piece.numel for piece in pieces)
            found.append(Fragment(elements, dtype, period, turn, is_buffers))
    return tuple(found)


def ddp_caps(bucket_mb: float | None = None) -> tuple[int, ...]:
    """Return the bytes at which plain DDP closes its buckets."""
    return DDP_CAPS if bucket_mb is None else (int(bucket_mb * MIB),)


def ddp_buckets(gradients: Sequence[Gradient], bucket_mb: float | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the buckets of plain DDP, as indices into `gradients`."""
    return filled(gradients, ddp_caps(bucket_mb))
