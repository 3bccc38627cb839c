"""The page tells what the files hold: every mark with their own values, every name as text, and nothing else."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import made_up
from syncline.cli import app
from syncline.errors import UsageError
from syncline.files import read_json, write_json
from syncline.measure.assumed_network import assumed_network
from syncline.plan.make import make_plan, plan_for
from syncline.predict import Schedule, predict
from syncline.predict.diagnosis import diagnose, lost_to
from syncline.records.bench_result import BenchResult, DemoResult, DemoRow, Tuning
from syncline.records.link_costs import Collective
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Gradient, Profile, load_profile
from syncline.records.run_record import BucketSpan, Loss, ModelRecord, Pace, PhaseSpan, RunRecord, StepSpan
from syncline.report import charts, sentences
from syncline.report.inputs import Inputs
from syncline.report.page import build_page, render, write_report
from syncline.report.read_inputs import read_inputs
from syncline.units import duration_text, milliseconds_text

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PROFILE = load_profile("cnn-cpu")
NETWORK = Network.load(RESULTS / "network-4-hosts-200mbit-2026-11-15.json")
PLAN = make_plan(PROFILE, NETWORK, ("bf16",))
BENCH = read_json(RESULTS / "bench-cnn-2026-11-15.json", BenchResult)
DEMO = msgspec.structs.replace(
    read_json(RESULTS / "demo-2026-11-15.json", DemoResult),
    network=NETWORK,
    tunings={"tune": Tuning(PROFILE, make_plan(PROFILE, NETWORK)), "tune-bf16": Tuning(PROFILE, PLAN)},
)
GPT_DEMO = read_json(RESULTS / "demo-2026-11-18.json", DemoResult)
EVIL = "<script>alert(1)</script>"
runner = CliRunner()


def a_run(rank: int = 0, ranks: int = 4, *, name: str = "Net", ended: str = "finished", steps: int = 30) -> RunRecord:
    """A training that began with plain DDP and went on with the plan; rank 2 computes longer than the others."""
    late_s = 0.004 if rank == 2 else 0.0
    spans, now_s = [], 100.0 + rank
    for step in range(steps):
        way, step_s = ("plain DDP", 0.13) if step < 10 else ("plan", 0.09)
        backward_s, backward_end_s = now_s + 0.01, now_s + 0.03 + late_s
        buckets: tuple[BucketSpan, ...] = ()
        if step >= steps - 3:
            buckets = tuple(
                BucketSpan(
                    bucket=number,
                    lane=number % 2,
                    bytes=400_000 + number,
                    exchange="bf16",
                    ready_s=backward_s + 0.004 * number,
                    start_s=backward_s + 0.005 * number,
                    end_s=backward_s + 0.005 * number + 0.02,
                    phases=(
                        PhaseSpan(
                            name="cast",
                            level="",
                            sent_bytes=0,
                            start_s=backward_s + 0.005 * number,
                            end_s=backward_s + 0.005 * number + 0.003,
                        ),
                        PhaseSpan(
                            name="all_to_all",
                            level="world",
                            sent_bytes=300_000,
                            start_s=backward_s + 0.005 * number + 0.003,
                            end_s=backward_s + 0.005 * number + 0.02,
                        ),
                    ),
                )
                for number in range(4)
            )
        spans.append(
            StepSpan(
                step=step,
                way=way,
                start_s=now_s,
                backward_s=backward_s,
                backward_end_s=backward_end_s,
                end_s=now_s + step_s,
                buckets=buckets,
            )
        )
        now_s += step_s + 0.006
    paces = tuple(
        Pace(
            way=way,
            steps=count,
            step_s=step_s,
            low_s=0.97 * step_s,
            high_s=1.06 * step_s,
            forward_s=0.01,
            backward_s=0.02 + late_s,
            exposed_s=step_s - 0.03 - late_s,
            between_s=0.006,
            sent_bytes=sent_bytes,
        )
        for way, count, step_s, sent_bytes in (("plain DDP", 10, 0.13, None), ("plan", 20, 0.09, 1_265_220))
    )
    model = ModelRecord(
        name=name,
        parameters=421_738,
        gradient_bytes=PROFILE.gradient_bytes,
        host_of_rank=NETWORK.host_of_rank,
        backend="gloo",
        device="cpu",
        steps=steps,
        outcome="The plan stays: it was faster when tried.",
        way="plan",
        paces=paces,
        spans=tuple(spans),
        losses=tuple(Loss(step=step, value=2.3 * 0.97**step) for step in range(steps)),
        profile=PROFILE,
        network=NETWORK,
        plan=PLAN,
    )
    return RunRecord(
        rank=rank,
        ranks=ranks,
        command=f"torchrun --nproc-per-node {ranks} -m syncline.run train.py",
        ended=ended,
        seconds=41.0,
        tuning_s=12.0,
        date="2026-11-16T01:00:00+00:00",
        torch="2.13.0",
        syncline="0.1.0",
        clock_s=1000.0,
        models=(model,),
    )


@dataclasses.dataclass
class Mark:
    """Something that can be pointed at."""

    section: str
    attributes: dict[str, str]
    says: str = ""

    def value(self, name: str) -> float:
        return float(self.attributes[f"data-{name}"])


class Seen(HTMLParser):
    """What a browser would make of the page, as far as these tests ask."""

    VOID = frozenset({"meta", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.marks: list[Mark] = []
        self.tags: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self._marks: list[Mark | None] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"
        self.text = " ".join(self.text.replace("\u00a0", " ").split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        assert len(given) == len(attrs), f"twice the same attribute: {attrs}"
        assert not any(re.search(r"(?<![a-z])(nan|inf)(?![a-z])", v) for k, v in given.items() if k in NUMBERS), attrs
        self.tags.append(tag)
        if tag == "section":
            self.sections.append(given["id"])
        mark = None
        if "mark" in given.get("class", "").split():
            mark = Mark(self.sections[-1], given, given.get("title", ""))
            self.marks.append(mark)
        if tag not in self.VOID:
            self._open.append(tag)
            self._marks.append(mark)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> in {self._open}"
        self._open.pop()
        self._marks.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "title" and len(self._marks) > 1 and self._marks[-2] is not None:
            self._marks[-2].says += data
        elif not {"style", "script"} & set(self._open):
            self.text += f" {data}"

    def of(self, section: str, attribute: str = "class") -> list[Mark]:
        return [mark for mark in self.marks if mark.section == section and attribute in mark.attributes]


NUMBERS = frozenset({"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height", "d", "data-y", "data-seconds"})


def page_of(inputs: Inputs) -> Seen:
    return Seen(render(build_page(inputs)))


def near(values: list[float]) -> list[object]:
    """Marks carry six digits."""
    return [pytest.approx(value, rel=1e-5, abs=1e-12) for value in values]


# What each kind of file shows.


@pytest.mark.parametrize(
    ("inputs", "sections"),
    [
        (Inputs(profile=PROFILE), ["model"]),
        (Inputs(network=NETWORK), ["links"]),
        (Inputs(plans={"the plan": PLAN}), ["plan"]),
        (Inputs(benches=(BENCH,)), ["bench"]),
        (Inputs(PROFILE, NETWORK), ["step", "timeline", "remedies", "scaling", "model", "links"]),
        (
            Inputs(PROFILE, NETWORK, {"the plan": PLAN}, benches=(BENCH,)),
            ["bench", "step", "timeline", "remedies", "plan", "scaling", "model", "links"],
        ),
        (
            Inputs(demo=DEMO),
            ["demo", "step", "timeline", "remedies", "plan", "plan-2", "scaling", "training", "model", "links"],
        ),
        (
            Inputs(runs=tuple(a_run(rank) for rank in range(4))),
            ["ranks", "step", "timeline", "remedies", "plan", "scaling", "training", "model", "links"],
        ),
    ],
    ids=["profile", "network", "plan", "bench", "profile+network", "all but a run", "demo", "run"],
)
def test_there_is_a_section_for_everything_that_is_known_and_for_nothing_else(
    inputs: Inputs, sections: list[str]
) -> None:
    seen = page_of(inputs)
    assert [name for name in seen.sections if name != "sources"] == [*sections, "assumptions"]
    assert {mark.section for mark in seen.marks} == set(sections)
    assert all(mark.says for mark in seen.marks)
    assert "docs/assumptions.md" in seen.text


def test_a_waterfall_adds_up_to_the_step_that_is_predicted() -> None:
    seen = page_of(Inputs(PROFILE, NETWORK))
    found = diagnose(PROFILE, NETWORK, Schedule.of(PROFILE))
    one = found.prediction
    marks = [mark for mark in seen.of("step", "data-seconds") if mark.attributes["data-kind"] != "hidden"]
    shown = {name: lost for name, lost in lost_to(one.losses).items() if lost >= 0.01 * one.iteration_s}
    causes = [mark.value("seconds") for mark in marks[: 1 + len(shown)]]
    assert causes == near([one.compute_s, *shown.values()])
    assert sum(mark.value("seconds") for mark in marks[1 + len(shown) :]) == pytest.approx(one.iteration_s, rel=1e-4)
    assert " ".join(sentences.diagnosis(found).split())[1:] in seen.text


def test_timelines_hold_every_bucket_where_the_simulation_has_it_before_and_after() -> None:
    seen = page_of(Inputs(PROFILE, NETWORK, {"the plan": PLAN}))
    marks = seen.of("timeline", "data-bytes")
    plain = predict(PROFILE, NETWORK, Schedule.of(PROFILE))
    buckets = len(plain.schedule.buckets)
    ends = {mark.attributes["data-bucket"]: mark.value("end-s") for mark in marks[:buckets]}
    assert set(ends) <= {str(number) for number in range(buckets)}
    for bucket, end_s in ends.items():
        assert end_s == pytest.approx(PROFILE.forward_s + plain.timeline.end_s[bucket], rel=1e-4)
    assert {mark.attributes["data-kind"] for mark in marks} == {"hidden", "exposed"}
    assert "Plain DDP: " in seen.text and "The plan: " in seen.text


def test_measured_timelines_are_a_steps_own_buckets() -> None:
    record = a_run()
    seen = page_of(Inputs(runs=(record,)))
    span = record.models[0].spans[-2]
    measured = [mark for mark in seen.of("timeline", "data-bytes") if mark.value("bytes") >= 400_000][:8]
    for mark in measured[:4]:
        bucket = next(one for one in span.buckets if str(one.bucket) == mark.attributes["data-bucket"])
        assert mark.value("start-s") == pytest.approx(bucket.start_s - span.start_s, abs=1e-6)
        assert mark.value("end-s") == pytest.approx(bucket.end_s - span.start_s, abs=1e-6)
        assert mark.value("bytes") == bucket.bytes
    marks = [mark for mark in seen.of("timeline", "data-end-s") if "data-bucket" not in mark.attributes]
    per_second = [
        float(mark.attributes["width"].rstrip("%")) / (mark.value("end-s") - mark.value("start-s")) for mark in marks
    ]
    assert len(marks) >= 6  # of the step that was seen, and of those that are predicted: all on one scale
    assert per_second == [pytest.approx(per_second[0], rel=1e-2)] * len(marks)
    own = seen.of("timeline", "data-own-s")
    assert own and all(mark.value("own-s") == pytest.approx(0.003, rel=1e-3) for mark in own[:4])


def test_paces_of_a_run_name_the_rank_that_the_others_wait_for() -> None:
    seen = page_of(Inputs(runs=tuple(a_run(rank) for rank in range(4))))
    parts = {mark.attributes["data-kind"]: mark.value("seconds") for mark in seen.of("step", "data-rank")[3:6]}
    assert parts == {
        "compute": pytest.approx(0.03),
        "exposed": pytest.approx(0.056),
        "waiting": pytest.approx(0.004),
    }
    assert any("waiting for rank 2" in mark.says for mark in seen.of("step"))
    assert "A step of Net takes 90.0 ms with the plan, and took 130 ms with plain DDP: 1.44× faster." in seen.text
    assert "The plan stays: it was faster when tried." in seen.text


def test_bench_rows_are_the_results_own_with_what_was_predicted() -> None:
    seen = page_of(Inputs(benches=(BENCH,)))
    steps = {mark.attributes["data-method"]: mark.value("step-ms") for mark in seen.of("bench", "data-step-ms")}
    assert list(steps) == [row.method for row in BENCH.rows]
    assert list(steps.values()) == near([row.step_ms for row in BENCH.rows])
    foreseen = [mark.value("predicted-ms") for mark in seen.of("bench", "data-predicted-ms")]
    assert foreseen == near([row.predicted_ms or 0 for row in BENCH.rows])
    assert "Plain DDP takes 135 ms per step, 77% of it exposed communication" in seen.text
    command = "syncline bench --hosts 4 --rate 200mbit --model cnn"
    assert command in page_of(Inputs(benches=(msgspec.structs.replace(BENCH, command=command),))).text


def test_alternatives_remedies_and_scaling_are_the_plans_and_the_predictors_own() -> None:
    seen = page_of(Inputs(PROFILE, NETWORK, {"the plan": PLAN}, benches=(BENCH,)))
    bars = [mark.value("seconds") for mark in seen.of("plan", "data-seconds")]
    assert bars == near([PLAN.iteration_s, *(other.iteration_s for other in PLAN.alternatives)])
    found = diagnose(PROFILE, NETWORK, Schedule.of(PROFILE))
    changed = [mark.value("seconds") for mark in seen.of("remedies", "data-seconds")]
    assert changed == near([found.prediction.iteration_s, *(one.prediction.iteration_s for one in found.remedies)])
    kinds = [mark.attributes["data-kind"] for mark in seen.of("remedies", "data-seconds")][1:]
    assert kinds == ["hardware" if one.hardware else "lossy" if one.lossy else "change" for one in found.remedies]
    dots = {(mark.attributes["data-series"], mark.value("x")): mark.value("y") for mark in seen.of("scaling", "data-y")}
    for hosts in (2, 4, 64):
        expected = predict(PROFILE, NETWORK.with_hosts(hosts), Schedule.of(PROFILE)).iteration_s
        assert dots["plain DDP", hosts] == pytest.approx(expected, rel=1e-5)


def test_links_are_the_networks_matrix_and_the_points_of_every_sweep() -> None:
    seen = page_of(Inputs(network=NETWORK))
    rates = [mark.value("value") for mark in seen.of("links", "data-value")]
    matrix = NETWORK.matrix_bytes_per_s
    assert rates == near([matrix[a][b] for a in range(4) for b in range(4) if a != b])
    dots = [(mark.value("x"), mark.value("y")) for mark in seen.of("links", "data-series")]
    points = [(p.bytes, p.median_s) for one in NETWORK.collectives for p in sorted(one.points, key=lambda p: p.bytes)]
    assert [tuple(near([x, y])) for x, y in points] == dots


def test_training_curves_are_the_losses() -> None:
    seen = page_of(Inputs(demo=DEMO))
    plain = [mark.value("y") for mark in seen.of("training", "data-y") if mark.attributes["data-series"] == "plain DDP"]
    losses = DEMO.row("ddp").losses
    assert plain[0] == pytest.approx(losses[0], rel=1e-5) and plain[-1] == pytest.approx(losses[-1], rel=1e-5)
    assert set(plain) <= {float(f"{loss:.6g}") for loss in losses}


def test_a_demo_begins_with_its_verdict_and_draws_held_out_loss_over_time() -> None:
    page = build_page(Inputs(demo=GPT_DEMO))
    plain, same = GPT_DEMO.row("ddp"), GPT_DEMO.row("tune-same")
    assert plain.reached_s is not None and same.reached_s is not None
    assert page.verdict.startswith('With quality="same" (4 bits), the model reaches plain DDP\'s held-out loss ')
    assert f"{plain.reached_s / same.reached_s:.1f} times sooner" in page.verdict and "emulated" in page.verdict
    assert page.warning.startswith("Emulated: ")
    assert [section.name for section in page.sections][:3] == ["demo", "chosen", "step"]
    seen = Seen(render(page))
    drawn = list(seen.of("demo", "data-series"))
    assert len({mark.attributes["data-series"] for mark in drawn}) == 3  # "exact" kept plain DDP, and has no curve
    dots = [(mark.value("x"), mark.value("y")) for mark in drawn if "plain DDP" in mark.attributes["data-series"]]
    assert dots == [tuple(near([point.seconds, point.bits_per_byte])) for point in plain.held_out[1:]]
    assert "tune, exact: plain DDP kept" in seen.text and "repaid after" in seen.text
    assert sentences.demo_method(same) in [mark.attributes["data-series"] for mark in drawn]


def test_a_demo_says_so_if_a_method_does_not_reach_the_loss_or_nothing_is_faster() -> None:
    def changed(**fields: object) -> list[DemoRow]:
        return [
            msgspec.structs.replace(row, **fields) if row.method.startswith("tune-") else row for row in GPT_DEMO.rows
        ]

    late = page_of(Inputs(demo=msgspec.structs.replace(GPT_DEMO, rows=changed(reached_s=None))))
    assert "No quality reaches plain DDP's held-out loss sooner" in late.text
    assert late.text.count("not reached") >= 3 and "was not reached in 100 steps" in late.text
    kept = page_of(
        Inputs(demo=msgspec.structs.replace(GPT_DEMO, rows=changed(same_as="ddp", setting="plain DDP kept")))
    )
    assert "No quality reaches plain DDP's held-out loss sooner" in kept.text
    assert 'quality="same" keeps plain DDP' in kept.text
    loopback = msgspec.structs.replace(GPT_DEMO.cluster, emulated=False)
    unshaped = page_of(Inputs(demo=msgspec.structs.replace(GPT_DEMO, cluster=loopback)))
    assert "its links were not slowed down" in unshaped.text and "mulated hosts" not in unshaped.text


def test_gradients_are_ready_when_the_profile_says() -> None:
    seen = page_of(Inputs(profile=PROFILE))
    dots = [(mark.value("x"), mark.value("y")) for mark in seen.of("model", "data-y")]
    assert [x for x, _ in dots] == near([gradient.ready_s for gradient in PROFILE.gradients])
    assert dots[-1][1] == pytest.approx(PROFILE.gradient_bytes, rel=1e-5)


def test_links_that_nobody_measured_are_called_so_everywhere() -> None:
    seen = page_of(Inputs(PROFILE, assumed_network(4, 1, 10**9)))
    assert "Link speeds are assumed, not measured: syncline probe measures yours." in seen.text
    assert seen.text.count("predicted, links assumed") >= 4


def test_what_was_asked_of_predict_is_what_is_drawn() -> None:
    inputs = Inputs(PROFILE, NETWORK, schedules=("bf16", "ddp"), hosts=(8, 2), rates_bps=(10**9, 10**10))
    seen = page_of(inputs)
    series = list(dict.fromkeys(mark.attributes["data-series"] for mark in seen.of("scaling", "data-series")))
    assert series == ["bf16, 1 Gbit/s", "plain DDP, 1 Gbit/s", "bf16, 10 Gbit/s", "plain DDP, 10 Gbit/s"]
    assert "8 hosts, 1 Gbit/s links" in seen.text
    one = predict(PROFILE, NETWORK.with_hosts(8).with_rate(10**9), Schedule.parse(PROFILE, "bf16", "gloo"))
    assert f"of {milliseconds_text(one.iteration_s)} per step" in seen.text


# Names stay text.


def test_whatever_people_name_stays_text() -> None:
    gradients = tuple(
        msgspec.structs.replace(gradient, name=f"{EVIL}{place}") for place, gradient in enumerate(PROFILE.gradients)
    )
    profile = msgspec.structs.replace(PROFILE, gradients=gradients, model=EVIL, where=EVIL, how=EVIL)
    network = msgspec.structs.replace(NETWORK, where=EVIL, how=EVIL, date=EVIL)
    plan = make_plan(profile, network, ("bf16",))
    plan = msgspec.structs.replace(plan, reason=EVIL, how=EVIL)
    bench = msgspec.structs.replace(
        BENCH,
        model=msgspec.structs.replace(BENCH.model, name=EVIL),
        rows=[msgspec.structs.replace(row, method=f"{row.method}{EVIL}", setting=EVIL) for row in BENCH.rows],
        command=f"syncline bench {EVIL}",
    )
    record = a_run(name=EVIL, ended=EVIL)
    model = msgspec.structs.replace(
        record.models[0],
        outcome=EVIL,
        way=EVIL,
        paces=tuple(msgspec.structs.replace(pace, way=EVIL + pace.way) for pace in record.models[0].paces),
        spans=tuple(msgspec.structs.replace(span, way=EVIL + span.way) for span in record.models[0].spans),
        profile=profile,
        network=network,
        plan=plan,
    )
    record = msgspec.structs.replace(record, command=f'torchrun "{EVIL}" train.py', models=(model,))
    for inputs in (
        Inputs(profile, network, {EVIL: plan}, benches=(bench,), files={"profile": (EVIL,), "plan": (f'"{EVIL}"',)}),
        Inputs(runs=(record,), files={"run": (EVIL,)}),
    ):
        text = render(build_page(inputs))
        assert EVIL not in text and '"<script' not in text
        seen = Seen(text)
        assert seen.tags.count("script") == 1
        assert seen.text.count(EVIL) > 5
        assert any(EVIL in mark.says for mark in seen.marks)


def test_half_characters_and_control_characters_do_not_break_the_page(tmp_path: Path) -> None:
    profile = msgspec.structs.replace(PROFILE, model="half \ud800 \x00 \x1b[31m")
    write_report(tmp_path / "page.html", Inputs(profile=profile))
    assert "half ?" in (tmp_path / "page.html").read_text()


# One file, nothing from elsewhere.


def test_the_page_asks_nothing_of_any_network() -> None:
    text = render(build_page(Inputs(demo=DEMO)))
    assert not re.search(r"""(src|href|action|url)\s*[=(]\s*["']?\s*(https?:)?//""", text)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and "default-src &#39;none&#39;" in policy[1]
    for name in ("style", "script"):
        inside = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
        assert inside is not None
        digest = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        assert f"sha256-{digest.replace('+', '&#43;')}" in policy[1] or f"sha256-{digest}" in policy[1]
    assert " style=" not in text and " onclick=" not in text


# Odd models, clusters and runs.


def _many() -> Inputs:
    """Five thousand gradients, in 500 buckets."""
    gradients = tuple(
        Gradient(name=f"layer{place}", shape=(1000,), dtype="float32", bytes=4000, ready_s=0.1 * (place + 1) / 5000)
        for place in range(5000)
    )
    profile = msgspec.structs.replace(PROFILE, gradients=gradients, backward_s=0.1)
    network = assumed_network(2, 1, 10**9)
    buckets = tuple(tuple(range(first, first + 10)) for first in range(0, 5000, 10))
    one = predict(profile, network, Schedule("each", buckets))
    plan = plan_for(one, plain_s=0.3, reason="each")
    return Inputs(profile, network, {"the plan": plan}, hosts=(2, 4))


def _without(record: RunRecord, **changed: object) -> RunRecord:
    models = tuple(msgspec.structs.replace(model, **changed) for model in record.models)
    return msgspec.structs.replace(record, models=models)


def sent_nothing(network: Network) -> Network:
    def emptied(entry: Collective) -> Collective:
        points = tuple(msgspec.structs.replace(point, sent_bytes=0) for point in entry.points)
        return msgspec.structs.replace(entry, points=points)

    return msgspec.structs.replace(network, collectives=tuple(map(emptied, network.collectives)))


ODD: dict[str, Callable[[], Inputs]] = {
    "one rank": lambda: Inputs(PROFILE, assumed_network(1, 1, 10**9)),
    "one host": lambda: Inputs(PROFILE, assumed_network(1, 4, 10**9)),
    "everything a network may have": lambda: Inputs(made_up.profile(), made_up.RICH_NETWORK),
    "no collectives": lambda: Inputs(PROFILE, msgspec.structs.replace(NETWORK, collectives=())),
    "a collective that sent nothing": lambda: Inputs(PROFILE, sent_nothing(made_up.RICH_NETWORK)),
    "no links": lambda: Inputs(PROFILE, msgspec.structs.replace(NETWORK, links=())),
    "no times, no bytes": lambda: Inputs(made_up.profile([0], forward_s=0.0, backward_s=0.0), made_up.network()),
    "times of centuries": lambda: Inputs(made_up.profile(forward_s=1e12, backward_s=1e12), made_up.network()),
    "plain DDP is best": lambda: Inputs(plans={"the plan": make_plan(PROFILE, NETWORK)}),
    "a plan without alternatives": lambda: Inputs(
        plans={"p": msgspec.structs.replace(PLAN, alternatives=PLAN.alternatives[:1])}
    ),
    "5,000 gradients": _many,
    "300 hosts": lambda: Inputs(PROFILE, assumed_network(300, 1, 10**9)),
    "a bench without rows": lambda: Inputs(benches=(msgspec.structs.replace(BENCH, rows=[]),)),
    "a bench of one method": lambda: Inputs(benches=(msgspec.structs.replace(BENCH, rows=BENCH.rows[:1]),)),
    "a bench of no time": lambda: Inputs(
        benches=(
            msgspec.structs.replace(
                BENCH, rows=[msgspec.structs.replace(row, step_ms=0.0, vs_ddp=0.0) for row in BENCH.rows]
            ),
        )
    ),
    "an old demo": lambda: Inputs(demo=msgspec.structs.replace(DEMO, network=None, tunings={})),
    "a run without models": lambda: Inputs(runs=(msgspec.structs.replace(a_run(), models=()),)),
    "a run without steps": lambda: Inputs(runs=(_without(a_run(), steps=0, paces=(), spans=(), losses=()),)),
    "a run that only looked": lambda: Inputs(
        runs=(_without(a_run(), plan=None, network=None, profile=None, way="plain DDP"),)
    ),
    "a run that does not know its hosts": lambda: Inputs(runs=(_without(a_run(), host_of_rank=()),)),
    "a run of two models": lambda: Inputs(
        runs=tuple(msgspec.structs.replace(run, models=run.models * 2) for run in (a_run(0), a_run(1)))
    ),
    "a run that crashed": lambda: Inputs(runs=(a_run(1, ended="RuntimeError: connection closed"), a_run(3))),
    "a negative loss": lambda: Inputs(
        runs=(_without(a_run(), losses=(Loss(step=0, value=-2.0), Loss(step=9, value=-3))),)
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_ones_have_a_page_too(name: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_report(path, ODD[name]())
    assert path.stat().st_size < 2_000_000
    seen = Seen(path.read_text())
    assert seen.text
    says = {
        "5,000 gradients": "460 more buckets not shown.",
        "one rank": "one rank exchanges nothing",
        "300 hosts": "300 hosts",
        "a run without models": "The script built no DistributedDataParallel model",
        "a run without steps": "Net took 0 steps, too few to say how long they take.",
        "a run of two models": "Where the time of a step goes: Net",
        "a run that crashed": "The run did not finish: rank 1: RuntimeError: connection closed. "
        "There is no record of ranks 0, 2.",
        "plain DDP is best": "Nothing that is allowed is faster than plain DDP, predicted at",
    }
    assert says.get(name, "") in seen.text


def test_a_page_of_one_record_says_whose_it_is() -> None:
    assert "The run is shown as rank 0 of 4 recorded it" in page_of(Inputs(runs=(a_run(),))).text


@given(st.lists(st.floats(min_value=0, max_value=1e15), min_size=1, max_size=5))
@example([5e-324])
@example([26000000000001.0])
@settings(max_examples=40, deadline=None)
def test_axes_hold_everything_that_is_drawn_on_them(values: list[float]) -> None:
    drawn = [
        charts.linear_axis("", values, str),
        charts.log_axis("", values, str),
        charts.linear_axis("", [*values, -values[0]], str),
        charts.linear_axis("", values, duration_text),
        charts.count_axis("", [1 + int(value) for value in values]),
    ]
    for axis in drawn:
        assert axis.low < axis.high and 1 <= len(axis.ticks) <= 24
        assert all(-1e-4 <= axis.percent(tick) <= 100 + 1e-4 for tick, _ in axis.ticks)
    for axis in drawn[:4]:
        assert all(axis.percent(value) <= 100 + 1e-4 for value in values)


# What does not belong together.


def other_profile() -> Profile:
    return load_profile("gpt-small-cpu")


@pytest.mark.parametrize(
    ("known", "says"),
    [
        (
            {"profile": other_profile(), "plans": {"p": PLAN}},
            "p has 1.69 MB of gradients, but the profile has 43.2 MB: are these files of two different models?",
        ),
        (
            {"network": assumed_network(2, 1, 10**9), "plans": {"p": PLAN}},
            "p is for 4 hosts with 4 ranks, but the network has 2 hosts with 2 ranks",
        ),
        ({"profile": other_profile(), "benches": (BENCH,)}, "are these files of two different models?"),
        ({"runs": (a_run(0), a_run(0))}, "two records are of rank 0"),
        ({"runs": (a_run(0, 4), a_run(1, 8))}, "these records are of two runs, with 4 ranks and 8"),
        ({"runs": (a_run(9, 4),)}, "rank 9 of 4"),
        (
            {"runs": (_without(a_run(), network=None, plan=None),), "network": assumed_network(2, 1, 10**9)},
            "Net of rank 0 is for 4 hosts with 4 ranks, but the network has 2 hosts",
        ),
        (
            {"runs": (_without(a_run(), profile=None, plan=None),), "profile": other_profile()},
            "are these files of two different models?",
        ),
        ({"demo": msgspec.structs.replace(DEMO, rows=DEMO.rows[1:])}, "rows: nosync is missing"),
        ({"demo": msgspec.structs.replace(GPT_DEMO, rows=GPT_DEMO.rows[:4])}, "rows: tune-close is missing"),
    ],
)
def test_what_contradicts_itself_is_refused(known: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        Inputs(**known)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


# The command.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, with a file of each kind."""
    monkeypatch.chdir(tmp_path)
    PROFILE.save("profile.json")
    NETWORK.save("network.json")
    PLAN.save("plan.json")
    write_json("bench.json", BENCH)
    write_json("demo.json", DEMO)
    Path("run").mkdir()
    for rank in range(2):
        a_run(rank, 2).save(f"run/rank-{rank:04d}.json")
    return tmp_path


def run(*arguments: str) -> Result:
    return runner.invoke(app, ["report", *arguments])


def test_files_are_known_by_their_content_in_any_order(folder: Path) -> None:
    names = ["bench.json", "plan.json", "network.json", "profile.json"]
    answer = run(*names, "--json", "said.json")
    assert answer.exit_code == 0, answer.stderr
    seen = Seen(Path("report.html").read_text())
    assert {"bench", "plan", "links", "model", "step"} <= set(seen.sections)
    assert all(name in seen.text for name in names)
    assert "syncline predict --profile profile.json --network network.json" in seen.text
    said = json.loads(Path("said.json").read_text())
    told = " ".join(answer.stdout.split())
    assert said["verdict"] in told and said["verdict"] in seen.text
    assert "Report: report.html" in told
    assert len(answer.stdout.splitlines()) <= 40


def test_a_runs_folder_is_a_page_and_a_trace(folder: Path) -> None:
    answer = run("run", "run/rank-0000.json", "--output", "page.html", "--trace", "trace.json")
    assert answer.exit_code == 0, answer.stderr
    assert "A step of Net takes 90.0 ms with the plan" in " ".join(answer.stdout.split())
    assert "torchrun --nproc-per-node 2 -m syncline.run train.py" in Seen(Path("page.html").read_text()).text
    assert json.loads(Path("trace.json").read_text())


def test_a_demo_is_read_with_and_without_what_tuning_found(folder: Path) -> None:
    assert run("demo.json").exit_code == 0
    assert run(str(RESULTS / "demo-2026-11-15.json"), "--output", "old.html").exit_code == 0
    assert Path("old.html").stat().st_size < Path("report.html").stat().st_size
    for path in RESULTS.glob("bench-*.json"):
        assert read_inputs([path]).benches[0].rows


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.json"], "nowhere.json: cannot be read: No such file"),
        (["half.json"], "half.json: is not complete JSON"),
        (["binary.json"], "binary.json: is not a text file"),
        (["other.json"], "other.json: is none of Syncline's files"),
        (["list.json"], "list.json: is none of Syncline's files"),
        (["newer.json"], "newer.json: schema: is 2, and this release reads up to 1"),
        (["nan.json"], "must be a finite number"),
        (["predicted.json"], "was written by syncline predict --json: pass the profile and the network"),
        (["empty"], "empty: has no rank-*.json: name the folder of a run or of failure reports"),
        (["profile.json", "again.json"], "profile.json and again.json are both a profile"),
        (["plan.json", "gpt.json"], "the plan has 1.69 MB of gradients, but the profile has"),
        (["profile.json", "--trace", "trace.json"], "--trace needs a run"),
        (["profile.json", "--output", "nowhere/page.html"], "there is no folder nowhere"),
        (["profile.json", "--output", "run"], "run is a folder: name a file to write to"),
    ],
)
def test_a_mistake_gets_one_line_and_leaves_the_page_as_it_was(arguments: list[str], says: str, folder: Path) -> None:
    Path("report.html").write_text("the page of before")
    Path("half.json").write_text(Path("profile.json").read_text()[:200])
    Path("binary.json").write_bytes(b"\xff\xfe\x00")
    Path("other.json").write_text('{"schema": 1}')
    Path("list.json").write_text("[1, 2]")
    Path("newer.json").write_text(Path("plan.json").read_text().replace('"schema": 1', '"schema": 2'))
    Path("nan.json").write_text(Path("network.json").read_text().replace('"in_flight": 2', '"in_flight": NaN'))
    Path("predicted.json").write_text('{"schema": 1, "culprit": null, "rows": []}')
    Path("empty").mkdir()
    PROFILE.save("again.json")
    other_profile().save("gpt.json")
    answer = run(*arguments)
    assert answer.exit_code == 2, answer.output
    assert answer.stdout == "" and len(answer.stderr.strip().splitlines()) == 1
    assert says in answer.stderr
    assert Path("report.html").read_text() == "the page of before"


def test_help_fits_a_screen() -> None:
    for command in ("report", "demo", "bench", "plan", "predict"):
        answer = runner.invoke(app, [command, "--help"])
        assert answer.exit_code == 0 and len(answer.stdout.splitlines()) <= 50, command
        assert "HTML" in answer.stdout


# Other commands write their own.


def test_predict_and_plan_write_a_page_with_the_command_that_made_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, section in (("predict", "scaling"), ("plan", "plan")):
        words = [command, "--profile", "profile.json", "--network", "network.json", "--report", f"{command}.html"]
        monkeypatch.setattr(sys, "argv", ["/somewhere/bin/syncline", *words])
        answer = runner.invoke(app, words)
        assert answer.exit_code == 0, answer.stderr
        assert f"Report: {command}.html" in answer.stdout
        seen = Seen(Path(f"{command}.html").read_text())
        assert section in seen.sections and "timeline" in seen.sections
        assert f"syncline {command} --profile profile.json --network network.json --report {command}.html" in seen.text


def test_a_plan_from_a_file_is_applied_by_its_name(folder: Path) -> None:
    assert run("plan.json").exit_code == 0
    assert 'model = syncline.wrap(net, "plan.json")' in Seen(Path("report.html").read_text()).text


def test_a_plan_made_with_other_measurements_says_so() -> None:
    slower = msgspec.structs.replace(NETWORK, links=tuple(link.times(0.25) for link in NETWORK.links))
    seen = page_of(Inputs(PROFILE, slower, {"the plan": PLAN}))
    assert "It was made with other measurements" in seen.text
    assert isinstance(PLAN, Plan) and not PLAN.lossless and "changes numerics" in seen.text


@pytest.mark.parametrize(
    ("inputs", "advice"),
    [
        (Inputs(PROFILE, NETWORK), "First change: bf16 on the wire (lossy), predicted to take "),
        (Inputs(PROFILE, NETWORK, {"the plan": PLAN}), "Apply the lossy plan: "),
        (Inputs(PROFILE, NETWORK, {"the plan": make_plan(PROFILE, NETWORK)}), "Keep plain DDP: "),
        (Inputs(benches=(BENCH,)), "Use powersgd, lossy: measured 2.22× faster than plain DDP."),
        (Inputs(demo=GPT_DEMO), 'Call syncline.tune(model, step, optimizer=optimizer, quality="same").'),
        (Inputs(runs=(a_run(),)), "Keep the plan: the run ended with it."),
    ],
    ids=["profile+network", "plan", "no plan", "bench", "demo", "run"],
)
def test_a_page_recommends_one_thing_and_says_what_was_emulated(inputs: Inputs, advice: str) -> None:
    page, seen = build_page(inputs), page_of(inputs)
    assert page.recommendation.startswith(advice) and "\n" not in page.recommendation
    assert f"Recommendation {page.recommendation}" in seen.text
    assert page.warning.startswith("Emulated: ") and page.warning in seen.text


def test_legends_name_what_can_be_seen() -> None:
    tiny = charts.Bar("own", 0.0, 1e-4, "")
    chart = charts.Bars("", [charts.Row("", (charts.Bar("compute", 0.0, 1.0, ""), tiny))])
    assert chart.legend_entries == [("k-compute", "computation")]
    small = msgspec.structs.replace(chart, rows=[charts.Row("", (tiny,))])
    assert small.legend_entries == [("k-own", charts.KINDS["own"])], "on its own scale"


def test_causes_that_cannot_be_drawn_share_a_row() -> None:
    seen = page_of(Inputs(PROFILE, NETWORK))
    one = predict(PROFILE, NETWORK, Schedule.of(PROFILE))
    small_s = sum(lost for lost in lost_to(one.losses).values() if lost < 0.01 * one.iteration_s)
    shown = f"other causes, too small to draw {milliseconds_text(small_s)}"
    assert (shown in seen.text) == (small_s >= 5e-4 * one.iteration_s)
