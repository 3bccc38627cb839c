"""Imports between packages point one way: every edge of the package graph is listed here, and the list has no cycle.

Imports inside functions and under TYPE_CHECKING count like all others: they hide a cycle, and do not break it.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "syncline"

BASE = {"_version", "errors", "files", "memory_meter", "startup", "units"}
"""Modules without a package, which import each other only downwards."""

ALLOWED: dict[str, set[str]] = {
    # Entry points and the public names: nothing imports them.
    "__main__": {"cli", "startup"},
    "run.__main__": {"cli", "startup"},
    "syncline": {
        *("_version", "errors"),
        *("balance", "ddp", "exchange", "layerwise", "measure", "plan", "records", "runtime", "tuning", "updates"),
    },
    "testing": {"dist", "errors", "exchange"},
    # What people start.
    "cli": {
        *("_version", "errors", "files", "startup", "units"),
        *("bench", "cluster", "dist", "doctor", "exchange", "fsdp", "layerwise", "measure", "models", "plan"),
        *("predict", "records", "report", "run", "tuning"),
    },
    "run": {"_version", "ddp", "errors", "fsdp", "health", "records", "runtime", "tuning"},
    "report": {"_version", "errors", "exchange", "files", "predict", "records", "units"},
    "doctor": {"_version", "cluster", "ddp", "dist", "errors", "measure", "units"},
    "bench": {
        *("_version", "errors", "memory_meter", "units"),
        *("cluster", "ddp", "exchange", "fsdp", "layerwise", "measure", "models", "plan", "predict"),
        *("records", "tuning"),
    },
    "integrations": {"balance", "ddp", "errors", "exchange", "health", "measure", "records", "runtime", "tuning"},
    # Training.
    "tuning": {
        *("balance", "ddp", "dist", "errors", "exchange", "health", "measure", "plan", "predict", "records"),
        *("runtime", "units", "updates"),
    },
    "ddp": {
        *("balance", "dist", "elastic", "errors", "exchange", "fsdp", "health", "measure", "overlap", "predict"),
        *("records", "runtime", "updates"),
    },
    "elastic": {"dist", "errors", "exchange", "records", "runtime", "updates"},
    "fsdp": {"dist", "errors", "exchange", "health", "measure", "records", "runtime", "updates"},
    "overlap": {"dist", "errors", "exchange", "health", "records", "runtime"},
    "updates": {"balance", "dist", "errors", "exchange", "health", "records", "runtime"},
    "balance": {"dist", "errors", "files", "health", "measure", "memory_meter", "runtime", "units"},
    "layerwise": {
        *("errors", "memory_meter", "units"),
        *("dist", "exchange", "health", "measure", "predict", "records", "runtime"),
    },
    "runtime": {"dist", "errors", "exchange", "files", "health", "measure", "predict", "records"},
    "health": {"dist", "errors", "files", "records", "units"},
    "measure": {"dist", "errors", "exchange", "records"},
    "dist": {"_version", "errors", "exchange", "memory_meter", "units"},
    # Without a process group.
    "cluster": {"errors"},
    "models": {"errors", "records"},
    "plan": {"errors", "exchange", "predict", "records", "units"},
    "predict": {"errors", "exchange", "records", "units"},
    "records": {"_version", "errors", "exchange", "files"},
    "exchange": {"errors", "kernels"},
    "kernels": {"errors"},
    "files": {"errors"},
    "units": {"errors"},
    "memory_meter": set(),
    "startup": set(),
    "errors": set(),
    "_version": set(),
}

WITHOUT_PROCESS_GROUP = ("exchange", "kernels", "plan", "predict", "records", "report")


def imported(source: str) -> Iterator[str]:
    """Every module that a source names in an import, with the name that is taken from it: `torch.nn.Module`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (
                name.value for name in node.args if isinstance(name, ast.Constant) and isinstance(name.value, str)
            )


def unit_of(path: Path) -> str:
    """The package that a file belongs to. An entry point is one by itself: nothing can import it."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if parts == ("__init__",):
        return "syncline"
    return ".".join(parts) if parts[-1] == "__main__" else parts[0]


def unit_named(module: str) -> str:
    """The package of something that is imported from syncline; `syncline`, where it is one of the public names."""
    name = module.split(".")[1] if "." in module else ""
    return name if name in ALLOWED else "syncline"


def edges() -> dict[str, dict[str, set[str]]]:
    """By package, the packages that it imports, and the files that do."""
    found: dict[str, dict[str, set[str]]] = {}
    for path in SOURCE.rglob("*.py"):
        unit = unit_of(path)
        targets = found.setdefault(unit, {})
        for module in imported(path.read_text()):
            if module.split(".")[0] == "syncline" and (target := unit_named(module)) != unit:
                targets.setdefault(target, set()).add(str(path.relative_to(SOURCE)))
    return found


FOUND = edges()


def test_every_package_is_in_the_list() -> None:
    assert FOUND.keys() == ALLOWED.keys()


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_what_is_listed_and_nothing_else(package: str) -> None:
    found = FOUND[package]
    assert {name: files for name, files in found.items() if name not in ALLOWED[package]} == {}, "not in the list"
    assert ALLOWED[package] - found.keys() == set(), "in the list, and not imported"


def test_the_list_has_no_cycle() -> None:
    graphlib.TopologicalSorter(ALLOWED).prepare()


def test_the_list_goes_from_the_top_down() -> None:
    order = list(ALLOWED)
    for package, targets in ALLOWED.items():
        above = {target for target in targets if order.index(target) < order.index(package)}
        assert not above, f"{package} imports {above}, above it in the list"


@pytest.mark.parametrize("package", WITHOUT_PROCESS_GROUP)
def test_what_predicts_and_plans_needs_no_process_group(package: str) -> None:
    """An exchange talks to its Comm only; so its cost can be asked on a laptop, without a cluster."""
    reached, waiting = set(), [package]
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting += ALLOWED[name] - reached
    assert reached <= {*WITHOUT_PROCESS_GROUP, *BASE}
    for path in (SOURCE / package).rglob("*.py"):
        for module in imported(path.read_text()):
            assert not f"{module}.".startswith("torch.distributed."), f"{path.name} imports {module}"


def test_hidden_imports_are_found() -> None:
    source = """
import syncline.cli
if TYPE_CHECKING:
    from syncline.bench import run
def later():
    from syncline.report.page import render
    importlib.import_module("syncline.doctor.checkup")
"""
    assert {unit_named(module) for module in imported(source)} == {"cli", "bench", "report", "doctor"}
    assert [*imported("from torch import distributed")] == ["torch.distributed"]


def test_nothing_pickles_evaluates_or_starts_a_shell() -> None:
    for path in SOURCE.rglob("*.py"):
        modules = {module.split(".")[0] for module in imported(path.read_text())}
        assert not modules & {"pickle", "marshal", "shelve"}, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "os.system", "torch.load"}, f"{path}: {called}"
                assert not called.endswith("_object"), f"{path}: {called} pickles"
                assert all(word.arg != "shell" for word in node.keywords), f"{path}: {called} with a shell"
