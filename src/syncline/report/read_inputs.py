"""Read the files that Syncline wrote: each is recognised by its content.

The failure reports of a run are also found beside its folder, where `syncline run` and its ranks write them by default.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from syncline.errors import UsageError
from syncline.files import FileError, read_json
from syncline.records.bench_result import BenchResult, DemoResult
from syncline.records.failure_report import FOLDER, FailureReport, chosen_folder
from syncline.records.network import Network
from syncline.records.plan import Plan
from syncline.records.postmortem import Postmortem, examine_reports, postmortem_of
from syncline.records.profile import Profile
from syncline.records.run_record import RunRecord
from syncline.report.inputs import Inputs, belongs_to

_KINDS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "alternatives": ("plan", Plan),
    "forward_s": ("profile", Profile),
    "collectives": ("network", Network),
    "models": ("run", RunRecord),
    "suspects": ("failure", FailureReport),
    "epochs": ("demo", DemoResult),
    "cluster": ("bench", BenchResult),
}
"""A key that identifies each kind of file; the first that is found decides."""


def read_inputs(paths: Sequence[str | os.PathLike[str]]) -> Inputs:
    """Read files, and the folders that `syncline run` wrote, in any order.

    Raises:
        UsageError: A file is not one of Syncline's, is damaged, or contradicts another; in one line.

    Example:
        >>> read_inputs(["profile.json", "network.json", "plan.json"])
    """
    kind_of = {struct: kind for kind, struct in _KINDS.values()}
    found: dict[str, list[tuple[Path, Any]]] = {}
    for path in _expand(paths):
        content = read_json(path, _struct_of)
        found.setdefault(kind_of[type(content)], []).append((path, content))

    def only(kind: str) -> Any:
        (path, content), *others = found.get(kind, [(None, None)])
        if others:
            raise UsageError(f"{path} and {others[0][0]} are both a {kind}: a page shows one, so make a page for each")
        return content

    runs = tuple(run for _, run in found.get("run", []))
    reports = [report for _, report in found.get("failure", [])]
    for index, report in enumerate(reports):
        if any(report.rank == other.rank for other in reports[:index]):
            raise UsageError(f"two failure reports are of rank {report.rank}: pass those of one failure")
    files = {kind: tuple(str(path) for path, _ in entries) for kind, entries in found.items()}
    failure: Postmortem | None = None
    if reports:
        failure = postmortem_of(reports)
        files["failure"] = (str(found["failure"][0][0].parent),)
    elif (folder := failure_folder([Path(path) for path in paths], runs)) is not None:
        failure = examine_reports(folder)
        files["failure"] = (str(folder),)
    plans = {str(path): plan for path, plan in found.get("plan", [])}
    return Inputs(
        profile=only("profile"),
        network=only("network"),
        plans={"the plan" if len(plans) == 1 else path: plan for path, plan in plans.items()},
        benches=tuple(result for _, result in found.get("bench", [])),
        demo=only("demo"),
        runs=runs,
        failure=failure,
        files=files,
    )


def failure_folder(folders: Sequence[Path], runs: Sequence[RunRecord]) -> Path | None:
    """Return the folder with the failure reports of a run: in or beside its own, or where ranks write them here."""
    near = [place / FOLDER for folder in folders if folder.is_dir() for place in (folder, folder.absolute().parent)]
    for folder in dict.fromkeys([*near, *filter(None, [chosen_folder()])] if runs else ()):
        with contextlib.suppress(UsageError, FileError):  # there is none, or none that can be read
            if belongs_to(examine_reports(folder), runs):
                return folder
    return None


def _expand(paths: Sequence[str | os.PathLike[str]]) -> Iterator[Path]:
    """Replace folders by the records in them, and skip files that were named before."""
    seen: set[Path] = set()
    for path in map(Path, paths):
        files = sorted(path.glob("rank-*.json")) if path.is_dir() else [path]
        if not files:
            raise UsageError(f"{path}: has no rank-*.json: name the folder of a run or of failure reports, or files")
        yield from (file for file in files if file.resolve() not in seen)
        seen.update(file.resolve() for file in files)


def _struct_of(tree: Any) -> type[msgspec.Struct]:
    keys = tree if isinstance(tree, dict) else {}
    for key, (_, struct) in _KINDS.items():
        if key in keys:
            return struct
    if "culprit" in keys:
        raise ValueError("was written by syncline predict --json: pass the profile and the network instead")
    raise ValueError("is none of Syncline's files: pass what profile, probe, plan, bench, demo (--json) or run wrote")
