"""The demo: held-out loss over training time, the time to plain DDP's loss, and what tuning chose and cost."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.records.bench_result import DemoResult, DemoRow
from syncline.report import sentences
from syncline.report.charts import (
    Bars,
    Chart,
    Lines,
    Point,
    Row,
    Section,
    Series,
    Table,
    linear_axis,
    narrow_axis,
    time_bar,
)
from syncline.report.inputs import Inputs
from syncline.report.sections.measured import demo_step_chart
from syncline.units import count_text, duration_text, milliseconds_text


def demo_sections(inputs: Inputs) -> Iterator[Section]:
    demo = inputs.demo
    if demo is None or demo.model is None:
        return
    again = [("Measure again", demo.command)] if demo.command else []
    lead = "Each method trains its own copy of the model with AdamW, from the same weights and on the same batches. "
    lead += (
        "Methods take turns in blocks of steps. After each block, the loss on text of files that are not trained on "
    )
    lead += "is computed, while the clock stands still."
    charts: list[Chart] = [_curves(demo), reached_chart(demo), demo_step_chart(demo)]
    yield Section("demo", f"Training compared: {sentences.bench_cluster(demo.cluster)}", lead, charts, commands=again)
    reasons = [f"{_quality(row)}: {_reason(demo.said.get(row.method, ''))}" for row in _tuned(demo)]
    lead = "The probe of the links is counted in full for each quality, although the three shared one. What is saved "
    lead += "per step was measured in the training above."
    yield Section("chosen", "What tune chose, and what it cost", lead, [_choices(demo)], reasons)


def _tuned(demo: DemoResult) -> list[DemoRow]:
    return [demo.row(method) for method in demo.methods if method.startswith("tune-")]


def _reason(said: str) -> str:
    """Return what `tune` said, without its price, which the table has with the probe, and without Markdown."""
    return (
        " ".join(line for line in said.splitlines() if not line.startswith("Tuning took"))
        .replace("**", "")
        .replace("`", "")
    )


def _quality(row: DemoRow) -> str:
    return f'quality="{row.method.removeprefix("tune-")}"'


def _curves(demo: DemoResult) -> Lines:
    """Draw the held-out loss over the time of training, one curve per method that was trained."""
    plain = demo.row("ddp")
    rows = [row for row in demo.rows if row.held_out and not row.same_as]
    kept = [row.method.removeprefix("tune-") for row in demo.rows if row.same_as == "ddp"]
    target, end_s = plain.held_out[-1].bits_per_byte, max(row.held_out[-1].seconds for row in rows)
    series = []
    for color, row in enumerate(rows):
        name = sentences.demo_method(row)
        if row is plain and kept:
            name += f" (also: tune, {', '.join(kept)})"
        points = [
            Point(p.seconds, p.bits_per_byte, f"{name}: {p.bits_per_byte:.3f} after {p.seconds:.1f} s, step {p.step}")
            for p in row.held_out[1:]
        ]
        series.append(Series(name, [(point.x, point.y) for point in points], points, color=color))
    series.append(Series("plain DDP’s final loss", [(0.0, target), (end_s, target)], dashed=True, color=7))
    note = f"Each point is one block of steps. Before training, the loss is {plain.held_out[0].bits_per_byte:.2f}. "
    note += "Methods that are clearly faster than plain DDP take twice its steps, and end earlier all the same. "
    note += "Tuning is not counted here."
    values = [point.bits_per_byte for row in rows for point in row.held_out[1:]]
    return Lines(
        "Held-out loss against seconds of training",
        linear_axis("seconds of training", [end_s], lambda value: f"{value:g} s", margin=1.0),
        narrow_axis("bits per byte", values, lambda value: f"{value:.2f}".rstrip("0").rstrip(".")),
        series,
        "measured",
        note,
    )


def reached_chart(demo: DemoResult) -> Bars:
    """Compare the times until plain DDP's final held-out loss, and the losses at equal steps and at equal time."""
    plain = demo.row("ddp")
    target, seconds = plain.held_out[-1].bits_per_byte, plain.held_out[-1].seconds
    rows = []
    for row in (demo.row(method) for method in demo.methods if method != "nosync"):
        name, ratio = sentences.demo_method(row), sentences.sooner(row, plain)
        tuning = demo.tunings.get(row.method)
        kind = "plain" if row is plain or row.same_as else "chosen" if tuning and tuning.lossless else "lossy"
        bars = []
        if row.reached_s is not None:
            bars = [time_bar(kind, row.reached_s, f"{name}: {duration_text(row.reached_s)}", method=row.method)]
        end_s = row.held_out[-1].seconds
        later = f" ({end_s:.0f} s)" if end_s < 0.95 * seconds else ""
        cells = (
            "not reached" if row.reached_s is None else duration_text(row.reached_s),
            "–" if ratio is None else f"{ratio:.1f}×",
            "–" if row.equal_steps is None else f"{row.equal_steps:.3f}",
            "–" if row.equal_time is None else f"{row.equal_time:.3f}{later}",
        )
        rows.append(Row(name, tuple(bars), cells, strong=row.method == "tune-same" and not row.same_as))
    note = "Held-out loss in bits per byte, of one training per method. Seconds in brackets: the training ended then. "
    note += "Times between two evaluations are interpolated."
    return Bars(
        f"Time to plain DDP’s final held-out loss, {target:.3f} bits per byte",
        rows,
        ("time", "sooner", f"at {count_text(demo.steps, 'step')}", f"at {seconds:.0f} s"),
        "measured",
        note=note,
    )


def _choices(demo: DemoResult) -> Table:
    plain, rows = demo.row("ddp"), []
    for row in _tuned(demo):
        tuning, repaid = demo.tunings.get(row.method), sentences.repaid_steps(row, demo)
        lossy = "" if tuning is None or tuning.lossless is None else "no" if tuning.lossless else "yes"
        rows.append(
            (
                _quality(row),
                row.setting,
                lossy,
                "–" if tuning is None or tuning.seconds is None else duration_text(tuning.seconds),
                "–" if repaid is None else milliseconds_text((plain.step_ms - row.step_ms) / 1e3),
                "–" if repaid is None else count_text(repaid[1], "step"),
            )
        )
    columns = ("", "chosen", "lossy", "tuning took", "saved per step", "repaid after")
    return Table("What each quality chose", columns, rows, "measured")
