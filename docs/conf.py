"""Sphinx settings for `make docs`. The build fetches nothing from the network, and a warning is an error."""

import subprocess
import sys
from importlib.metadata import version as installed

from sphinx.application import Sphinx

project = "Syncline"
copyright = "The Syncline authors"
release = version = installed("syncline")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3

# Docstrings mark code with single backquotes; types are in the signatures.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autoclass_content = "class"
maximum_signature_line_length = 90
python_display_short_literal_types = True

html_theme = "furo"
html_title = "Syncline"
html_static_path = ["static"]
html_css_files = ["guide.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"


def _example_report(app: Sphinx) -> None:
    """Write the example report to which the pages link."""
    if app.builder.format == "html":
        command = "syncline predict --profile resnet50-224px-cuda --rate 10gbit --hosts 4,8,16,64"
        arguments = [sys.executable, "-m", *command.split(), "--report", "example-report.html"]
        subprocess.run(arguments, cwd=app.outdir, stdout=subprocess.DEVNULL, timeout=60, check=True)


def _link_to_built_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Point links to files outside docs/, which work in the source tree, at the pages that include those files."""
    source[0] = source[0].replace("](../SECURITY.md)", "](security.md)")
    source[0] = source[0].replace("](../benchmarks/results/README.md", "](measurements.md")
    if page == "adr/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"


def _mark_examples(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Add the `::` that reStructuredText requires before indented code, and that the docstrings leave out."""
    read: list[str] = []
    for line in lines:
        before = next((earlier for earlier in reversed(read) if earlier), "    ")
        if line.startswith("    ") and read and not read[-1] and not before.startswith(" "):
            read += ["::", ""]
        read.append(line)
    lines[:] = read


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _mark_examples)
    app.connect("builder-inited", _example_report)
    app.connect("source-read", _link_to_built_pages)
