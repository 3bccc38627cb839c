"""All cells: `python -m pytest tests/faults/matrix.py`. A plain `pytest` runs only those in `tests/test_faults.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.cells import CELLS, Matrix
from faults.conftest import ROWS
from syncline.cluster import why_not_shaped


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    """Run the selected cells."""
    names = [item.callspec.params["name"] for item in request.session.items if isinstance(item, pytest.Function)]
    cells = [CELLS[name] for name in names if why_not_shaped() is None or not CELLS[name].needs_links]
    option = request.config.getoption
    made = Matrix(cells, tmp_path_factory.mktemp("faults"), option("--cells-seed"), option("--cells-at-once"))
    yield made
    made.close()


@pytest.mark.timeout(600)  # earlier cells may have to end first
@pytest.mark.parametrize("name", CELLS)
def test_cell(name: str, matrix: Matrix, request: pytest.FixtureRequest) -> None:
    if CELLS[name].needs_links and why_not_shaped() is not None:
        pytest.skip(f"no namespaces: {why_not_shaped()}")
    result, seed = matrix.result(name), request.config.getoption("--cells-seed")
    ROWS.append({**result.row, "seed": seed})
    assert not result.wrong, "\n".join([f"{name}, --cells-seed {seed}:", *result.wrong])
