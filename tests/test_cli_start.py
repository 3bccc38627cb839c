"""The start of `syncline`: help and mistakes do not import torch, and Ctrl-C during imports shows no traceback."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import syncline
from syncline.bench import demo as bench_demo
from syncline.bench import run as bench_run
from syncline.cli import app, commands
from syncline.exchange import EXCHANGES
from syncline.models.target import AUTOCAST
from syncline.models.zoo import MODELS
from syncline.plan.rungs import QUALITIES
from syncline.plan.search import ALLOWED
from syncline.tuning import follow

SOURCE = Path(syncline.__file__).parents[1]
HEAVY = {"torch", "numpy", "scipy"}
COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def environment(*first: Path) -> dict[str, str]:
    """Return the environment of a child that imports the modules in the folders `first`, and then this tree."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*first, SOURCE]))}


def imported_by(*words: str) -> tuple[int, set[str]]:
    """Run `python -m …`; return its exit status and the packages that it imported."""
    command = [sys.executable, "-X", "importtime", "-m", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done.returncode, {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


ANSWERED = {
    ("syncline", "--help"): 0,
    ("syncline", "--version"): 0,
    ("syncline",): 2,
    ("syncline", "no-such-command"): 2,
    ("syncline", "--no-such-option"): 2,
    **{("syncline", name, "--help"): 0 for name in COMMANDS},
    **{("syncline", name, "--no-such-option"): 2 for name in COMMANDS},
    ("syncline", "cluster", "run", "--help"): 0,
    ("syncline", "cluster", "run", "--no-such-option"): 2,
    ("syncline", "bench", "--steps", "many"): 2,
    ("syncline.run", "--help"): 0,
    ("syncline.run", "--no-such-option"): 2,
}
"""The exit status of each command line that needs no torch."""

ANSWER_ALL = """
import json, os, runpy, sys, typer
for words in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        report, sys.argv = os.dup(1), words
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        status = 0
        try: runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        except SystemExit as end: status = end.code or 0
        os.write(report, json.dumps([words, status, sorted(sys.modules)]).encode() + b"\\n")
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, ...], tuple[int, set[str]]]:
    """Run all command lines of `ANSWERED`; return their exit statuses and the modules that they imported. They are
    forked from one interpreter that has imported typer, which takes most of their time."""
    lines = run_python(ANSWER_ALL, json.dumps(list(ANSWERED))).splitlines()
    return {tuple(words): (status, set(modules)) for words, status, modules in map(json.loads, lines)}


@pytest.mark.parametrize("words", ANSWERED, ids=" ".join)
def test_help_and_mistakes_are_answered_without_torch(
    words: tuple[str, ...], answers: dict[tuple[str, ...], tuple[int, set[str]]]
) -> None:
    status, modules = answers[words]
    assert status == ANSWERED[words]
    assert "syncline.cli.app" in modules  # the command line was reached
    assert not modules & HEAVY


@pytest.mark.parametrize("module", ["syncline", "syncline.run"])
def test_a_new_interpreter_answers_without_torch(module: str) -> None:
    status, packages = imported_by(module, "--help")
    assert status == 0
    assert "typer" in packages and not packages & HEAVY


def test_work_imports_torch() -> None:
    """Check that the tests above would notice an import of torch."""
    returned, packages = imported_by("syncline", "predict", "--profile", "cnn-cpu", "--rate", "1gbit", "--hosts", "2")
    assert returned == 0
    assert packages >= {"torch", "numpy"}


def test_help_shows_the_current_names_and_defaults() -> None:
    assert tuple(MODELS) == commands.MODELS
    assert tuple(AUTOCAST) == commands.AUTOCAST
    assert tuple(ALLOWED) == commands.ALLOWED
    assert QUALITIES == commands.QUALITIES
    assert tuple(EXCHANGES) == commands.EXCHANGES
    assert (commands.BENCH_PROBE_S, commands.BENCH_PROBE_LEVELS_S) == (bench_run.PROBE_S, bench_run.PROBE_LEVELS_S)
    assert commands.DEMO_TUNE_S == bench_demo.TUNE_S
    assert commands.RUN_PROBE_S == follow.PROBE_S


# --- the package ------------------------------------------------------------------------------------------------------


def run_python(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=True).stdout


def test_importing_the_package_does_not_import_torch() -> None:
    assert run_python("import sys, syncline; syncline.UsageError; print('torch' in sys.modules)").strip() == "False"


def test_every_public_name_can_be_used_and_is_in_dir_and_options_do_not_hide_commands() -> None:
    program = (
        "import syncline\n"
        "assert set(syncline.__all__) <= set(dir(syncline))\n"
        "for name in reversed(syncline.__all__): getattr(syncline, name)\n"
        "from syncline import *\n"
        "from syncline import attach\n"
        "print(attach is syncline.attach, OkTopk.__module__)\n"
        "from syncline.cli import app, predict, run\n"
        "print(predict.__name__, run.__name__)"  # the modules that do the work, not those with the options
    )
    names = ["True", "syncline.exchange.oktopk", "syncline.cli.predict", "syncline.cli.run"]
    assert run_python(program).split() == names


def test_every_public_name_can_be_the_first_to_be_used() -> None:
    """No order of imports causes an import cycle."""
    program = (
        "import os, sys, syncline, torch, torch.distributed\n"
        "for name in [*syncline._MODULE_OF, *syncline._PACKAGES]:\n"
        "    if (child := os.fork()) == 0:\n"
        "        try: getattr(syncline, name)\n"
        "        except BaseException as error: print(name, error, flush=True); os._exit(1)\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "assert not [name for name in sys.modules if name.startswith('syncline.exchange')]\n"
    )
    assert run_python(program) == ""


def test_no_public_name_is_also_a_module_of_the_package() -> None:
    """Importing such a module would set it as an attribute, and hide the lazy name."""
    modules = {module.name for module in pkgutil.iter_modules(syncline.__path__)}
    assert not modules & set(syncline.__all__)


def test_type_checkers_see_the_same_modules_as_python() -> None:
    """The imports for type checkers and the table name the same objects."""
    (block,) = (node for node in ast.parse(inspect.getsource(syncline)).body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen.keys() == syncline._MODULE_OF.keys()
    assert seen.keys() | {"__version__"} | {name for name in syncline.__all__ if name.endswith("Error")} == {
        *syncline.__all__
    }
    for name, module in seen.items():
        __import__(str(module))
        assert getattr(sys.modules[str(module)], name) is getattr(syncline, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'syncline' has no attribute 'nope'"):
        _ = syncline.nope
    with pytest.raises(ImportError, match="cannot import name 'nope'"):
        from syncline import nope  # noqa: F401


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swallows", [False, True], ids=["", "a module that swallows exceptions"])
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("typer", ["syncline", "--help"]),
        ("torch", ["syncline", "predict", "--profile", "cnn-cpu", "--rate", "1gbit"]),
        ("torch", ["syncline", "cluster", "run", "--", "true"]),
        ("torch", ["syncline", "run", __file__]),
        ("torch", ["syncline.run", __file__]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_ctrl_c_during_imports_ends_the_process_without_output(
    tmp_path: Path, module: str, words: list[str], swallows: bool
) -> None:
    # A stand-in for the module, which prints when it is imported and then runs until it is interrupted.
    waits = "print('importing', flush=True)\nwhile True: pass\n"
    if swallows:
        waits = "print('importing', flush=True)\ntry:\n    while True: pass\nexcept BaseException: pass\n"
    (tmp_path / f"{module}.py").write_text(waits)
    child = subprocess.Popen(
        [sys.executable, "-m", *words],
        env=environment(tmp_path),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "importing\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert (child.returncode, out, err) == (130, "", "")
