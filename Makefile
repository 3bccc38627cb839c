# Everything a fresh machine needs is created here: `make demo` and `make test` are enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-faults lint bench docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/ready
	$(BIN)/syncline demo

# On two cores: first the tests that compute, then those that mostly wait; and then, one by one, those that measure.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not alone and not waits'
	$(BIN)/python -m pytest -n 4 --dist worksteal -m waits
	$(BIN)/python -m pytest -m alone

# Every fault in every phase of a training, on emulated hosts: some minutes. `make test` has a part of it.
test-faults: $(VENV)/ready
	$(BIN)/python -m pytest tests/faults/matrix.py

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

bench: $(VENV)/ready
	$(BIN)/syncline bench --hosts 4 --per-host 1 --rate 200mbit --model cnn --methods nosync,ddp,dense,bf16,fp16,fp16-hook,powersgd --steps 60

docs: $(VENV)/ready
	$(BIN)/sphinx-build -W --keep-going -b html docs build/docs

# torch comes first and alone, from the constraints: asked for by another package's range it could pull several GB of CUDA.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis syncline-report.html report.html syncline-run syncline-failure
