# Two commands: `make quickstart` and `make test`. Both make .venv when it is not there, and can be run again.
PYTHON ?= python3
BIN := .venv/bin
STEPS ?= 100
# Every test that starts a process would compile the package again, in 0.7 s, where this variable is set.
export PYTHONDONTWRITEBYTECODE =
# make quickstart PRECISION=bf16-mixed COMPILE=1
PRECISION ?=
COMPILE ?=

.PHONY: quickstart test test-imagined lint docs soak chaos fuzz determinism security coverage clean gpu test-oldest test-kernels

.venv/.quickstart: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python >= 3.11 is needed, this is " + sys.version'
	@echo "Installing into .venv, about two minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	# torch first and by its exact version: a range would bring the newest build and gigabytes of CUDA.
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hf,cli,plots]'
	touch $@

# What the tests need beside it: every optional package that installs without a GPU.
.venv/.installed: .venv/.quickstart
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

quickstart: .venv/.quickstart
	$(BIN)/python examples/quickstart.py --steps $(STEPS) $(if $(PRECISION),--precision $(PRECISION)) \
		$(if $(COMPILE),--compile)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config setup.cfg

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# README, quickstart, every example and the GPU tests on a CUDA device that is imagined: tests/imagined/README.md.
test-imagined: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m imagined tests/imagined
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:xdist -p tests.imagined.plugin -m gpu -k "not measured_peak" \
		tests/attention tests/callbacks tests/cuda_graph tests/gpu/test_models.py tests/loss

# The documentation, into site/; a broken link or a name that is gone fails.
.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Trust: long runs, each bounded, each ending in a table of benchmarks/TRUST.md.
MINUTES ?= 30
KILLS ?= 40
CALLS ?= 10000
COMBINATIONS ?= 2000
soak: .venv/.installed
	$(BIN)/python -m tests.trust.soak --minutes $(MINUTES)

chaos: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.chaos --kills $(KILLS) --minutes $(MINUTES)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.caches

fuzz: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(CALLS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.lives --minutes $(MINUTES)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.combinations $(COMBINATIONS) --minutes $(MINUTES)

determinism: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.determinism

# pip-audit and its packages stay out of the environment that it scans.
security: .venv/.installed
	$(PYTHON) -m venv .venv/audit
	.venv/audit/bin/python -m pip install --quiet pip-audit
	$(BIN)/python -m tests.trust.security --pip-audit .venv/audit/bin/pip-audit

# Lines met by the tests, those that run on ranks and in subprocesses too.
coverage: .venv/.installed
	rm -f .coverage .coverage.*
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term-missing:skip-covered

clean:
	rm -rf .venv runs

# Everything that needs a GPU, the most telling first, in so many minutes; says what it would run where there is
# none. Results stay in runs/gpu, and a second run goes on with what is missing.
BUDGET ?= 9
gpu:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu --budget $(BUDGET)

# The tests with the lowest torch, lightning and transformers that setup.cfg allows, in an environment of their
# own; PIP_OPTIONS may name an index with torch's CPU build, which saves gigabytes.
OLDEST ?= .venv-oldest
PIP_OPTIONS ?=
$(OLDEST)/.installed: setup.cfg constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet $(PIP_OPTIONS) -c constraints-oldest.txt torch
	$(OLDEST)/bin/python -m pip install --quiet -c constraints-oldest.txt -e '.[dev]'
	touch $@

test-oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Real Triton kernels on the CPU, by Triton's interpreter.
KERNELS ?= .venv-kernels
WITHOUT_CUDA := MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE \
	CAUSAL_CONV1D_FORCE_BUILD=TRUE
$(KERNELS)/.installed: .venv/.installed constraints-kernels.txt
	mkdir -p $(KERNELS)
	$(BIN)/python -m pip install --quiet setuptools wheel packaging ninja
	$(WITHOUT_CUDA) $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --upgrade \
		--target $(KERNELS) -r constraints-kernels.txt
	touch $@

test-kernels: $(KERNELS)/.installed
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 PYTHONPATH=.:$(KERNELS) $(BIN)/python -m pytest -m slow tests/interpreter
