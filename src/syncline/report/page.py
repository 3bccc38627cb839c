"""Build the page and write it as one self-contained HTML file: no request to any server, no external font or script."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import jinja2
from markupsafe import Markup

from syncline._version import __version__
from syncline.files import write_text
from syncline.report import summary
from syncline.report.charts import Section
from syncline.report.forecast import forecast_for
from syncline.report.inputs import Inputs
from syncline.report.sections import all_sections
from syncline.report.summary import Fact

_MOST_MODELS = 6
_BEFORE_UNIT = re.compile(r"(?<=[0-9]) (?=(?:m?s|µs|[kMG]?B|[kMG]?bit/s|hosts?|ranks?)\b)")
"""The space between a number and its unit, at which no line may break."""


@dataclass(frozen=True)
class Page:
    about: str
    """The model and the cluster."""
    verdict: str
    more: Sequence[str]
    """Further sentences below the verdict."""
    facts: Sequence[Fact]
    sections: Sequence[Section]
    warning: str


def write_report(path: str | os.PathLike[str], inputs: Inputs) -> None:
    """Write the page for `inputs` to `path`. An existing file is replaced in one step, or kept if anything fails.

    Example:
        >>> write_report("report.html", read_inputs(["profile.json", "network.json"]))
    """
    write_text(path, render(build_page(inputs)))


def build_page(inputs: Inputs) -> Page:
    """Decide what the page shows; nothing is drawn yet."""
    models = [
        dataclasses.replace(model, forecast=forecast_for(inputs, model)) for model in inputs.models[:_MOST_MODELS]
    ]
    verdict, *more = summary.verdict_sentences(inputs, models)
    return Page(
        about=summary.about(inputs, models),
        verdict=verdict,
        more=more,
        facts=list(summary.facts(inputs, models))[:4],
        sections=list(all_sections(inputs, models)),
        warning=summary.warning(inputs, models),
    )


def render(page: Page) -> str:
    """Return the page as HTML."""
    folder = resources.files("syncline") / "report"
    style, script = ((folder / name).read_text("utf-8") for name in ("page.css", "page.js"))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("syncline", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "keep_units": lambda text: _BEFORE_UNIT.sub("\u00a0", text),
        "percent": _percent,
        "digits": lambda value: f"{value:.6g}" if isinstance(value, float) else value,
    }
    now = datetime.datetime.now().astimezone().isoformat(timespec="minutes", sep=" ")
    text = environment.get_template("page.html.j2").render(
        page=page,
        made_by=f"syncline {__version__}, {now}",
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
    )
    # Names may contain lone surrogates, which JSON can express and UTF-8 cannot.
    return text.encode("utf-8", "replace").decode()


def _percent(value: float, end: float = 100.0) -> str:
    return f"{100 * max(0.0, value) / end:.3f}%"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
