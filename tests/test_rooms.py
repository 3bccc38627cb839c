"""Data flows one way: which room may import which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "syncline"

FORBIDDEN = {
    "exchange": ("torch.distributed", "syncline.engine", "syncline.cluster", "syncline.bench", "syncline.cli"),
    "measure": ("syncline.cluster", "syncline.bench", "syncline.cli", "syncline.predict"),
    "predict": ("torch.distributed", "syncline.engine", "syncline.cluster", "syncline.bench", "syncline.cli"),
    "engine": ("syncline.cluster", "syncline.bench", "syncline.cli", "syncline.models"),
    "cluster": ("syncline.engine", "syncline.bench", "syncline.cli", "syncline.models"),
    "models": ("syncline.engine", "syncline.cluster", "syncline.bench", "syncline.cli"),
    "bench": ("syncline.cli",),
    "report": ("torch.distributed", "syncline.engine", "syncline.cli", "syncline.models"),
    "run": ("syncline.cluster", "syncline.bench", "syncline.models"),
    "integrations": ("syncline.cluster", "syncline.bench", "syncline.cli", "syncline.models"),
    "doctor": ("syncline.cli", "syncline.bench", "syncline.models"),
}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    files = list((SOURCE / room).rglob("*.py"))
    assert files
    for path in files:
        for module in _imports(path):
            for forbidden in FORBIDDEN[room]:
                assert not f"{module}.".startswith(f"{forbidden}."), f"{path.name} imports {module}"


def test_what_predicts_reads_data_and_never_reaches_the_engine() -> None:
    """Also not by way of another module: predictions need neither a cluster nor a process group."""
    seen: set[str] = set()
    waiting = [f"syncline.predict.{path.stem}" for path in (SOURCE / "predict").glob("*.py")]
    while waiting:
        name = waiting.pop()
        path = SOURCE.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if name in seen or not path.exists():
            continue
        seen.add(name)
        assert not name.startswith(("syncline.engine", "syncline.cluster")), f"predict reaches {name}"
        for module in _imports(path):
            waiting += [module, module.rpartition(".")[0]]
    assert {"syncline.records.profile", "syncline.records.network", "syncline.exchange.wire"} <= seen


def test_nothing_pickles_evaluates_or_starts_a_shell() -> None:
    for path in SOURCE.rglob("*.py"):
        assert not _imports(path) & {"pickle", "marshal", "shelve"}, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "os.system", "torch.load"}, f"{path}: {called}"
                assert not called.endswith("_object"), f"{path}: {called} pickles"
                assert all(word.arg != "shell" for word in node.keywords), f"{path}: {called} with a shell"
