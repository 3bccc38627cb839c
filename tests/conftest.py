"""Shared by all tests."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import large_pages
from syncline.measure import overhead

os.environ.pop("SYNCLINE_NO_NAMESPACES", None)
os.environ["SYNCLINE_FAILURES"] = str(Path(tempfile.gettempdir()) / f"syncline-failures-of-tests-{os.getuid()}")
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / f"syncline-cache-of-tests-{os.getuid()}")
torch.set_num_threads(1)  # ranks are forked from this process: a pool of OpenMP threads would not survive that
# Tests say what is measured, not how well.
overhead._ROUNDS, overhead._BUCKET_BYTES["cpu"] = 3, (1 << 16, 1 << 18, 1 << 20)

ALONE = frozenset(
    {
        "test_bench",
        "test_cli_probe",
        "test_cluster_launch",
        "test_cluster_lifetime",
        "test_cluster_mps",
        "test_links",
        "test_probe",
    }
)
"""They measure times, rates or traffic: not beside other tests."""
WAITS = frozenset({"test_silence", "test_faults", "test_watching", "test_hierarchical_wire"})
"""They wait for most of their time, with deadlines that a busy machine would miss: only beside each other."""
LONG = (
    "test_conservation",
    "test_restart",
    "test_ddp_semantics",
    "test_silence",
    "test_faults",
    "test_run",
    "test_nonfinite",
    "test_cli",
    "test_with_accelerate",
    "test_with_lightning",
    "test_with_transformers",
    "test_cluster_command",
    "test_ddp_state",
    "test_ddp_plan",
    "test_layerwise",
    "test_watching",
)
"""They come first, longest first: a long file that is started last would run while other cores are idle."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no file of which the markers asked for leave nothing, as importing all of them takes seconds."""
    asked = {"alone": ALONE, "waits": WAITS}.get(config.option.markexpr)
    return True if asked and collection_path.suffix == ".py" and collection_path.stem not in asked else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in ALONE:
            item.add_marker(pytest.mark.alone)
        elif item.path.stem in WAITS:
            item.add_marker(pytest.mark.waits)
    places = {stem: place for place, stem in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


def pytest_collection_finish() -> None:
    """Ranks are forked from this process, more than a thousand times, and what a fork costs is its memory's tables:
    what is there by now goes into large pages, where no garbage collection touches it again."""
    gc.collect()
    gc.freeze()
    large_pages.gather()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or else what Triton holds would count as leaked


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
