# Two commands: `make quickstart` and `make test`. Both make .venv when it is not there, and can be run again.
PYTHON ?= python3
BIN := .venv/bin
STEPS ?= 100
# Every test that starts a process would compile the package again, in 0.7 s, where this variable is set.
export PYTHONDONTWRITEBYTECODE =
# make quickstart PRECISION=bf16-mixed COMPILE=1
PRECISION ?=
COMPILE ?=

.PHONY: help quickstart test test-imagined lint docs soak chaos fuzz determinism security coverage clean gpu test-oldest \
	test-newest test-main test-python test-trl test-kernels dist test-wheel release-notes

.DEFAULT_GOAL := help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.venv/.quickstart: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python >= 3.11 is needed, this is " + sys.version'
	@echo "Installing into .venv, about two minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	# torch first and by its exact version: a range would bring the newest build and gigabytes of CUDA.
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hf,accelerate,cli,plots]'
	touch $@

# What the tests need beside it: every optional package that installs without a GPU.
.venv/.installed: .venv/.quickstart
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

quickstart: .venv/.quickstart ## train a small model in three minutes; PRECISION=bf16-mixed COMPILE=1 STEPS=100
	$(BIN)/python examples/quickstart.py --steps $(STEPS) $(if $(PRECISION),--precision $(PRECISION)) \
		$(if $(COMPILE),--compile)

lint: .venv/.installed ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config setup.cfg

test: lint ## lint, then all tests that need no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# README, quickstart, every example and the GPU tests on a CUDA device that is imagined: tests/imagined/README.md.
test-imagined: .venv/.installed ## the tests on a simulated CUDA device
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m imagined tests/imagined
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:xdist -p tests.imagined.plugin -m gpu -k "not measured_peak" \
		tests/attention tests/callbacks tests/cuda_graph tests/gpu/test_models.py tests/loss

# The documentation, into site/; a broken link or a name that is gone fails.
.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

docs: .venv/.docs ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Trust: long runs, each bounded, each ending in a table of benchmarks/TRUST.md.
MINUTES ?= 30
KILLS ?= 40
CALLS ?= 10000
COMBINATIONS ?= 2000
soak: .venv/.installed ## a long run of steps; MINUTES=30
	$(BIN)/python -m tests.trust.soak --minutes $(MINUTES)

chaos: .venv/.installed ## kills, full disks, cut checkpoints; KILLS=40
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.chaos --kills $(KILLS) --minutes $(MINUTES)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.caches

fuzz: .venv/.installed ## random calls, lives and combinations; CALLS=10000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(CALLS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.lives --minutes $(MINUTES)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.combinations $(COMBINATIONS) --minutes $(MINUTES)

determinism: .venv/.installed ## runs of one seed, bit by bit
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust.determinism

# pip-audit and its packages stay out of the environment that it scans.
security: .venv/.installed ## what is loaded by pickle, known vulnerabilities, licences
	$(PYTHON) -m venv .venv/audit
	.venv/audit/bin/python -m pip install --quiet pip-audit
	$(BIN)/python -m tests.trust.security --pip-audit .venv/audit/bin/pip-audit

# Lines met by the tests, those that run on ranks and in subprocesses too.
coverage: .venv/.installed ## the lines that the tests meet
	rm -f .coverage .coverage.*
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term-missing:skip-covered

clean: ## remove .venv and runs
	rm -rf .venv runs

# Everything that needs a GPU, the most telling first, in so many minutes; says what it would run where there is
# none. Results stay in runs/gpu, and a second run goes on with what is missing.
BUDGET ?= 9
gpu: ## everything that needs a GPU; BUDGET=9 minutes
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu --budget $(BUDGET)

# The tests with the lowest torch, lightning and transformers that setup.cfg allows, in an environment of their
# own; PIP_OPTIONS may name an index with torch's CPU build, which saves gigabytes.
OLDEST ?= .venv-oldest
PIP_OPTIONS ?=
TESTS ?=
$(OLDEST)/.installed: setup.cfg constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet $(PIP_OPTIONS) -c constraints-oldest.txt torch
	$(OLDEST)/bin/python -m pip install --quiet -c constraints-oldest.txt -e '.[dev]'
	touch $@

# Old packages meet newer ones of others here, so deprecations are listed, in runs/oldest.txt.
test-oldest: $(OLDEST)/.installed ## the tests on the lowest versions of setup.cfg
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m tests.releases run oldest --deprecations runs/oldest.txt -- \
		-n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

# The tests with the newest release of everything that the index has, whatever setup.cfg allows, in an environment
# of their own. Deprecations of other packages are listed in runs/newest.txt and are no errors.
NEWEST ?= .venv-newest
$(NEWEST)/.installed: setup.cfg
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet --upgrade $(PIP_OPTIONS) torch
	$(NEWEST)/bin/python -m tests.releases requirements | tr ' ' '\n' > $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python -m pip install --quiet --upgrade $(PIP_OPTIONS) -r $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

test-newest: $(NEWEST)/.installed ## the tests on the newest releases of everything
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m tests.releases run newest --deprecations runs/newest.txt -- \
		-n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

# The same with what the main branches of transformers and Lightning hold today.
test-main: $(NEWEST)/.installed ## the tests on the main branches of transformers and Lightning
	$(NEWEST)/bin/python -m pip install --quiet --no-deps --force-reinstall \
		git+https://github.com/huggingface/transformers
	PACKAGE_NAME=lightning $(NEWEST)/bin/python -m pip install --quiet --no-deps --force-reinstall \
		git+https://github.com/Lightning-AI/pytorch-lightning
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m tests.releases run main --deprecations runs/main.txt -- \
		-n 2 --dist loadfile --no-loadscope-reorder $(TESTS)
	rm $(NEWEST)/.installed

# The pinned releases on another Python: make test-python PYTHON=python3.13
FOR_PYTHON ?= .venv-$(notdir $(PYTHON))
$(FOR_PYTHON)/.installed: setup.cfg constraints.txt
	test -x $(FOR_PYTHON)/bin/python || $(PYTHON) -m venv $(FOR_PYTHON)
	$(FOR_PYTHON)/bin/python -m pip install --quiet $(PIP_OPTIONS) -c constraints.txt torch
	$(FOR_PYTHON)/bin/python -m pip install --quiet $(PIP_OPTIONS) -c constraints.txt -e '.[dev]'
	touch $@

test-python: $(FOR_PYTHON)/.installed ## the tests on another Python; PYTHON=python3.13
	OMP_NUM_THREADS=1 $(FOR_PYTHON)/bin/python -m tests.releases run $(notdir $(PYTHON)) -- \
		-n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

# The tests of TRL's trainers with other releases of TRL than the pinned one.
TRL ?= 1.0.0 1.7.0 1.9.0
test-trl: .venv/.installed ## the tests of TRL on its supported releases
	for release in $(TRL); do \
		test -d .venv/trl-$$release || $(BIN)/python -m pip install --quiet --no-deps --target .venv/trl-$$release \
			trl==$$release || exit 1; \
		OMP_NUM_THREADS=1 $(BIN)/python -m tests.releases run "TRL $$release" --overlay .venv/trl-$$release -- \
			tests/integrations/test_sft_trainer.py tests/integrations/test_hf_rows.py \
			tests/integrations/test_hf_options.py tests/integrations/test_hf_trainer.py || exit 1; \
	done

# The sdist and the wheel, into dist/, checked as the index checks them.
.venv-dist/.installed:
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet build twine
	touch $@

dist: .venv-dist/.installed ## the wheel and the source archive, into dist/
	rm -rf dist build
	.venv-dist/bin/python -m build --outdir dist
	.venv-dist/bin/twine check --strict dist/*
	$(PYTHON) -c 'import pathlib; [wheel] = pathlib.Path("dist").glob("*.whl"); assert wheel.stat().st_size < 1e6'

# The wheel with the newest of everything it allows, in an empty environment, outside of the repository.
WHEEL ?= .venv-wheel
test-wheel: dist ## the tests of the wheel that dist makes
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet $(PIP_OPTIONS) "$$(ls dist/*.whl)[hf,accelerate,cli,plots]" trl
	$(PYTHON) -m tests.wheel --python $(WHEEL)/bin/python

# The section of CHANGELOG.md that becomes the text of a release: make release-notes VERSION=0.1.0
release-notes: ## the text of a release; VERSION=0.1.0
	@$(PYTHON) .ci/release_notes.py $(VERSION)

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

test-kernels: $(KERNELS)/.installed ## Triton's kernels by its interpreter
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 PYTHONPATH=.:$(KERNELS) $(BIN)/python -m pytest -m "slow or not slow" \
		tests/interpreter
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 PYTHONPATH=.:$(KERNELS) $(BIN)/python -m pytest -p tests.loss.forced \
		tests/loss/test_fused.py -k "cross_entropy or log_probabilities or (distillation and dtype0)"
