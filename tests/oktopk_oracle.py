"""Inputs and references for sparse exchanges: fixed slots filled by sorting, and Ok-Topk as published.

The references hold all ranks in one object and use dense tensors, to be simple rather than fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.kernels import Slots

KINDS = (
    "normal",
    "heavy-tailed",
    "integers",
    "equal",
    "zero",
    "one non-zero",
    "one cell",
    "the first cell",
    "one region",
    "the end",
    "denormal",
    "few magnitudes",
)


def made(kind: str, slots: Slots, generator: torch.Generator) -> Tensor:
    """Return a gradient of this kind. Some kinds put more large entries into a region than its slot can hold."""
    numel = slots.numel
    normal = torch.randn(numel, generator=generator)
    position = torch.arange(numel)
    cell = int(torch.randint(-(-numel // slots.cell), (), generator=generator))
    match kind:
        case "heavy-tailed":
            return normal * torch.exp(3 * torch.randn(numel, generator=generator))
        case "integers":
            return torch.randint(-300, 301, (numel,), generator=generator).float()
        case "equal":
            return torch.full((numel,), -0.75)
        case "zero":
            return torch.zeros(numel)
        case "one non-zero":
            return torch.where(position == cell * slots.cell, 3.0, 0.0)
        case "one cell":
            return torch.where(position // slots.cell == cell, 1000 * normal, 0.0)
        case "the first cell":  # on all ranks
            return torch.where(position < slots.cell, 1000 * normal, 0.0)
        case "one region":
            return torch.where(position // slots.cell % slots.regions == cell % slots.regions, normal, 0.0)
        case "the end":
            return torch.where(position >= numel - 5, normal, 0.0)
        case "denormal":
            return normal * 2.0**-128
        case "few magnitudes":
            return torch.tensor([0.5, -1.0, 1.0, 1.03, 0.0])[torch.randint(5, (numel,), generator=generator)]
        case _:
            return normal


def keys(values: Tensor) -> Tensor:
    """Return exponent and four leading bits of the mantissa, as an integer that grows with the magnitude."""
    return ((values.to(torch.float32).view(torch.int32) & 0x7FFFFFFF) >> 19).to(torch.int64)


def region_of(slots: Slots) -> Tensor:
    """Return the region of each element of the bucket."""
    return torch.arange(slots.numel) // slots.cell % slots.regions


def largest(values: Tensor, among: Tensor, entries: int) -> Tensor:
    """Return the positions `among` with the largest keys, in order: the first of equal ones, and none of key 0."""
    where = among[keys(values[among]) > 0]
    order = torch.sort(keys(values[where]), descending=True, stable=True).indices[:entries]
    return where[order].sort().values


def as_sent(values: Tensor, kind: torch.dtype) -> Tensor:
    """Return the values as read from a slot. fp16 values are scaled so that the largest is just below 2^15."""
    if kind != torch.float16:
        return values.to(kind).to(torch.float32)
    top = values.abs().max() if len(values) else torch.zeros(())
    exponent = min(15 - int(torch.frexp(top).exponent), 120) if top < torch.inf else -114
    return (values * 2.0**exponent).to(kind).to(torch.float32) * 2.0**-exponent


@dataclass
class Step:
    """The results of one step of `Plain`."""

    sent: list[list[tuple[Tensor, Tensor]]]
    """Positions and values by rank and region."""
    sums: Tensor
    """Dense sums of what was sent."""
    picked: list[tuple[Tensor, Tensor]]
    """Positions and values by region, as sent to all ranks."""
    applied: Tensor


class Plain:
    """The definition of `OkTopk`, with a sort for each selection and a dense buffer for each residual."""

    def __init__(
        self, slots: Slots, dtype: torch.dtype = torch.float32, momentum: float = 0.0, contributors: bool = False
    ) -> None:
        self.slots, self.dtype, self.momentum, self.contributors = slots, dtype, momentum, contributors
        self.kept = [torch.zeros(slots.numel) for _ in range(slots.regions)]
        self.velocity = [torch.zeros(slots.numel) for _ in range(slots.regions)]

    def step(self, gradients: Sequence[Tensor], ratio: float = 1.0, share: float = 1.0) -> Step:
        slots, gradients = self.slots, [(gradient * share).float() for gradient in gradients]
        ranks = range(slots.regions)
        places = [(region_of(slots) == region).nonzero().flatten() for region in ranks]
        velocity = [
            (held * ratio * self.momentum + gradient).to(torch.float32)
            for held, gradient in zip(self.velocity, gradients, strict=True)
        ]
        incoming = [speed.to(self.dtype) for speed in velocity] if self.momentum else gradients
        kept = [(held * ratio + given).to(torch.float32) for held, given in zip(self.kept, incoming, strict=True)]

        sent: list[list[tuple[Tensor, Tensor]]] = []
        sums, count = torch.zeros(slots.numel), torch.zeros(slots.numel)
        for rank in ranks:
            chosen = [largest(kept[rank], there, slots.entries) for there in places]
            sent.append([(where, as_sent(kept[rank][where], slots.values)) for where in chosen])
            for where, values in sent[rank]:
                sums[where] += values
                count[where] += 1
        if self.contributors:
            sums *= torch.full_like(count, slots.regions) / count.clamp(min=1)

        picked, applied = [], torch.zeros(slots.numel)
        for region in ranks:
            where = largest(sums, places[region], slots.entries)
            values = as_sent(sums[where], slots.values)
            picked.append((where, values))
            applied[where] = values.to(self.dtype).to(torch.float32)
            counts = applied[where] != 0
            lost = (sums - applied) * (count / torch.full_like(count, slots.regions) if self.contributors else 1)
            kept[region][where[counts]] += lost[where[counts]]
        for rank in ranks:
            for where, values in sent[rank]:
                counts = applied[where] != 0
                kept[rank][where[counts]] -= values[counts]
                velocity[rank][where[counts]] = 0
        if bool(applied.isfinite().all()):
            self.kept, self.velocity = kept, velocity
        return Step(sent, sums, picked, applied.to(self.dtype))


@dataclass
class PaperStep:
    """The results of one step of `Paper`."""

    selected: list[Tensor]
    """Masks by rank: true where the rank sent an entry."""
    applied: Tensor
    words: list[int]
    """Words sent to other ranks, by rank; two per entry."""


class Paper:
    """Ok-Topk as published, with exact thresholds in every step and a variable number of entries."""

    def __init__(self, numel: int, ranks: int, k: int) -> None:
        self.numel, self.ranks, self.k = numel, ranks, k
        self.residuals = [torch.zeros(numel) for _ in range(ranks)]

    def step(self, gradients: Sequence[Tensor]) -> PaperStep:
        accumulated = [held + given for held, given in zip(self.residuals, gradients, strict=True)]
        selected = [self._at_least_the_kth(values) for values in accumulated]

        bounds = self._consensus(selected)
        sums, words = torch.zeros(self.numel), [0] * self.ranks
        for owner in range(self.ranks):
            region = slice(bounds[owner], bounds[owner + 1])
            for rank in range(self.ranks):
                where = selected[rank][region]
                sums[region][where] += accumulated[rank][region][where]
                words[rank] += 2 * int(where.sum()) * (rank != owner)

        accepted = self._at_least_the_kth(sums)
        for owner in range(self.ranks):  # the all-gather sends each owner's entries to all other ranks
            words[owner] += 2 * int(accepted[bounds[owner] : bounds[owner + 1]].sum()) * (self.ranks - 1)
        self.residuals = [
            torch.where(mine & accepted, 0.0, values) for mine, values in zip(selected, accumulated, strict=True)
        ]
        return PaperStep(selected, torch.where(accepted, sums, 0.0), words)

    def _at_least_the_kth(self, values: Tensor) -> Tensor:
        threshold = values.abs().sort(descending=True).values[self.k - 1]
        return (values.abs() >= threshold) & (values != 0)

    def _consensus(self, selected: Sequence[Tensor]) -> list[int]:
        """Return the bounds of the regions: the mean of the bounds that would divide each rank's entries evenly."""
        proposals = []
        for mine in selected:
            where = mine.nonzero().flatten()
            cuts = [len(where) * region // self.ranks for region in range(1, self.ranks)]
            proposals.append(where[cuts].to(torch.float64) if len(where) else torch.zeros(self.ranks - 1))
        return [0, *torch.stack(proposals).mean(0).to(torch.int64).tolist(), self.numel]
