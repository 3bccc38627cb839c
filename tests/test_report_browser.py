"""The page in a browser: it shows, says and hides what it should, by mouse, by keyboard, in the dark and on a phone."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from syncline.report.inputs import Inputs
from syncline.report.page import write_report
from syncline.report.read_inputs import read_inputs
from test_report import BENCH, EVIL, GPT_DEMO, NETWORK, PLAN, PROFILE, a_run
from test_report_failure import reports as reports

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

_WAIT_MS = 5_000


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, reports: Path) -> dict[str, Path]:
    """Pages of everything, a run, the demo, a killed rank, and a parameter that would like to be a script."""
    folder = tmp_path_factory.mktemp("pages")
    gradients = tuple(
        msgspec.structs.replace(gradient, name=f"{EVIL}{place}") for place, gradient in enumerate(PROFILE.gradients)
    )
    pages = {
        "all": Inputs(PROFILE, NETWORK, {"the plan": PLAN}, benches=(BENCH,)),
        "run": Inputs(runs=tuple(a_run(rank) for rank in range(4))),
        "demo": Inputs(demo=GPT_DEMO),
        "failure": read_inputs([reports]),
        "evil": Inputs(msgspec.structs.replace(PROFILE, gradients=gradients, model=EVIL), NETWORK),
    }
    for name, inputs in pages.items():
        write_report(folder / f"{name}.html", inputs)
    return {name: folder / f"{name}.html" for name in pages}


class Opened:
    """A page that may not complain, nor ask for anything, while it is open."""

    def __init__(self, browser: playwright.Browser, path: Path, *, width: int = 1100, dark: bool = False) -> None:
        scheme = "dark" if dark else "light"
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(_WAIT_MS)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self._address = path.as_uri()
        self.page.goto(self._address)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.page.close()
        if error is None:
            assert self.complaints == []
            assert {request.partition("#")[0] for request in self.requests} == {self._address}

    @property
    def said(self) -> str:
        """In the tooltip; empty where there is none to be seen."""
        tip = self.page.locator("#tip")
        return tip.inner_text() if tip.is_visible() else ""


def test_what_is_named_like_a_script_is_text(browser: playwright.Browser, paths: dict[str, Path]) -> None:
    with Opened(browser, paths["evil"]) as opened:
        assert EVIL in opened.page.inner_text("body")
        opened.page.locator("#model .mark").last.hover()
        assert EVIL in opened.said
        assert opened.page.locator("script").count() == 1


@pytest.mark.parametrize("name", ["all", "run", "demo"])
def test_every_chart_has_marks_that_can_be_seen_and_say_something(
    name: str, browser: playwright.Browser, paths: dict[str, Path]
) -> None:
    with Opened(browser, paths[name]) as opened:
        charts = opened.page.evaluate(
            """() => [...document.querySelectorAll(".chart")].map((chart) => {
                const marks = [...chart.querySelectorAll(".mark")];
                const boxes = marks.map((mark) => mark.getBoundingClientRect());
                const inside = chart.getBoundingClientRect();
                return {
                    name: chart.querySelector("caption, figcaption").innerText,
                    marks: marks.length,
                    unseen: boxes.filter((box) => !(box.width > 0 && box.height > 0)).length,
                    outside: boxes.filter((box) => box.left < inside.left - 9 || box.right > inside.right + 9).length,
                    mute: marks.filter((mark) => !mark.getAttribute("aria-label")).length,
                    reached: marks.filter((mark) => mark.tabIndex === 0).length,
                };
            })"""
        )
        assert len(charts) >= 6
        for chart in charts:
            assert chart["marks"] >= 1 and chart["reached"] == 1, chart
            assert chart["unseen"] == chart["outside"] == chart["mute"] == 0, chart


def test_bars_are_as_long_as_their_values(browser: playwright.Browser, paths: dict[str, Path]) -> None:
    with Opened(browser, paths["all"]) as opened:
        bars = opened.page.evaluate(
            """() => [...document.querySelectorAll("#plan rect[data-seconds]")]
                .map((bar) => [Number(bar.dataset.seconds), bar.getBoundingClientRect().width])"""
        )
        expected = [PLAN.iteration_s, *(other.iteration_s for other in PLAN.alternatives)]
        assert [value for value, _ in bars] == [pytest.approx(value, rel=1e-5) for value in expected]
        per_second = [width / value for value, width in bars]
        assert max(per_second) == pytest.approx(min(per_second), rel=0.02)


def test_pointing_at_a_mark_shows_its_figures_and_leaving_hides_them(
    browser: playwright.Browser, paths: dict[str, Path]
) -> None:
    row = next(row for row in BENCH.rows if row.method == "bf16")
    with Opened(browser, paths["all"]) as opened:
        assert opened.said == ""
        opened.page.locator('#bench rect[data-method="bf16"]').first.hover()
        assert f"bf16: {row.step_ms:.1f} ms per step" in opened.said
        box = opened.page.locator("#tip").bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 1100
        opened.page.locator("h1").hover()
        assert opened.said == ""


def test_the_keyboard_reaches_marks_and_shows_the_same(browser: playwright.Browser, paths: dict[str, Path]) -> None:
    with Opened(browser, paths["all"]) as opened:
        page = opened.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        for _ in range(3):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.classList.contains('mark')"):
                break
        first = opened.said
        assert first.startswith("nosync: ")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        page.keyboard.press("ArrowRight")
        assert opened.said.startswith("nosync: ") and opened.said != first
        page.keyboard.press("End")
        assert opened.said.startswith("powersgd: ")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == opened.said
        page.keyboard.press("Tab")  # on to the next chart
        assert page.evaluate("document.activeElement.closest('section').id") == "step"
        page.keyboard.press("Shift+Tab")  # and back to where one was
        assert opened.said.startswith("powersgd: ")
        page.keyboard.press("Escape")
        assert opened.said == ""


@pytest.mark.parametrize("name", ["all", "run", "demo", "failure", "evil"])
def test_a_narrow_screen_never_scrolls_sideways(name: str, browser: playwright.Browser, paths: dict[str, Path]) -> None:
    with Opened(browser, paths[name], width=360) as opened:
        assert opened.page.evaluate("document.documentElement.scrollWidth") == 360
        small = opened.page.evaluate(
            """() => [...document.querySelectorAll("svg text, p, td, th, li, dd")]
                .filter((one) => one.getClientRects().length && parseFloat(getComputedStyle(one).fontSize) < 11)
                .map((one) => one.textContent)"""
        )
        assert small == []


CONTRASTS = """() => {
    const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
    const over = (top, below) => {
        const alpha = top.length > 3 ? top[3] : 1;
        return [0, 1, 2].map((place) => top[place] * alpha + below[place] * (1 - alpha));
    };
    const light = (rgb) => {
        const parts = rgb.map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    const behind = (one) => {
        const above = [];
        for (let at = one; at; at = at.parentElement) {
            if (at instanceof HTMLElement) above.push(parse(getComputedStyle(at).backgroundColor));
        }
        return above.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
    };
    const found = [];
    for (const one of document.querySelectorAll("h1, h2, p, a, dt, dd, th, td, li, code, caption span, svg text")) {
        if (!one.textContent.trim() || !one.getClientRects().length || one.classList.contains("on")) continue;
        const style = getComputedStyle(one);
        const ink = over(parse(one instanceof SVGElement ? style.fill : style.color), behind(one));
        const [a, b] = [light(ink), light(behind(one))];
        found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.textContent.slice(0, 40)]);
    }
    for (const one of document.querySelectorAll("text.on")) {  // on a bar
        const bar = one.previousElementSibling;
        const [a, b] = [getComputedStyle(one).fill, getComputedStyle(bar).fill].map((text) => light(parse(text)));
        found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), `on a bar: ${one.textContent}`]);
    }
    return found;
}"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_by_day_and_by_night(dark: bool, browser: playwright.Browser, paths: dict[str, Path]) -> None:
    with Opened(browser, paths["run"], dark=dark) as opened:
        ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
        assert brightness < 60 if dark else brightness > 230
        contrasts = opened.page.evaluate(CONTRASTS)
        assert len(contrasts) > 200
        assert [entry for entry in contrasts if entry[0] < 4.5] == []
        marks = opened.page.evaluate("[...document.querySelectorAll('rect.mark')].map((m) => getComputedStyle(m).fill)")
        assert len(set(marks)) >= 6  # kinds are told apart
        assert ground not in marks


@pytest.mark.parametrize("dark", [False, True])
def test_a_failure_can_be_seen_by_day_and_by_night(
    dark: bool, browser: playwright.Browser, paths: dict[str, Path]
) -> None:
    with Opened(browser, paths["failure"], dark=dark) as opened:
        assert [entry for entry in opened.page.evaluate(CONTRASTS) if entry[0] < 4.5] == []
        fills = opened.page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll("#failure rect.mark")]
                .map((mark) => [mark.dataset.kind, getComputedStyle(mark).fill]))"""
        )
        assert set(fills) == {"ended", "failed"} and len(set(fills.values())) == 2
        opened.page.locator('#failure rect[data-kind="failed"]').first.hover()
        assert "not exchanged after" in opened.said


def test_on_paper_there_is_no_menu_and_nothing_is_cut_off(browser: playwright.Browser, paths: dict[str, Path]) -> None:
    with Opened(browser, paths["all"], width=700, dark=True) as opened:
        opened.page.emulate_media(media="print", color_scheme="dark")
        assert not opened.page.locator("nav").is_visible()
        ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(255, 255, 255)"
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 700
        assert opened.page.locator("#bench rect.mark").first.is_visible()
