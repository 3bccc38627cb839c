"""The rungs of the ladder, from lossless exchanges to exchanges of updates every few steps.

Each rung names its quality, its trade-off, and the measurement that the quality rests on: a row of docs/results.md.
A rung of quality "same" has a row that shows the training result of dense gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncline.errors import UsageError

QUALITIES = ("exact", "same", "close")
"""The values of `quality`, from the gentlest on."""
_GPT = "bits per byte for a GPT with AdamW"


@dataclass(frozen=True)
class Rung:
    """A method of exchanging gradients or updates, with the quality that it was measured to have."""

    name: str
    quality: str
    trade_off: str
    evidence: str = ""  # a section and a row of docs/results.md, with its figures
    allow: tuple[str, ...] = ()  # names for `allow`; each rung for gradients includes those before it
    updates: str | None = None  # a name in `UPDATES`
    overlaps: bool = False

    @property
    def needs_optimizer(self) -> bool:
        return self.overlaps or self.updates is not None


_OVERLAP_COSTS = "no accuracy, but scripts read gradients, clip and save the optimizer with other calls"
RUNGS = (
    Rung("lossless", "exact", "nothing"),
    Rung("overlap", "exact", _OVERLAP_COSTS, overlaps=True),
    Rung(
        "16 bits",
        "same",
        "each gradient is rounded to 16 bits",
        f'"Time until the model is as good", row "PyTorch\'s `fp16_compress_hook`": 2.888 {_GPT}, dense 2.889 (one '
        'seed); also coarser 8 bits trained as dense, in "Few bits per gradient"',
        allow=("bf16", "fp16"),
    ),
    Rung(
        "8 bits",
        "same",
        "each gradient is rounded to 8 bits, and the errors are added to the next step's gradients",
        f'"Few bits per gradient", row "8 bits": 1.172 ± 0.004 {_GPT}, dense 1.170 ± 0.003 (four seeds)',
        allow=("int8",),
    ),
    Rung(
        "4 bits",
        "same",
        "each gradient is rounded to 4 bits, and the errors are added to the next step's gradients",
        f'"Few bits per gradient", row "4 bits": 1.171 ± 0.004 {_GPT}, dense 1.170 ± 0.003 (four seeds)',
        allow=("int4",),
    ),
    Rung(
        "sparse updates",
        "close",
        "most updates of weights are applied some steps later, and each rank clips its own gradients",
        '"Updates instead of gradients", row "**`OkTopk(density=0.01)` of updates, every step**": 1.257 ± 0.003 '
        f"{_GPT}, dense 1.254 ± 0.006 (three seeds, 4 ranks, a warm-up of 20 % of the steps; 0.8 % worse than dense "
        "on 8 ranks)",
        updates="oktopk-updates",
    ),
    Rung(
        "local steps",
        "close",
        "ranks have weights of their own between exchanges, and most updates are applied many steps later",
        '"Updates instead of gradients", row "**`ChunkedTopk(density=0.03)`, `every=15`**": 1.265 ± 0.002 '
        f"{_GPT}, dense 1.254 ± 0.006 (three seeds, 4 ranks, a warm-up of 10 % of the steps)",
        updates="local-15",
    ),
)
"""All rungs, from the gentlest on."""


def check_quality(quality: object) -> None:
    """Raise a UsageError unless this is a quality, or None."""
    if quality is not None and quality not in QUALITIES:
        raise UsageError(f"quality is {quality!r}: it must be one of {', '.join(QUALITIES)}")


def rungs_of(quality: str, *, updates: bool = True, overlap: bool = True) -> tuple[Rung, ...]:
    """Return the rungs that a quality allows, with or without those that need an optimizer."""
    within = QUALITIES[: QUALITIES.index(quality) + 1]
    possible = (rung for rung in RUNGS if (updates or rung.updates is None) and (overlap or not rung.overlaps))
    return tuple(rung for rung in possible if rung.quality in within)


def allowed_names(quality: str) -> tuple[str, ...]:
    """Return the names for `allow` that a quality includes."""
    return tuple(name for rung in rungs_of(quality) for name in rung.allow)
