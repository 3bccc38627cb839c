"""One self-contained HTML page: no request, no font, no script from anywhere; a double click opens it."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from importlib import resources

import jinja2
from markupsafe import Markup

from syncline.files import write_text
from syncline.report.blocks import Lines, Page, Section
from syncline.report.charts import draw
from syncline.report.story import Story
from syncline.report.tell import tell

_UNITS = r"(?:m?s|µs|[kMG]?B|[kMG]?bit/s|hosts?|ranks?)\b"


def write_report(path: str | os.PathLike[str], story: Story) -> None:
    """Tells `story` on a page at `path`, which is replaced in one step, or left as it was where something is wrong."""
    write_text(path, render(tell(story)))


def render(page: Page) -> str:
    style, script = _own("page.css"), _own("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("syncline", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["close"] = _close
    text = environment.get_template("page.html.j2").render(
        page=page,
        drawn={section.name: _drawn(section) for section in page.sections},
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704
        policy=policy,
    )
    # Names may hold halves of characters, which JSON can say and UTF-8 cannot.
    return text.encode("utf-8", "replace").decode()


def _close(text: str) -> str:
    """Numbers stay with their units at a line's end."""
    return re.sub(rf"(?<=[0-9]) (?={_UNITS})", "\u00a0", text)


def _own(name: str) -> str:
    return (resources.files("syncline") / "report" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _drawn(section: Section) -> Markup:
    """Its blocks; small charts stand beside each other."""
    parts: list[Markup] = []
    beside: list[Markup] = []
    for block in section.blocks:
        if isinstance(block, Lines) and block.small:
            beside.append(draw(block))
            continue
        if beside:
            parts.append(Markup('<div class="beside">{}</div>').format(Markup("").join(beside)))
            beside = []
        parts.append(draw(block))
    if beside:
        parts.append(Markup('<div class="beside">{}</div>').format(Markup("").join(beside)))
    return Markup("\n").join(parts)
