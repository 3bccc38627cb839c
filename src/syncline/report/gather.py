"""Files and folders that Syncline wrote, each known by its content, as one story."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from syncline.errors import UsageError
from syncline.files import FileError, read_json
from syncline.records.bench_result import BenchResult, DemoResult
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.profile import Profile
from syncline.records.run_record import RunRecord
from syncline.report.story import Story

_KINDS: tuple[tuple[str, str, type[msgspec.Struct]], ...] = (
    ("alternatives", "plan", Plan),
    ("forward_s", "profile", Profile),
    ("collectives", "network", Network),
    ("models", "run", RunRecord),
    ("epochs", "demo", DemoResult),
    ("cluster", "bench", BenchResult),
)
"""The key by which each is known; the first that is there decides."""
_OTHERS = {
    "culprit": "is what syncline predict --json wrote: pass the profile and the network, and this page predicts again",
    "budget_bytes": "is what syncline plan --memory-budget wrote, of which there is no page",
}
_ONE = {"profile": "a model", "network": "a cluster", "demo": "a demo"}
"""Of which a page tells one."""


def gather(paths: Sequence[str | os.PathLike[str]]) -> Story:
    """`UsageError` in one line for what is not one of Syncline's files, is broken, or contradicts another."""
    found: dict[str, list[tuple[Path, Any]]] = {}
    for path in _files(paths):
        kind, content = _read(path)
        found.setdefault(kind, []).append((path, content))
    for kind, what in _ONE.items():
        if len(both := found.get(kind, [])) > 1:
            raise UsageError(
                f"{both[0][0]} and {both[1][0]} are both of {what}: a page tells of one, so make one for each"
            )
    names = _names([path for path, _ in found.get("plan", [])])
    return Story(
        profile=_only(found, "profile"),
        network=_only(found, "network"),
        plans={name: plan for name, (_, plan) in zip(names, found.get("plan", []), strict=True)},
        benches=tuple(result for _, result in found.get("bench", [])),
        demo=_only(found, "demo"),
        runs=tuple(run for _, run in found.get("run", [])),
        files={kind: tuple(str(path) for path, _ in each) for kind, each in found.items()},
    )


def _only(found: dict[str, list[tuple[Path, Any]]], kind: str) -> Any:
    return found[kind][0][1] if kind in found else None


def _names(paths: Sequence[Path]) -> list[str]:
    """One plan is the plan; several go by their files' names."""
    if len(paths) == 1:
        return ["the plan"]
    short = [path.stem for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _files(paths: Sequence[str | os.PathLike[str]]) -> Iterator[Path]:
    """Each once, however often it is named; of a folder, the records of its run."""
    seen: set[Path] = set()
    for path in map(Path, paths):
        inside = [path]
        if path.is_dir():
            inside = sorted(path.glob("rank-*.json"))
            if not inside:
                raise UsageError(f"{path}: holds no rank-*.json: name the folder that syncline run wrote, or files")
        for one in inside:
            if one.resolve() not in seen:
                seen.add(one.resolve())
                yield one


def _read(path: Path) -> tuple[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        Profile.load(path)  # raises, and says what is wrong with the file
        raise
    for mark, why in _OTHERS.items():
        if isinstance(tree, dict) and mark in tree:
            raise FileError(f"{path}: {why}")
    for mark, kind, type in _KINDS:
        if isinstance(tree, dict) and mark in tree:
            return kind, read_json(path, type)
    raise FileError(
        f"{path}: is none of Syncline's files: pass what profile, probe, plan, bench, demo (--json) or run wrote"
    )
