"""Draw the README's pictures: python docs/picture.py DEMO_RESULT.json NETWORK.json"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from syncline.cli import demo, screen
from syncline.cli.commands import predict
from syncline.files import read_json, write_text
from syncline.records.bench_result import DemoResult


def console() -> Console:
    return Console(record=True, width=84, file=io.StringIO(), highlight=False, markup=False)


def draw(drawn: Console, name: str) -> None:
    # Without rich's web fonts, because the picture must not fetch anything.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", drawn.export_svg(title=f"syncline {name}"), flags=re.DOTALL)
    write_text(Path(__file__).with_name(f"{name}.svg"), svg)


shown = console()
demo.show(read_json(sys.argv[1], DemoResult), shown)
draw(shown, "demo")

screen.out = console()
predict.Predict(profile="cnn-cpu", network=Path(sys.argv[2]), hosts="4,8,16,64").start()
draw(screen.out, "predict")
