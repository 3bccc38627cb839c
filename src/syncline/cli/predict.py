"""`syncline predict`: predict the time of a step on other hosts, links and plans, and find what limits it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from syncline.cli import options, screen
from syncline.cli.commands.predict import Predict
from syncline.cli.report import typed, write_page
from syncline.cluster import format_rate, parse_rate
from syncline.errors import UsageError
from syncline.files import write_json
from syncline.measure.assumed_network import assumed_network
from syncline.predict import Losses, Prediction, Schedule, predict
from syncline.predict.diagnosis import CAUSES, Diagnosis, Remedy, diagnose, lost_to
from syncline.records.network import Network
from syncline.records.profile import Profile, load_profile
from syncline.report import formatting, sentences
from syncline.report.inputs import Inputs

MAX_HOSTS = 65_536
FASTEST_BPS = 10**13
"""Fastest link that can be predicted. It may be faster than the fastest link that can be emulated."""
MAX_RANKS = 1 << 20
_DEFAULT_HOSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


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


def predict_steps(args: Predict) -> None:
    with options.one_line_errors("syncline predict"):
        for path in (args.json, args.report):
            screen.check_writable(path)
        plans = args.plan or ["ddp"]
        time_scale, size_scale = options.scales(args.scale)
        model = load_profile(args.profile).scaled(time=time_scale, bytes=size_scale)
        measured = None if args.network is None else load_network(args.network, args.trunk_rate)
        counts = _host_counts(args.hosts, measured)
        texts = [None] if args.rate is None else args.rate.split(",")
        rates = [None if text is None else parse_rate(text, fastest_bps=FASTEST_BPS) for text in texts]
        if measured is None:
            cluster = assumed(counts, args.per_host, rates[0], args.trunk_rate)
        elif args.per_host is not None:
            raise UsageError("--per-host cannot be combined with --network, which has its own ranks per host")
        else:
            cluster = measured
        schedules = [Schedule.parse(model, text, cluster.backend) for text in plans]
        first_cluster = moved(cluster, counts[0], rates[0])
        diagnosis = diagnose(model, first_cluster, schedules[0])
        rows = [
            (rate_bps, predict(model, moved(cluster, count, rate_bps), schedule))
            for schedule in schedules
            for rate_bps in rates
            for count in counts
        ]
        if args.json is not None:
            write_json(args.json, _result(model, first_cluster, diagnosis, rows))
        _show(model, first_cluster, diagnosis, rows)
        if args.report is not None:
            inputs = Inputs(
                model, cluster, schedules=tuple(plans), hosts=tuple(counts), rates_bps=tuple(rates), command=typed()
            )
            write_page(args.report, inputs, short=True)


def _host_counts(text: str | None, network: Network | None) -> list[int]:
    if text is None:
        measured = network.hosts if network is not None else 4
        others = _DEFAULT_HOSTS if measured > 1 else ()  # one host has no link to extrapolate from
        return [measured, *(count for count in others if count != measured)]
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--hosts {text!r}: must be whole numbers, as in 2,4,8,16") from None
    for count in counts:
        if not 1 <= count <= MAX_HOSTS:
            raise UsageError(f"--hosts {count}: must be 1 to {MAX_HOSTS}")
    return list(dict.fromkeys(counts))


def assumed(counts: list[int], per_host: int | None, rate_bps: int | None, trunk_rate: str | None) -> Network:
    """Return a network of Ethernet links at this rate."""
    if rate_bps is None:
        raise UsageError(
            "without --network, the rate of the hosts' links is needed: add --rate, for example --rate 10gbit"
        )
    if trunk_rate is not None:
        raise UsageError("--trunk-rate needs a --network that has racks")
    if per_host is not None and per_host * max(counts) > MAX_RANKS:
        raise UsageError(f"--per-host {per_host}: with {max(counts)} hosts, that is more than {MAX_RANKS} ranks")
    return assumed_network(max(2, counts[0]), per_host or 1, rate_bps)


def load_network(path: Path, trunk_rate: str | None) -> Network:
    network = Network.load(path)
    if not network.collectives or not network.links:
        raise UsageError(f"{path}: has no measured collectives: probe again")
    if trunk_rate is not None:
        network = network.with_rate(parse_rate(trunk_rate, fastest_bps=FASTEST_BPS), "rack")
    return network


def moved(network: Network, hosts: int, rate_bps: int | None) -> Network:
    """Return the network with another number of hosts and, if not None, another rate of their links."""
    resized = network.with_hosts(hosts)
    return resized if rate_bps is None else resized.with_rate(rate_bps)


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


def _show(model: Profile, network: Network, diagnosis: Diagnosis, rows: list[tuple[int | None, Prediction]]) -> None:
    prediction = diagnosis.prediction
    link = network.link("host")
    rate = f", {format_rate(link.nominal_bps)} links" if link is not None and link.nominal_bps else ""
    per_host = f"{prediction.ranks // prediction.hosts} rank{'s' if prediction.ranks > prediction.hosts else ''}"
    hosts = "1 host" if prediction.hosts == 1 else f"{prediction.hosts} hosts"
    screen.out.print(
        f"{model.model}, {prediction.schedule.describe()} on {hosts} × {per_host}{rate}, {network.backend}"
    )
    if not network.measured:
        screen.out.print(f"Links are not measured but {network.how}: syncline probe measures yours.", style="yellow")
    screen.out.print()
    screen.out.print(sentences.diagnosis(diagnosis))
    screen.out.print()
    _show_losses(prediction)
    _show_remedies("What you can change:", prediction, [remedy for remedy in diagnosis.remedies if not remedy.hardware])
    _show_remedies(
        "What other hardware would give:", prediction, [remedy for remedy in diagnosis.remedies if remedy.hardware]
    )
    _show_rows(rows, network.measured)


def _show_remedies(title: str, before: Prediction, remedies: list[Remedy]) -> None:
    if not remedies:
        return
    screen.out.print(title)
    table = screen.table("", "per step", "", "scaling")
    for remedy in remedies[:4]:
        after = remedy.prediction
        note = " (lossy)" if remedy.lossy else ""
        ratio = formatting.speedup(after.iteration_s / before.iteration_s)
        table.add_row(f"{remedy.what}{note}", formatting.step_time(after.iteration_s), ratio, f"{after.scaling:.0%}")
    screen.out.print(table)
    screen.out.print()


def _show_rows(rows: list[tuple[int | None, Prediction]], measured: bool) -> None:
    """Show all predictions. Plans and links get a column only if they differ between rows."""
    plans = len({row.schedule.describe() for _, row in rows}) > 1
    rates = len({rate_bps for rate_bps, _ in rows}) > 1
    names = [*(["plan"] if plans else []), *(["links"] if rates else [])]
    table = screen.table(*names, "hosts", "per step", "range, ms", "scaling", "sent")
    for rate_bps, row in rows:
        links = "as measured" if rate_bps is None else format_rate(rate_bps)
        table.add_row(
            *([row.schedule.describe()] if plans else []),
            *([links] if rates else []),
            str(row.hosts),
            formatting.step_time(row.iteration_s),
            f"{row.low_s * 1e3:.0f}–{row.high_s * 1e3:.0f}",
            f"{row.scaling:.0%}",
            formatting.size(row.sent_bytes),
        )
    screen.out.print(table)
    inputs = "over the 90 % intervals of the network's measurements"
    if not measured:
        inputs = "over start-ups of 1/3 to 3 times, and rates of 80 to 100 %, of the assumed ones"
    screen.out.print(
        f"scaling: step time of a single rank, divided by this step time; range: {inputs} and, with more hosts, over "
        "start-ups that grow as in a tree or as in a ring; sent: by the busiest rank",
        style="dim",
    )


def _show_losses(prediction: Prediction) -> None:
    table = screen.table("lost to", "per step", "of the step")
    table.add_row("(computation)", formatting.step_time(prediction.compute_s), f"{prediction.scaling:.0%}")
    for name, seconds in lost_to(prediction.losses).items():
        table.add_row(CAUSES[name], formatting.step_time(seconds), f"{seconds / prediction.iteration_s:.0%}")
    screen.out.print(table)
    screen.out.print()
