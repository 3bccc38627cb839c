"""The schedule of a step: its buckets, with their lanes and exchanges."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from syncline.errors import UsageError
from syncline.exchange import EXCHANGES, Cost, Dense, Topology, default_lanes
from syncline.records.bucket_caps import filled
from syncline.records.plan import MAX_LANES
from syncline.records.profile import Gradient, Profile

MIB = 1024 * 1024
DDP_CAPS = (MIB, 25 * MIB)
"""Bytes at which plain DDP closes its buckets by default. The first bucket is small, so that sending starts early."""


class Costed(Protocol):
    """The properties of an exchange that a prediction uses. Every `Exchange` has them."""

    @property
    def lossless(self) -> bool: ...

    @property
    def waits(self) -> bool: ...

    def cost(self, numel: int, dtype: torch.dtype, topology: Topology) -> Cost: ...


@dataclass(frozen=True)
class Schedule:
    """Buckets in the order in which they are launched. A bucket is a tuple of indices into the profile's gradients."""

    name: str
    buckets: tuple[tuple[int, ...], ...]
    exchange: Costed = field(default_factory=Dense)
    exchange_name: str = "dense"
    lanes: int = 1
    bucket_mb: float | None = None
    each: tuple[tuple[str, Costed], ...] = ()
    """Name and exchange of each bucket, if they differ between buckets."""

    def exchange_of(self, bucket: int) -> tuple[str, Costed]:
        return self.each[bucket] if self.each else (self.exchange_name, self.exchange)

    @property
    def exchanges(self) -> dict[str, Costed]:
        """All exchanges of the schedule, by name."""
        return dict(self.exchange_of(bucket) for bucket in range(len(self.buckets)))

    @property
    def lossless(self) -> bool:
        return all(exchange.lossless for exchange in self.exchanges.values())

    @classmethod
    def of(
        cls,
        profile: Profile,
        name: str = "ddp",
        *,
        lanes: int | None = None,
        bucket_mb: float | None = None,
        backend: str = "nccl",
    ) -> Schedule:
        """Return a schedule with DDP's buckets and one exchange for all of them.

        Args:
            profile: The model.
            name: `ddp`, or the name of an exchange.
            lanes: Number of lanes. The default is that of `attach`.
            bucket_mb: Size of the buckets. The default is DDP's.
            backend: `gloo` or `nccl`, which decides the default number of lanes.

        Raises:
            UsageError: An argument is not valid.
        """
        if name != "ddp" and name not in EXCHANGES:
            raise UsageError(f"no exchange is called {name!r}; known: ddp, {', '.join(EXCHANGES)}")
        exchange_name = "dense" if name == "ddp" else name
        exchange = EXCHANGES[exchange_name]()
        lanes = default_lanes(exchange, backend) if lanes is None else lanes
        if not 1 <= lanes <= MAX_LANES:
            raise UsageError(f"lanes is {lanes}: there may be 1 to {MAX_LANES}")
        if name == "ddp" and lanes != 1:
            raise UsageError("plain DDP has one lane; for several, name an exchange: dense,lanes=4")
        if bucket_mb is not None and not 0 < bucket_mb < 1e6:
            raise UsageError(f"bucket_mb is {bucket_mb:g}: a bucket needs a positive size, in MB")
        return cls(name, ddp_buckets(profile.gradients, bucket_mb), exchange, exchange_name, lanes, bucket_mb)

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
        lanes = values.get("lanes")
        if lanes is not None and lanes != int(lanes):
            raise UsageError(f"plan {text!r}: lanes must be a whole number")
        whole = None if lanes is None else int(lanes)
        return cls.of(profile, name.strip(), lanes=whole, bucket_mb=values.get("bucket_mb"), backend=backend)

    def bucket_bytes(self, profile: Profile) -> list[int]:
        """Return the bytes of each bucket."""
        return [sum(profile.gradients[index].bytes for index in indices) for indices in self.buckets]

    def contents(self, profile: Profile) -> list[tuple[int, torch.dtype]]:
        """Return the number of elements and the dtype of each bucket."""
        dtypes = [real_dtype(profile.gradients[indices[0]].dtype) for indices in self.buckets]
        sizes = self.bucket_bytes(profile)
        return [(nbytes // dtype.itemsize, dtype) for nbytes, dtype in zip(sizes, dtypes, strict=True)]

    def describe(self) -> str:
        """Return the schedule as `parse` reads it."""
        lanes = f",lanes={self.lanes}" if self.lanes > 1 else ""
        return f"{self.name}{lanes}" + ("" if self.bucket_mb is None else f",bucket_mb={self.bucket_mb:g}")


def real_dtype(name: str) -> torch.dtype:
    """Return the dtype of a bucket: DDP stores complex numbers as pairs of real ones."""
    dtype: torch.dtype = getattr(torch, {"complex64": "float32", "complex128": "float64"}.get(name, name))
    return dtype


def ddp_caps(bucket_mb: float | None = None) -> tuple[int, ...]:
    """Return the bytes at which plain DDP closes its buckets."""
    return DDP_CAPS if bucket_mb is None else (int(bucket_mb * MIB),)


def ddp_buckets(gradients: Sequence[Gradient], bucket_mb: float | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the buckets of plain DDP, as indices into `gradients`."""
    return filled(gradients, ddp_caps(bucket_mb))
