# Two commands: `make quickstart` and `make test`. Both make .venv when it is not there, and can be run again.
PYTHON ?= python3
BIN := .venv/bin
STEPS ?= 100

.PHONY: quickstart test lint clean

.venv/.installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python >= 3.11 is needed, this is " + sys.version'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	# torch first and by its exact version: a range would bring the newest build and gigabytes of CUDA.
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

quickstart: .venv/.installed
	$(BIN)/python examples/quickstart.py --steps $(STEPS)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config setup.cfg

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

clean:
	rm -rf .venv runs
