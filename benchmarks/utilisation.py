"""How much of the time ranks compute, against the rate of their links: predicted, with measured points.

Utilisation is the time of a step without communication divided by the time of a step. Curves are predictions for a
profile on hosts with one rank each, with assumed links. Points are rows of `syncline bench --json`, from the same
profile and number of hosts.

    syncline bench --hosts 4 --rate 200mbit --replay gpt2-small-cuda --scale 20,0.05 \
        --methods nosync,ddp,int4,oktopk-updates,local-15,local-15-late --json 200.json
    python benchmarks/utilisation.py --profile gpt2-small-cuda --scale 20,0.05 --hosts 4 --backend gloo \
        --points 200.json --json F --plot P.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from syncline.cli.options import scaled_profile
from syncline.files import read_json, write_json
from syncline.measure.assumed_network import assumed_network
from syncline.predict import Schedule, predict
from syncline.records.bench_result import BenchResult

METHODS = ("ddp", "int4", "oktopk-updates", "local-15", "local-15-late")
LABELS = {
    "ddp": "plain DDP",
    "int4": "gradients in 4 bits",
    "oktopk-updates": "1 % of updates, every step",
    "local-15": "3 % of updates, every 15 steps",
    "local-15-late": "the same, one step late",
}
DECADES = (1e7, 1e10)
PER_DECADE = 8


def rates() -> list[int]:
    low, high = DECADES
    count = round(PER_DECADE * (len(str(int(high))) - len(str(int(low)))))
    return [round(low * (high / low) ** (number / count)) for number in range(count + 1)]


def predicted(profile: Any, hosts: int, backend: str, method: str) -> list[float]:
    """Return the utilisation at each rate."""
    schedule, found = Schedule.of(profile, method), []
    for rate in rates():
        network = assumed_network(hosts, 1, rate, backend)
        found.append(min(1.0, predict(profile, network, schedule, paced=True).scaling))
    return found


def measured(paths: list[Path]) -> list[dict[str, Any]]:
    points = []
    for path in paths:
        result = read_json(path, BenchResult)
        rows = {row.method: row for row in result.rows}
        for method in METHODS:
            if method in rows and "nosync" in rows:
                row, alone_ms = rows[method], rows["nosync"].step_ms
                spread = [alone_ms / ms for ms in (row.step_ms_high, row.step_ms, row.step_ms_low)]
                points.append({"method": method, "rate_bps": result.cluster.rate_bps, "utilisation": spread})
    return points


def draw(curves: dict[str, list[float]], points: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "syncline"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    for method, values in curves.items():
        (line,) = axes.plot(rates(), [100 * value for value in values], label=LABELS[method], linewidth=1.6)
        for point in (point for point in points if point["method"] == method):
            low, middle, high = (100 * value for value in point["utilisation"])
            errors = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
            axes.errorbar(point["rate_bps"], middle, errors, fmt="o", color=line.get_color(), markersize=5, capsize=3)
    axes.set(xlabel="rate of each host's link", ylabel="utilisation, %", xscale="log", ylim=(0, 104))
    axes.set_xticks([1e7, 1e8, 1e9, 1e10], ["10 Mbit/s", "100 Mbit/s", "1 Gbit/s", "10 Gbit/s"])
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="gpt2-small-cuda")
    parser.add_argument("--scale", default="1,1", help="factors for times and sizes, as for syncline bench")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--points", type=Path, nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    profile = scaled_profile(options.profile, options.scale)
    curves = {method: predicted(profile, options.hosts, options.backend, method) for method in METHODS}
    points = measured(options.points)
    shown = rates()[:: PER_DECADE // 2]
    print(f"{'predicted':16}" + "".join(f"{rate / 1e6:>9.4g}M" for rate in shown))
    for method, values in curves.items():
        print(f"{method:16}" + "".join(f"{100 * value:>9.1f}%" for value in values[:: PER_DECADE // 2]))
    for point in points:
        low, middle, high = (100 * value for value in point["utilisation"])
        print(
            f"measured {point['method']:16}{point['rate_bps'] / 1e6:>8.4g} Mbit/s {middle:6.1f}% ({low:.1f}–{high:.1f})"
        )
    if options.json is not None:
        about = {"profile": options.profile, "scale": options.scale, "hosts": options.hosts, "backend": options.backend}
        write_json(options.json, {"schema": 1, **about, "rates_bps": rates(), "predicted": curves, "measured": points})
    if options.plot is not None:
        title = f"{options.profile}, times and bytes × {options.scale}, {options.hosts} hosts, {options.backend}"
        draw(curves, points, title, options.plot)


if __name__ == "__main__":
    main()
