"""The README and the guide: pages build without a warning, links lead somewhere, and commands and examples work."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel as DDP

import syncline
from background import Beside, beside
from ddp_helpers import Mlp, batch, on_ranks, seeded
from syncline.cli import app
from syncline.cli.app import RUN_SETTINGS
from syncline.cli.app import command as command_of
from syncline.cli.commands import Run
from syncline.cluster import Rank
from syncline.testing import check_laws

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
README = ROOT / "README.md"
PAGES = sorted([README, *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guide").glob("*.md")])
_FENCE = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE_CELL = re.compile(r"\| `([^`]+)` \|$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(scope="module")
def pages_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module", autouse=True)
def sphinx(pages_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    """Build the pages in the background while the other tests run; the last test reads them."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(pages_folder)]
    with beside(command, tmp_path_factory.mktemp("sphinx"), cwd=ROOT) as running:
        yield running


def fences(page: Path, language: str) -> list[str]:
    return [textwrap.dedent(text) for found, text in _FENCE.findall(page.read_text()) if found == language]


# --- the pages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if ">>>" in page.read_text()], ids=lambda page: page.stem)
def test_examples_in_python_say_what_they_say(page: Path) -> None:
    text = "\n".join(block for block in fences(page, "python") if ">>>" in block)
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, page.name, str(page), 0)
    assert test.examples
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert runner.run(test, out=told.append).failed == 0, "".join(told)


def test_the_readme_can_be_read_in_five_minutes() -> None:
    assert len(README.read_text().split()) <= 1000


SOURCES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "results" / "README.md"])


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT)))
def test_links_between_source_files_lead_to_files(source: Path) -> None:
    for target in _LINK.findall(source.read_text()):
        parts = urlsplit(target)
        if not parts.scheme and parts.path:
            assert (source.parent / unquote(parts.path)).exists(), f"{source.name} refers to {target}"


# --- what to type ---------------------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[str]:
    for block in fences(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield line[2:]


COMMANDS = [pytest.param(line, id=f"{page.stem}: {line[:60]}") for page in PAGES for line in commands(page)]


README_TABLE = [pytest.param(cell, id=f"table: {cell[:60]}") for cell in _CODE_CELL.findall(README.read_text())]
assert README_TABLE


@pytest.mark.parametrize("line", [*COMMANDS, *README_TABLE])
def test_a_command_on_a_page_is_one_that_exists(line: str) -> None:
    check([word for word in shlex.split(line) if word != "…"])


def test_a_command_that_does_not_exist_is_noticed() -> None:
    for line in (
        "syncline demo --hostz 4",
        "torchrun -m syncline.run --alow bf16 train.py",
        "syncline cluster run --hosts 2 -- torchrun -m syncline probe --ouput f",
        "syncline plans",
        "python examples/nothing.py",
    ):
        with pytest.raises((Exception, SystemExit)):
            check(shlex.split(line))


def check(words: list[str]) -> None:
    """Fail unless the program accepts these arguments, if it is Syncline, torchrun or a script of this repository."""
    program, *arguments = words
    if program == "syncline":
        check_syncline(arguments)
    elif program == "torchrun":
        asked = get_args_parser().parse_args(arguments)
        if asked.module:
            check_module(asked.training_script, asked.training_script_args)
        else:
            check_script(asked.training_script)
    elif program == "python" and arguments[0] == "-m":
        check_module(arguments[1], arguments[2:])
    elif program == "python":
        check_script(arguments[0])
    elif program == "make":
        assert f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text()
    else:
        others = ("source", "export", "sbatch", "kubectl", "pip", "torchft_lighthouse")
        assert program in others, f"unknown program: {program}"


def check_module(module: str, arguments: list[str]) -> None:
    assert module in ("syncline", "syncline.run")
    check_syncline(["run", *arguments] if module == "syncline.run" else arguments)


def check_script(script: str) -> None:
    assert script == "train.py" or (ROOT / script).is_file(), f"there is no {script}"


def check_syncline(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    words = list(words)
    if words[0] == "run":
        own = typer.Typer()
        own.command(context_settings=RUN_SETTINGS)(command_of(Run, print))
        command, words = typer.main.get_command(own), words[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    with command.make_context(command.name, words) as context:
        asked = context.params
    if command.name == "run" and "command" in asked:  # syncline cluster run -- COMMAND
        check(list(asked["command"]))
    elif "script" in asked:
        check_script(asked["script"])


# --- clusters -------------------------------------------------------------------------------------------------------


def test_the_kubernetes_manifest_is_consistent() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((EXAMPLES / "cluster" / "indexed-job.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    name, spec = job["metadata"]["name"], job["spec"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    arguments = [word.replace("$(JOB_COMPLETION_INDEX)", "3") for word in container["args"]]
    check([*container["command"], *arguments])
    asked = get_args_parser().parse_args(arguments)
    assert asked.nnodes == str(spec["completions"]) == str(spec["parallelism"])
    assert asked.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
    assert asked.master_addr == f"{name}-0.{service['metadata']['name']}"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_slurm_script_runs_commands_that_exist(tmp_path: Path) -> None:
    """With stand-ins for two Slurm commands: srun prints its arguments, and scontrol prints the host names."""
    for name, body in (("srun", 'printf "%q " "$@"; echo'), ("scontrol", "echo host0; echo host1")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_ID": "71234", "JOB_NODELIST": "host[0-1]", "NNODES": "2", "GPUS_ON_NODE": "8"}
    ran = subprocess.run(
        ["/bin/bash", EXAMPLES / "cluster" / "train.sbatch", "train.py", "--epochs", "10"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            **{f"SLURM_{name}": value for name, value in slurm.items()},
        },
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    lines = [shlex.split(line) for line in ran.stdout.splitlines()]
    assert len(lines) == 3
    for line in lines:
        check(line[line.index("torchrun") :])
        asked = get_args_parser().parse_args(line[line.index("torchrun") + 1 :])
        assert (asked.nnodes, asked.nproc_per_node, asked.rdzv_endpoint) == ("2", "8", "host0:29234")


# --- the worked example ---------------------------------------------------------------------------------------------


def test_the_worked_example_keeps_the_laws_in_other_types_too() -> None:
    """Its page checks fp32 and up to seven ranks."""
    from int8_exchange import Int8

    check_laws(Int8(), ranks=(2, 3), numels=(5, 3000), dtypes=(torch.bfloat16, torch.float16, torch.float64))


def test_the_worked_example_trains_and_can_be_watched_as_the_pages_show(tmp_path: Path) -> None:
    from int8_exchange import Int8

    def main(rank: Rank) -> list[float]:
        plain = train(DDP(seeded(lambda: Mlp(64))), rank.rank)
        model = DDP(seeded(lambda: Mlp(64)))
        handle = syncline.attach(model, Int8())
        weights = train(model, rank.rank)
        assert handle.stats().sent_bytes == handle.predicted_sent_bytes()
        assert handle.stats().sent_bytes["world"] < 0.5 * 4 * weights.numel()
        everyone = [torch.zeros_like(weights) for _ in range(2)]
        dist.all_gather(everyone, weights)
        assert torch.equal(*everyone)

        kept = handle.state_dict()
        again = syncline.attach(model, Int8())
        again.load_state_dict(kept)
        for name, kinds in kept["tensors"].items():
            assert torch.equal(again.state_dict()["tensors"][name]["error"], kinds["error"])

        show_trace(model, lambda: step(model, rank.rank, 0))
        show_curves(model, tmp_path, lambda: [step(model, rank.rank, number) for number in range(5)])
        return [float((weights - plain).norm() / plain.norm())]

    (off,), _ = on_ranks(2, main)
    assert 0 < off < 0.01
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"syncline/step_ms", "syncline/exposed_ms", "syncline/sent_bytes"} <= set(events.Tags()["scalars"])


def step(model: nn.Module, rank: int, number: int) -> None:
    model.zero_grad()
    (model(batch(rank, number, 8, 64)) - 1).square().mean().backward()


def train(model: nn.Module, rank: int) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(12):
        step(model, rank, number)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def show_trace(model: nn.Module, train_a_step: Callable[[], object]) -> None:
    # trace: begins
    handle = syncline.attach(model, syncline.Dense(wire="bf16"))
    handle.trace()
    train_a_step()
    for bucket in handle.stats().buckets:
        for collective in bucket.phases:
            took_ms = 1000 * (collective.end_s - collective.start_s)
            print(f"bucket {bucket.bucket}: {collective.name}, {collective.sent_bytes} bytes, {took_ms:.2f} ms")
    # trace: ends
    assert [one.name for bucket in handle.stats().buckets for one in bucket.phases][:1] == ["all_reduce"]


def show_curves(model: nn.Module, folder: Path, train_some_steps: Callable[[], object]) -> None:
    # scalars: begin
    from torch.utils.tensorboard import SummaryWriter

    handle = syncline.attach(model, syncline.OkTopk(density=0.01))
    if dist.get_rank() == 0:
        writer = SummaryWriter(folder)

    for _ in range(4):
        train_some_steps()
        if dist.get_rank() == 0:
            for name, value in handle.scalars(deep=True).items():
                writer.add_scalar(name, value, handle.stats().steps)

    if dist.get_rank() == 0:
        writer.close()
    # scalars: end


# --- the pages as they are built ------------------------------------------------------------------------------------


class Links(HTMLParser):
    """The links, the loaded files and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors.add(found.get("id", ""))
        if tag in ("script", "img", "iframe", "source") and "src" in found:
            self.loaded.append(found["src"])
        elif tag == "link" and found.get("rel") not in ("canonical",):
            self.loaded.append(found["href"])
        elif tag == "a" and "href" in found:
            self.targets.append(found["href"])


def test_the_guide_builds_without_a_warning_and_every_link_leads_somewhere(sphinx: Beside, pages_folder: Path) -> None:
    status, _, errors = sphinx.wait()
    assert status == 0, errors
    pages = {path: Links(path.read_text()) for path in pages_folder.rglob("*.html")}
    expected = {
        "index",
        "api",
        "assumptions",
        "caveats",
        "features",
        "glossary",
        "measurements",
        "results",
        "example-report",
    }
    assert expected <= {path.stem for path in pages}
    assert pages_folder / "guide" / "frameworks.html" in pages
    for path, links in pages.items():
        for target in links.loaded:
            assert not urlsplit(target).netloc, f"{path.name} loads {target}"
        for target in [*links.targets, *links.loaded]:
            if urlsplit(target).scheme not in ("http", "https", "data", "mailto"):
                _follow(path, target, pages)


def _follow(page: Path, link: str, pages: dict[Path, Links]) -> None:
    file, anchor = urldefrag(link)
    target = page if not file else (page.parent / unquote(urlsplit(file).path)).resolve()
    target = target / "index.html" if target.is_dir() else target
    assert target.exists(), f"{page.name} refers to {link}, and there is no such file"
    if anchor and target in pages:
        assert unquote(anchor) in pages[target].anchors, f"{page.name} refers to {link}, and there is no such anchor"
