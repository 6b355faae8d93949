# Every target makes the environment it needs; `make` alone lists them.
PYTHON ?= python3
PYTHON_OLDEST ?= $(PYTHON)
# Processes that share the suite; TensorFlow takes about 1 GB in each.
JOBS ?= 2
ARGS ?=

SHELL := /bin/bash
BIN := .venv/bin
OLDEST := .venv-oldest/bin
# TensorFlow prints these whatever the level is: notices, and errors that every start
# without a GPU or with two copies of a CUDA plug-in gives. `tfamp doctor` tells more.
export TF_CPP_MIN_LOG_LEVEL ?= 2
NOTICES := ^I[0-9]{4} |WARNING: All log messages before absl::InitializeLog
NOTICES := $(NOTICES)|Unable to register cu|computation placer already registered
NOTICES := $(NOTICES)|failed call to cuInit
NO_NOTICES := 2> >(grep --line-buffered -v -E '$(NOTICES)' >&2)

.DEFAULT_GOAL := help
.PHONY: help train test test-oldest lint notebooks bench clean

help:  ## list the targets
	@echo "make <target> [PYTHON=python3.12] [JOBS=2] [ARGS='...']"
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

.venv/.installed: setup.cfg pyproject.toml
	@.ci/environment .venv "$(PYTHON)" "TensorFlow, tfamp and its tools" \
	  -e ".[data,report,dev]"

.venv-oldest/.installed: setup.cfg pyproject.toml
	@NEWEST_PYTHON=3.12 .ci/environment .venv-oldest "$(PYTHON_OLDEST)" "the oldest supported versions" \
	  -e ".[data,report,dev]" "tensorflow==2.19.*" "keras==3.10.0" "tensorflow-metadata<1.18"

train: .venv/.installed  ## train a small CNN on digits, float32 against the best policy
	@echo "Training on scikit-learn's digits with 5 seeds under two policies: about 6 minutes."
	@$(BIN)/python recipes/train_digits.py --compare=5 --epochs=20 $(ARGS) $(NO_NOTICES)

test: .venv/.installed  ## run the whole suite on the newest TensorFlow and Keras
	@echo "Running the suite in $(JOBS) processes: about half an hour on two cores."
	@$(BIN)/python -m pytest -q -n $(JOBS) $(ARGS) $(NO_NOTICES)

test-oldest: .venv-oldest/.installed  ## run every fast test, one case of each, on the oldest
	@echo "Running a case of every fast test on TensorFlow 2.19 and Keras 3.10: nine minutes."
	@$(OLDEST)/python -m pytest -q -n $(JOBS) -m "not slow" --thin=1 $(ARGS) $(NO_NOTICES)

lint: .venv/.installed  ## check format, style and types: ten seconds
	@$(BIN)/ruff format --check --diff .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

notebooks: .venv/.installed  ## build every .ipynb from its .py source
	@$(BIN)/python notebooks/build.py

bench: .venv/.installed  ## measure what benchmarks/RESULTS.md states
	@echo "Measuring builds, steps, updates, input pipelines and training: about an hour."
	@$(BIN)/python benchmarks/enable_overhead.py $(ARGS) $(NO_NOTICES)
	@$(BIN)/python benchmarks/loss_scale.py $(ARGS) $(NO_NOTICES)
	@$(BIN)/python benchmarks/pipeline.py $(ARGS) $(NO_NOTICES)
	@$(BIN)/python benchmarks/training.py $(ARGS) $(NO_NOTICES)

clean:  ## remove the environments and everything built
	rm -rf .venv .venv-oldest build dist *.egg-info .coverage .coverage.*
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
