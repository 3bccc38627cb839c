"""Shared by all tests."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, as `set_num_threads` is for one thread only

import pytest
import torch
import torch.distributed as dist

import large_pages
from background import Beside, beside
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
        "test_with_ray",
    }
)
"""They measure times, rates or traffic, or start many processes: not beside other tests."""
WAITS = frozenset({"test_silence", "test_faults", "test_watching", "test_hierarchical_wire"})
"""They wait for most of their time, with deadlines that a busy machine would miss: only beside each other."""
LONG = (
    "test_faults",
    "test_silence",
    "test_watching",
    "test_laws",
    "test_kernels",
    "test_overlap",
    "test_conservation",
    "test_restart",
    "test_updates",
    "test_ddp_semantics",
    "test_run",
    "test_cli",
    "test_chunked_topk",
    "test_ddp_sparse",
    "test_search",
    "test_guide",
    "test_nonfinite",
    "test_with_transformers",
    "test_with_lightning",
    "test_cluster_command",
    "test_layerwise",
    "test_ddp_plan",
    "test_cli_start",
    "test_with_accelerate",
    "test_ddp_state",
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


@pytest.fixture(scope="module")
def interpreter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    """Run the test module as a script, beside its tests, with Triton's interpreter, which must be enabled before Triton
    is imported. The script compares the CUDA kernels with the CPU's, and prints the differences as JSON."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    with beside([sys.executable, str(request.path)], tmp_path_factory.mktemp("interpreter"), environment) as running:
        yield running


@pytest.fixture(scope="module")
def interpreted(interpreter: Beside) -> dict[str, str]:
    """Return what is wrong in the interpreter, by check."""
    pytest.importorskip("triton")
    status, output, errors = interpreter.wait()
    assert status == 0, errors
    wrong: dict[str, str] = json.loads(output.splitlines()[-1])
    return wrong


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
