"""`syncline predict`: predict the time of a step on other hosts, links and plans, and find what limits it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from syncline.cli import commands, options, screen
from syncline.cli.report import typed, write_page
from syncline.cli.screen import say
from syncline.cluster import format_rate, parse_rate
from syncline.errors import UsageError
from syncline.measure.assumed_network import assumed_network
from syncline.predict import Losses, Prediction, Schedule, predict
from syncline.predict.diagnosis import Diagnosis, diagnose
from syncline.records.network import Network
from syncline.records.profile import Profile
from syncline.report import sentences
from syncline.report.forecast import HOSTS, Forecast, resized
from syncline.report.inputs import Inputs
from syncline.report.sections.scaling import numbers
from syncline.report.sections.step import remedies, step_by_cause
from syncline.units import count_text

MAX_HOSTS = 65_536
FASTEST_BPS = 10**13
"""Fastest link that can be predicted. It may be faster than the fastest link that can be emulated."""
MAX_RANKS = 1 << 20


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prediction, as JSON."""

    plan: str
    hosts: int
    ranks: int
    rate_bps: int | None
    iteration_ms: float
    low_ms: float
    high_ms: float
    compute_ms: float
    scaling: float
    sent_bytes: int
    lost: Losses


class PredictResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All predictions and the diagnosis, as JSON."""

    model: str
    measured_network: bool
    verdict: str
    culprit: str | None
    remedies: dict[str, float]
    """Milliseconds per step with each remedy."""
    rows: list[Row]
    schema: int = 1


def main(args: commands.Predict) -> None:
    screen.check_writable(args.json, args.report)
    plans = args.plan or ["ddp"]
    model = options.scaled_profile(args.profile, args.scale)
    measured = None if args.network is None else load_network(args.network, args.per_host)
    counts = _host_counts(args.hosts, measured)
    rates = [None] if args.rate is None else [fast_rate(text) for text in args.rate.split(",")]
    if measured is None:
        if args.trunk_rate is not None:
            raise UsageError("--trunk-rate needs a --network that has racks")
        cluster = assumed(counts, args.per_host, rates[0])
    else:
        cluster = measured if args.trunk_rate is None else measured.with_rate(fast_rate(args.trunk_rate), "rack")
    schedules = [Schedule.parse(model, text, cluster.backend) for text in plans]
    first_cluster = resized(cluster, counts[0], rates[0])
    diagnosis = diagnose(model, first_cluster, schedules[0])
    rows = [
        (rate_bps, predict(model, resized(cluster, count, rate_bps), schedule))
        for schedule in schedules
        for rate_bps in rates
        for count in counts
    ]
    name = schedules[0].describe()
    _show(Forecast(model, first_cluster, diagnosis, {name: diagnosis.prediction}, {}))
    curves: dict[str, list[Prediction]] = {}
    for rate_bps, row in rows:
        rate = "" if len(rates) == 1 else f", {format_rate(rate_bps or 0)}"
        curves.setdefault(row.schedule.describe() + rate, []).append(row)
    screen.show(numbers(curves), most=len(rows))
    screen.save(args.json, _result(model, first_cluster, diagnosis, rows))
    if args.report is not None:
        inputs = Inputs(
            model, cluster, schedules=tuple(plans), hosts=tuple(counts), rates_bps=tuple(rates), command=typed()
        )
        write_page(args.report, inputs, short=True)


def _host_counts(text: str | None, network: Network | None) -> list[int]:
    if text is None:
        measured = network.hosts if network is not None else 4
        # One host has no link to extrapolate from.
        return list(dict.fromkeys([measured, *HOSTS])) if measured > 1 else [measured]
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--hosts {text!r}: must be whole numbers, as in 2,4,8,16") from None
    for count in counts:
        if not 1 <= count <= MAX_HOSTS:
            raise UsageError(f"--hosts {count}: must be 1 to {MAX_HOSTS}")
    return list(dict.fromkeys(counts))


def fast_rate(text: str) -> int:
    return parse_rate(text, fastest_bps=FASTEST_BPS)


def assumed(counts: list[int], per_host: int | None, rate_bps: int | None) -> Network:
    """Return a network of Ethernet links at this rate."""
    if rate_bps is None:
        raise UsageError(
            "without --network, the rate of the hosts' links is needed: add --rate, for example --rate 10gbit"
        )
    if per_host is not None and per_host * max(counts) > MAX_RANKS:
        raise UsageError(f"--per-host {per_host}: with {max(counts)} hosts, that is more than {MAX_RANKS} ranks")
    return assumed_network(max(2, counts[0]), per_host or 1, rate_bps)


def load_network(path: Path, per_host: int | None) -> Network:
    """Load a measured network, with which `--per-host` cannot be combined."""
    if per_host is not None:
        raise UsageError("--per-host cannot be combined with --network, which has its own ranks per host")
    network = Network.load(path)
    if not network.collectives or not network.links:
        raise UsageError(f"{path}: has no measured collectives: probe again")
    return network


def _result(
    model: Profile, network: Network, diagnosis: Diagnosis, rows: list[tuple[int | None, Prediction]]
) -> PredictResult:
    return PredictResult(
        model=model.model,
        measured_network=network.measured,
        verdict=sentences.diagnosis(diagnosis),
        culprit=diagnosis.culprit,
        remedies={remedy.name: remedy.prediction.iteration_s * 1e3 for remedy in diagnosis.remedies},
        rows=[
            Row(
                plan=row.schedule.describe(),
                hosts=row.hosts,
                ranks=row.ranks,
                rate_bps=rate_bps,
                iteration_ms=row.iteration_s * 1e3,
                low_ms=row.low_s * 1e3,
                high_ms=row.high_s * 1e3,
                compute_ms=row.compute_s * 1e3,
                scaling=row.scaling,
                sent_bytes=row.sent_bytes,
                lost=row.losses,
            )
            for rate_bps, row in rows
        ],
    )


def _show(forecast: Forecast) -> None:
    network, diagnosis = forecast.network, forecast.diagnosis
    now = diagnosis.prediction
    link = network.link("host")
    rate = f", {format_rate(link.nominal_bps)} links" if link is not None and link.nominal_bps else ""
    cluster = f"{count_text(now.hosts, 'host')} × {count_text(now.ranks // now.hosts, 'rank')}{rate}, {network.backend}"
    say(f"{forecast.profile.model}, {now.schedule.describe()} on {cluster}")
    if not network.measured:
        say(f"Links are not measured but {network.how}: syncline probe measures yours.", style="yellow")
    say(f"\n{sentences.diagnosis(diagnosis)}\n")
    screen.show(step_by_cause(forecast))
    say()
    if diagnosis.remedies:
        screen.show(remedies(forecast))
        say()
