"""Draws docs/demo.svg, the README's picture, from a demo's result: python docs/picture.py RESULT.json"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from syncline.bench.demo import DemoResult
from syncline.cli.demo import show
from syncline.files import read_json, write_text

console = Console(record=True, width=84, file=io.StringIO(), highlight=False)
show(read_json(sys.argv[1], DemoResult), console)
# Without rich's web fonts: the picture must not fetch anything.
drawn = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="syncline demo"), flags=re.DOTALL)
write_text(Path(__file__).with_name("demo.svg"), drawn)
