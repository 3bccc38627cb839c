"""Tables and pictures of the quality study."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quality_methods import PEERS, in_words
from quality_tasks import TASKS
from syncline.files import write_text
from training import RANKS, spread


def summarise(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per task, number of ranks and method: values of the seeds, and how much worse than dense training
    they are.

    `worse` is positive if the method is worse: the difference of the means. `worse_deviations` is this in units of the
    standard deviation of dense training over seeds. `fewer_bytes` compares whole trainings, and `fewer_bytes_after` the
    steps after the warm-up.
    """
    rows = []
    for (name, ranks), cells in _by_task(result).items():
        task = TASKS[name]
        dense = [cell for cell in cells if cell["method"] == "dense"]
        values_dense = [task.value(cell) for cell in dense]
        for method in dict.fromkeys(cell["method"] for cell in cells):
            mine = sorted((cell for cell in cells if cell["method"] == method), key=lambda cell: cell["seed"])
            values = [task.value(cell) for cell in mine]
            row = {
                "model": name,
                "ranks": ranks,
                "method": method,
                "seeds": [cell["seed"] for cell in mine],
                "values": [round(value, 4) for value in values],
                "mean": statistics.mean(values),
                "deviation": _deviation(values),
                "losses": [cell["loss"][-1] for cell in mine],
                "bytes_per_step": mine[0]["bytes_per_step"],
                "ms_per_step": statistics.median(cell["ms_per_step"] for cell in mine),
            }
            if dense and method != "dense":
                worse = (row["mean"] - statistics.mean(values_dense)) * (1 if task.text else -1)
                deviation = _deviation(values_dense)
                row["worse"] = worse
                row["worse_percent"] = 100 * worse / statistics.mean(values_dense)
                row["worse_deviations"] = worse / deviation if deviation else None
                row["fewer_bytes"] = dense[0]["bytes_per_step"] / max(1, mine[0]["bytes_per_step"])
                row["fewer_bytes_after"] = dense[0]["bytes_per_step"] / max(1.0, _bytes_after(mine[0]))
            rows.append(row)
    return rows


def _by_task(result: dict[str, Any]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the trainings to compare, by task and number of ranks, without those of sweeps."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        if not cell["sweep"] and cell["lr"] == result["tasks"][cell["model"]].get("lr"):
            found.setdefault((cell["model"], cell.get("ranks", RANKS)), []).append(cell)
    return dict(sorted(found.items()))


def _bytes_after(cell: dict[str, Any]) -> float:
    """Return the bytes per step after the warm-up."""
    steps, warmup = cell["points"][-1], cell.get("warmup_steps", 0)
    total = cell["sent_bytes"][-1] if "sent_bytes" in cell else cell["bytes_per_step"] * steps
    return float((total - cell.get("warmup_bytes", 0)) / max(1, steps - warmup))


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def verdict(row: dict[str, Any]) -> str:
    if row.get("worse_deviations") is not None and row["worse_deviations"] <= 1:
        return "within one standard deviation"
    return "within 1 %" if row["worse_percent"] <= 1 else "worse"


def report(result: dict[str, Any]) -> None:
    """Print one table per task and number of ranks. A positive difference means worse than dense training."""
    rows = summarise(result)
    for name, ranks in _by_task(result):
        described = result["tasks"][name]
        rates = described.get("sweep_loss", {})
        tried = ", ".join(f"{lr}: {loss:.4f}" for lr, loss in rates.items())
        print(
            f"\n{name}: {described['about']}, {described['parameters']:,} parameters, {described['steps']} steps, "
            f"{ranks} ranks, {described['optimizer']}, lr {described['lr']:g}"
            f"{f' (held-out loss by lr: {tried})' if tried else ''}"
        )
        if f"{described['lr']:g}" in [*rates][:: max(1, len(rates) - 1)]:
            print("The best learning rate is the lowest or the highest of those tried: try more.")
        print(
            f"{'method':38} seeds {described['metric']:>22} {'worse by':>9} {'in sd':>6} {'in %':>7} {'kB/step':>9}"
            f" {'fewer':>7} {'after':>7}  verdict"
        )
        for row in rows:
            if (row["model"], row["ranks"]) == (name, ranks):
                print(f"{row['method']:38} {len(row['seeds']):5} {spread(row['values'], 3):>22}", _beside_dense(row))
    for failure in result.get("failures", []):
        print(f"not run: {failure['run']}: {failure['error']}")


def _beside_dense(row: dict[str, Any]) -> str:
    kilobytes = f"{row['bytes_per_step'] / 1e3:9.1f}"
    if "worse" not in row:
        return f"{'–':>9} {'–':>6} {'–':>7} {kilobytes}"
    deviations = row["worse_deviations"]
    return (
        f"{row['worse']:+9.4f} {'–' if deviations is None else f'{deviations:+.2f}':>6} {row['worse_percent']:+7.2f} "
        f"{kilobytes} {row['fewer_bytes']:6.1f}× {row['fewer_bytes_after']:6.0f}×  {verdict(row)}"
    )


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw(result: dict[str, Any], models: Sequence[str], out: Path, link_mbit: float) -> None:
    """Draw the mean curves of all methods against steps, bytes, and seconds over links of a rate.

    The seconds of a step are those of one rank's gradients on the device of the study, plus those of the bytes that the
    busiest rank sends, without overlap. Trainings share the device, so the shortest time of any of them is taken.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise SystemExit(
            "matplotlib draws the picture, and comes with the digits: pip install syncline[demo]"
        ) from error
    matplotlib.use("svg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "quality", "font.size": 8}
    tasks = {key: cells for key, cells in _by_task(result).items() if key[0] in models}
    methods = sorted({cell["method"] for cells in tasks.values() for cell in cells} - {"dense"})
    with matplotlib.rc_context(style):
        size = (13, 3.6 * len(tasks))
        figure, grid = pyplot.subplots(len(tasks), 3, figsize=size, sharey="row", squeeze=False, layout="constrained")
        colours = {method: pyplot.get_cmap("turbo")(n / max(1, len(methods) - 1)) for n, method in enumerate(methods)}
        for row, ((name, ranks), cells) in zip(grid, tasks.items(), strict=True):
            described = result["tasks"][name]
            gradient_s = min(cell["gradient_ms"] for cell in cells) / 1e3
            by_value = sorted(cells, key=lambda cell: TASKS[cell["model"]].value(cell))
            for method in dict.fromkeys(cell["method"] for cell in by_value):
                mine = [cell for cell in cells if cell["method"] == method]
                line = {
                    "color": colours.get(method, "black"),
                    "linestyle": "--" if method.split(":")[0] in PEERS else "-",
                }
                for axes, x in zip(row, _abscissae(mine[0], gradient_s, link_mbit), strict=True):
                    means = [
                        statistics.mean(TASKS[name].value(cell, point) for cell in mine)
                        for point in range(len(mine[0]["points"]))
                    ]
                    axes.plot(x, means, **line, label=in_words(method), linewidth=1.2)
            row[0].set(ylabel=described["metric"], xlabel="steps", ylim=_range(name, cells))
            row[1].set(xlabel="megabytes sent by the busiest rank", xscale="log")
            row[2].set(xlabel=f"seconds over links of {link_mbit:g} Mbit/s, without overlap", xscale="log")
            row[0].set_title(f"{described['about']}, {described['parameters']:,} parameters, {ranks} ranks", loc="left")
            row[2].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=7)
            for axes in row:
                axes.grid(color="#dddddd", linewidth=0.6)
                axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(out, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    write_text(out, "\n".join(line.rstrip() for line in out.read_text(encoding="utf-8").splitlines()) + "\n")


def _range(name: str, cells: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the metrics to show: from the best of all methods to dense training's after a third of the steps. The
    steep beginning, and trainings that diverge, would hide the rest."""
    task = TASKS[name]
    ends = [task.value(cell) for cell in cells]
    early = [task.value(cell, len(cell["points"]) // 3) for cell in cells if cell["method"] == "dense"] or ends
    best = min(ends) if task.text else max(ends)
    margin = 0.05 * abs(best - early[0])
    return (best - margin, early[0] + 8 * margin) if task.text else (early[0] - 8 * margin, best + margin)


def _abscissae(
    cell: dict[str, Any], gradient_s: float, link_mbit: float
) -> tuple[list[float], list[float], list[float]]:
    """Return the steps, the megabytes and the seconds of each point of a training."""
    steps = [float(point) for point in cell["points"]]
    sent = cell.get("sent_bytes", [cell["bytes_per_step"] * step for step in steps])
    seconds = [step * gradient_s + total * 8 / (link_mbit * 1e6) for step, total in zip(steps, sent, strict=True)]
    return steps, [total / 1e6 for total in sent], seconds
