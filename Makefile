# The first of these that works; a pyenv shim can be on PATH without a Python behind it.
PYTHON = $(shell python3.11 -c "" 2>/dev/null && echo python3.11 || echo python3)
VENV_PYTHON := .venv/bin/python
MODERN_PYTHON := .venv-modern/bin/python
SPARK35_PYTHON := .venv-spark35/bin/python
PACKAGES := pipelines models estimators jobs
# The same torch and Horovod are in every environment: what needs no more is tested in the first alone.
TORCH_TESTS := tests/models tests/estimators/collectives tests/estimators/memory tests/estimators/parallel \
	tests/estimators/training/saved_tensors
# What the oldest Spark has to pass, in every mode that tests/test_modes.py knows.
STAGE_TESTS := tests/estimators/test_conformance.py tests/estimators/test_stages.py tests/test_modes.py
ARGS ?=

# The set-up finishes before what needs it, also under `make -j`.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help python setup setup-modern setup-spark35 demo test test-modern test-spark35 lint bench \
	faults package clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

python:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "Python 3.11 is missing: apt-get install python3.11 python3.11-venv" >&2; exit 1; }

setup: python ## Build .venv from the pins, with Horovod; a second run is a no-op
	@$(PYTHON) scripts/setup_environment.py

setup-modern: python ## Build .venv-modern: the newest Spark, Arrow, NumPy and pandas, no Petastorm
	@$(PYTHON) scripts/setup_environment.py --modern

setup-spark35: python ## Build .venv, and .venv-spark35: the same with the oldest Spark that ringspark supports
	@$(PYTHON) scripts/setup_environment.py --spark35

demo: setup ## Train the flights example end to end; options in ARGS="..."
	@$(VENV_PYTHON) jobs/demo.py $(ARGS)

# Suites run side by side: threads that wait for work in a loop take the cores from each other.
test test-modern test-spark35: export OMP_NUM_THREADS = 1

test: setup ## Run the tests; pytest's options in ARGS="..."
	@$(VENV_PYTHON) -m pytest $(ARGS)

test-modern: setup-modern ## Run those of Spark, Arrow and NumPy in .venv-modern; options in ARGS="..."
	@$(MODERN_PYTHON) -m pytest -m "not distributed" $(TORCH_TESTS:%=--ignore=%) $(ARGS)

# Its Connect server is that of .venv: pyspark 3.5 comes without one.
test-spark35: setup-spark35 ## Run the tests of the stages in .venv-spark35; options in ARGS="..."
	@$(SPARK35_PYTHON) -m pytest $(STAGE_TESTS) $(ARGS)

lint: setup ## Check style (ruff), types (mypy) and spelling (codespell)
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) -m mypy $(PACKAGES:%=-p ringspark.%)
	@$(VENV_PYTHON) -m mypy scripts
	@$(VENV_PYTHON) -m codespell_lib

bench: setup ## Measure, and print the tables; options in ARGS="..."
	@$(VENV_PYTHON) tests/benchmarks/run.py $(ARGS)

faults: setup ## Break trainings at random moments, and print what they survive; options in ARGS="..."
	@$(VENV_PYTHON) tests/benchmarks/fault_matrix.py $(ARGS)

package: setup ## Build the wheel, and the .zip for spark-submit --py-files, into dist/
	@$(VENV_PYTHON) scripts/build_package.py

clean: ## Remove what builds, tests and checks left (keeps every .venv and the Horovod cache)
	@rm -rf build dist *.egg-info spark-warehouse metastore_db derby.log artifacts
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
