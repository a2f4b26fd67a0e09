# The first of these that works; a pyenv shim can be on PATH without a Python behind it.
PYTHON = $(shell python3.11 -c "" 2>/dev/null && echo python3.11 || echo python3)
VENV_PYTHON := .venv/bin/python
FLOOR_PYTHON := .venv-floor/bin/python
AZURITE := .dev/azurite/node_modules/azurite/package.json
# What the oldest set has to pass: the stages, in every mode that tests/test_modes.py knows, and the readers.
FLOOR_TESTS := tests/estimators/test_conformance.py tests/estimators/test_stages.py tests/test_modes.py \
	tests/pipelines/test_readers.py tests/pipelines/readers/test_petastorm_compat.py
# What each Python has to pass with the wheel of this checkout and its own torch, see requirements/python-*.txt.
PYTHON_TESTS := tests/estimators/test_conformance.py tests/estimators/test_stages.py tests/models/test_spec.py \
	tests/estimators/collectives/test_collectives.py tests/estimators/training/test_worker.py
# The longest file comes first.
PLACES_TESTS := $(patsubst %,tests/places/test_%.py,yarn stores hdfs kubernetes)
ARGS ?=
# The set-up leaves it to Python to compile a module at its first import. Without files each process would compile.
unexport PYTHONDONTWRITEBYTECODE

# The set-up finishes before what needs it, also under `make -j`.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help python setup setup-floor setup-peers setup-frameworks demo test test-extras test-python test-frameworks test-places test-all test-floor lint docs bench bench-peers gpu faults mutants package clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

python:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "Python 3.11 is missing: apt-get install python3.11 python3.11-venv" >&2; exit 1; }

setup: python ## Build .venv from the pins, with Horovod; a second run is a no-op
	@$(PYTHON) scripts/setup_environment.py

setup-floor: python ## Build .venv, and .venv-floor: the oldest Spark, Arrow, NumPy, pandas
	@$(PYTHON) scripts/setup_environment.py --floor

setup-peers: python ## Build .venv, .venv-floor and the .venv-peers-*: what bench-peers compares with
	@$(PYTHON) scripts/setup_environment.py --peers

setup-frameworks: python ## Build .venv, and .venv-frameworks: JAX and TensorFlow for the tests of `ringspark.run`
	@$(PYTHON) scripts/setup_environment.py --frameworks

# Else the OpenMP threads of gradient boosting busy-wait and slow a loaded machine.
demo: export OMP_WAIT_POLICY = passive
demo: setup ## Train the flights example end to end; options in ARGS="..."
	@$(VENV_PYTHON) examples/flights/demo.py $(ARGS)

# Suites run side by side: threads that wait for work in a loop take the cores from each other.
test test-extras test-python test-frameworks test-places test-all test-floor: export OMP_NUM_THREADS = 1

# Two processes, each with one Spark session; a file stays in one of them, with what its tests share.
test: setup ## Run the core's tests that are not slow, under 10 minutes; pytest's options in ARGS="..."
	@$(VENV_PYTHON) -m pytest -n 2 --dist loadfile -m "not slow and not extras and not places" $(ARGS)

test-extras: setup ## Run the tests of ringspark.extras that are not slow; pytest's options in ARGS="..."
	@$(VENV_PYTHON) -m pytest -n 2 --dist loadfile -m "extras and not slow" $(ARGS)

test-all: test-floor test-frameworks ## Run every test, in all three environments; options in ARGS="..."
	@$(VENV_PYTHON) -m pytest -n 2 --dist loadfile $(ARGS)

test-python: ## Run the tests of stages and collectives with PYTHON, which has the wheel and pytest
	@$(PYTHON) -m pytest -n 2 --dist loadfile $(PYTHON_TESTS) -m "not slow and not extras" \
		-k "not test_conformance or TorchClassifier" $(ARGS)

test-frameworks: setup-frameworks ## Run the scripts of five frameworks by ringspark.run; options in ARGS="..."
	@.venv-frameworks/bin/python -m pytest tests/frameworks tests/extras/keras_models/test_keras_network.py $(ARGS)

# Real servers on loopback; what a machine lacks is skipped with its reason, or with RINGSPARK_REQUIRE_PLACES=1 fails.
test-places: setup $(AZURITE) ## Run the tests of stores and cluster managers: S3, GCS, ABFS, HDFS, YARN, Kubernetes
	@$(VENV_PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m places $(PLACES_TESTS) $(ARGS)

$(AZURITE):
	@command -v npm >/dev/null || { echo "npm is missing, so no test runs with ABFS: apt-get install npm"; exit 0; }; \
		npm install --silent --no-audit --no-fund --prefix .dev/azurite azurite@3.35.0

# Its Connect server is that of .venv: pyspark 3.5 comes without one.
test-floor: setup-floor ## Run the tests of stages and readers in .venv-floor; options in ARGS="..."
	@$(FLOOR_PYTHON) -m pytest -n 2 --dist loadfile $(FLOOR_TESTS) $(ARGS)

lint: setup ## Check style (ruff), types (mypy) and spelling (codespell)
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) -m mypy -p ringspark -p scripts -m demo -m docstrings
	@$(VENV_PYTHON) -m codespell_lib

docs: setup ## Build the pages of docs/ as HTML into build/docs; a warning is an error
	@$(VENV_PYTHON) -m sphinx --quiet --fail-on-warning --keep-going -b html docs build/docs
	@echo build/docs/index.html

bench: setup ## Measure, and print the tables; options in ARGS="..."
	@$(VENV_PYTHON) tests/benchmarks/run.py $(ARGS)

# By the caller's Python, without the set-up: a machine with a GPU often has a torch of its own.
gpu: ## Test and measure on a GPU in 9 minutes, by a Python with torch in PYTHON=...; options in ARGS="..."
	@$(PYTHON) tests/gpu/run.py $(ARGS)

# Five rounds of 15 contestants; `ARGS="--tiny"` takes minutes and measures nothing.
bench-peers: setup-peers ## Measure against horovod.spark, TorchDistributor and others; options in ARGS="..."
	@$(VENV_PYTHON) tests/benchmarks/peers/run.py $(ARGS)

faults: setup ## Break trainings at random moments, and print what they survive; options in ARGS="..."
	@$(VENV_PYTHON) tests/benchmarks/fault_matrix.py $(ARGS)

mutants: setup ## Put small bugs into a copy, print those that no test notices; options in ARGS="..."
	@$(VENV_PYTHON) scripts/run_mutants.py $(ARGS)

package: setup ## Build the wheel, the source distribution, the .zip for spark-submit and the SBOM, into dist/
	@$(VENV_PYTHON) scripts/build_package.py

clean: ## Remove what builds, tests and checks left (keeps every .venv and the Horovod cache)
	@rm -rf build dist *.egg-info spark-warehouse metastore_db derby.log artifacts
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
