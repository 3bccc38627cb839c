"""Draw the guide's pictures: python docs/picture.py DEMO_RESULT.json NETWORK.json"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from syncline.cli import bench, commands, predict, screen
from syncline.files import read_json, write_text
from syncline.records.bench_result import DemoResult


def draw(name: str) -> None:
    """Draw what was printed since the last picture."""
    # Without rich's web fonts, because the picture must not fetch anything.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", screen.out.export_svg(title=f"syncline {name}"), flags=re.DOTALL)
    write_text(Path(__file__).with_name(f"{name}.svg"), svg)


screen.out.record, screen.out.width, screen.out.file = True, 84, io.StringIO()
bench._show_demo(read_json(sys.argv[1], DemoResult))
draw("demo")
predict.predict_command(commands.Predict(profile="cnn-cpu", network=Path(sys.argv[2]), hosts="4,8,16,64"))
draw("predict")
