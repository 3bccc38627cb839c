"""Command-line options of the fault matrix."""

from __future__ import annotations

import pytest

from syncline.files import write_json

ROWS: list[dict[str, object]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--cells-json", metavar="FILE", help="write the outcome of each cell to FILE")
    group.addoption(
        "--cells-seed", type=int, default=0, metavar="N", help="seed of the moments at which timed faults strike"
    )
    group.addoption(
        "--cells-at-once", type=int, default=4, metavar="N", help="number of cells that run at the same time"
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--cells-json", default=None)
    if path and ROWS:
        write_json(path, {"schema": 1, "cells": ROWS})
