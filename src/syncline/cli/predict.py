"""`syncline predict`: what a step would take on other hosts, links and plans, and what limits it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from syncline.cli import options, screen
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
"""Nothing is shaped here: what is predicted may be faster than what can be emulated."""
MAX_RANKS = 1 << 20
_DEFAULT_HOSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prediction, for machines."""

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
    model: str
    measured_network: bool
    verdict: str
    culprit: str | None
    remedies: dict[str, float]
    """Milliseconds per step, by what would be changed."""
    rows: list[Row]
    schema: int = 1


def predict_command(
    *,
    profile: str,
    network: Path | None,
    hosts: str | None,
    rate: str | None,
    trunk_rate: str | None,
    per_host: int | None,
    plans: list[str],
    scale: str,
    json: Path | None,
    report: Path | None,
) -> None:
    with options.one_line_errors("syncline predict"):
        for path in (json, report):
            screen.check_writable(path)
        time_scale, size_scale = options.scales(scale)
        model = load_profile(profile).scaled(time=time_scale, bytes=size_scale)
        measured = None if network is None else load_network(network, trunk_rate)
        counts = _host_counts(hosts, measured)
        rates = [None] if rate is None else [parse_rate(one, fastest_bps=FASTEST_BPS) for one in rate.split(",")]
        if measured is None:
            cluster = assumed(counts, per_host, rates[0], trunk_rate)
        elif per_host is not None:
            raise UsageError("--per-host is for links that are assumed: a --network knows its ranks")
        else:
            cluster = measured
        schedules = [Schedule.parse(model, text, cluster.backend) for text in plans]
        here = moved(cluster, counts[0], rates[0])
        found = diagnose(model, here, schedules[0])
        rows = [
            (rate_bps, predict(model, moved(cluster, count, rate_bps), schedule))
            for schedule in schedules
            for rate_bps in rates
            for count in counts
        ]
        if json is not None:
            write_json(json, _result(model, here, found, rows))
        _show(model, here, found, rows)
        if report is not None:
            links = tuple(rates)
            inputs = Inputs(
                model, cluster, schedules=tuple(plans), hosts=tuple(counts), rates_bps=links, command=typed()
            )
            write_page(report, inputs, short=True)


def _host_counts(text: str | None, network: Network | None) -> list[int]:
    if text is None:
        measured = network.hosts if network is not None else 4
        others = _DEFAULT_HOSTS if measured > 1 else ()  # one host says nothing of the links between several
        return [measured, *(count for count in others if count != measured)]
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--hosts {text!r}: write numbers, like 2,4,8,16") from None
    for count in counts:
        if not 1 <= count <= MAX_HOSTS:
            raise UsageError(f"--hosts {count}: there may be 1 to {MAX_HOSTS}")
    return list(dict.fromkeys(counts))


def assumed(counts: list[int], per_host: int | None, rate_bps: int | None, trunk_rate: str | None) -> Network:
    if rate_bps is None:
        raise UsageError("without --network, say at least how fast the hosts' links are: --rate 10gbit")
    if trunk_rate is not None:
        raise UsageError("--trunk-rate needs a --network with racks in it")
    if per_host is not None and per_host * max(counts) > MAX_RANKS:
        raise UsageError(f"--per-host {per_host}: on {max(counts)} hosts that is more than {MAX_RANKS} ranks")
    return assumed_network(max(2, counts[0]), per_host or 1, rate_bps)


def load_network(path: Path, trunk_rate: str | None) -> Network:
    network = Network.load(path)
    if not network.collectives or not network.links:
        raise UsageError(f"{path}: holds no measured collectives: probe again")
    if trunk_rate is not None:
        network = network.with_rate(parse_rate(trunk_rate, fastest_bps=FASTEST_BPS), "rack")
    return network


def moved(network: Network, hosts: int, rate_bps: int | None) -> Network:
    moved = network.with_hosts(hosts)
    return moved if rate_bps is None else moved.with_rate(rate_bps)


def _result(
    model: Profile, network: Network, found: Diagnosis, rows: list[tuple[int | None, Prediction]]
) -> PredictResult:
    return PredictResult(
        model=model.model,
        measured_network=network.measured,
        verdict=sentences.diagnosis(found),
        culprit=found.culprit,
        remedies={remedy.name: remedy.prediction.iteration_s * 1e3 for remedy in found.remedies},
        rows=[
            Row(
                plan=one.schedule.describe(),
                hosts=one.hosts,
                ranks=one.ranks,
                rate_bps=rate_bps,
                iteration_ms=one.iteration_s * 1e3,
                low_ms=one.low_s * 1e3,
                high_ms=one.high_s * 1e3,
                compute_ms=one.compute_s * 1e3,
                scaling=one.scaling,
                sent_bytes=one.sent_bytes,
                lost=one.losses,
            )
            for rate_bps, one in rows
        ],
    )


def _show(model: Profile, network: Network, found: Diagnosis, rows: list[tuple[int | None, Prediction]]) -> None:
    one = found.prediction
    link = network.link("host")
    rate = f", {format_rate(link.nominal_bps)} links" if link is not None and link.nominal_bps else ""
    per_host = f"{one.ranks // one.hosts} rank{'s' if one.ranks > one.hosts else ''}"
    hosts = "1 host" if one.hosts == 1 else f"{one.hosts} hosts"
    screen.out.print(f"{model.model}, {one.schedule.describe()} on {hosts} × {per_host}{rate}, {network.backend}")
    if not network.measured:
        screen.out.print(f"Links are not measured but {network.how}: syncline probe measures yours.", style="yellow")
    screen.out.print()
    screen.out.print(sentences.diagnosis(found))
    screen.out.print()
    _show_losses(one)
    _show_remedies("What you can change:", one, [remedy for remedy in found.remedies if not remedy.hardware])
    _show_remedies("What other hardware would give:", one, [remedy for remedy in found.remedies if remedy.hardware])
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
    """Only what differs between rows gets a column."""
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
    taken = "with the network's figures at the ends of their 90 % intervals"
    if not measured:
        taken = "start-ups a third to three times, and links 80 to 100 %, of what is assumed"
    screen.out.print(
        f"scaling: the step on one rank alone, over this step; range: {taken}, and on more hosts than those with "
        "start-ups that grow as a tree's or as a ring's; sent: by the busiest rank",
        style="dim",
    )


def _show_losses(one: Prediction) -> None:
    table = screen.table("lost to", "per step", "of the step")
    table.add_row("(computation)", formatting.step_time(one.compute_s), f"{one.scaling:.0%}")
    for name, seconds in lost_to(one.losses).items():
        table.add_row(CAUSES[name], formatting.step_time(seconds), f"{seconds / one.iteration_s:.0%}")
    screen.out.print(table)
    screen.out.print()
