# Every target makes the environment it needs; `make` alone lists them.
PYTHON ?= python3
PYTHON_OLDEST ?= $(PYTHON)
# Processes that share the suite; TensorFlow takes about 1 GB in each.
JOBS ?= 2
ARGS ?=
# `make check` looks at what differs from this commit: what is not committed, or else
# the last commit.
BASE ?= $(shell test -n "$$(git status --porcelain)" && echo HEAD || echo HEAD~1)
# `make test-whole` in parts, and on which versions.
SHARD ?= 1/1
VERSIONS ?= newest oldest nightly

SHELL := /bin/bash
BIN := .venv/bin
OLDEST := .venv-oldest/bin
NIGHTLY := .venv-nightly/bin
DOCS := .venv-docs/bin
# Tests of a file stay in one process; whoever is done takes from the other's end.
PYTEST := -m pytest -q -n $(JOBS) --dist worksteal -rs
# TensorFlow prints these whatever the level is: notices, and errors that every start
# without a GPU or with two copies of a CUDA plug-in gives. `tfamp doctor` tells more.
export TF_CPP_MIN_LOG_LEVEL ?= 2
NOTICES := ^I[0-9]{4} |WARNING: All log messages before absl::InitializeLog
NOTICES := $(NOTICES)|Unable to register cu|computation placer already registered
NOTICES := $(NOTICES)|failed call to cuInit
NO_NOTICES := 2> >(grep --line-buffered -v -E '$(NOTICES)' >&2)

.DEFAULT_GOAL := help
.PHONY: help train check test test-oldest test-whole test-whole-newest \
  test-whole-oldest test-whole-nightly test-clients durations mutants lint notebooks bench wild docs \
  architecture clean

help:  ## list the targets
	@echo "make <target> [PYTHON=python3.12] [JOBS=2] [ARGS='...']"
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' Makefile

.venv/.installed: setup.cfg pyproject.toml
	@.ci/environment .venv "$(PYTHON)" "TensorFlow, tfamp and its tools" \
	  -e ".[data,report,serve,litert,onnx,openvino,ray,dev,wild]" "keras==3.15.1"

.venv-oldest/.installed: setup.cfg pyproject.toml
	@NEWEST_PYTHON=3.12 .ci/environment .venv-oldest "$(PYTHON_OLDEST)" "the oldest supported versions" \
	  -e ".[data,report,dev]" "tensorflow==2.19.*" "keras==3.10.0" "tensorflow-metadata<1.18"

# Keras's nightly build is a package of its own that holds the same files.
.venv-nightly/.installed: setup.cfg pyproject.toml
	@.ci/environment .venv-nightly "$(PYTHON)" "TensorFlow and last night's Keras" \
	  -e ".[data,report,dev]"
	@rm .venv-nightly/.installed
	@$(NIGHTLY)/python -m pip uninstall -q -y keras
	@$(NIGHTLY)/python -m pip install -q --disable-pip-version-check keras-nightly
	@touch .venv-nightly/.installed

# Triton's client wants an older protobuf than TensorFlow takes.
.venv-clients/.installed: setup.cfg pyproject.toml
	@.ci/environment .venv-clients "$(PYTHON)" "the server's clients" \
	  -e ".[serve,onnx,openvino,litert,clients,dev]"

.venv-docs/.installed: setup.cfg pyproject.toml
	@.ci/environment .venv-docs "$(PYTHON)" "the documentation" -e ".[data,report,docs]"

train: .venv/.installed  ## train a small CNN on digits in float32, with XLA, in half precision
	@echo "Training on scikit-learn's digits under three policies: 3 to 5 minutes."
	@$(BIN)/python recipes/compare_digits.py $(ARGS)

check: lint  ## lint, and a minute of the tests nearest to what you changed
	@echo "Running the tests nearest to what differs from $(BASE)."
	@$(BIN)/python $(PYTEST) --changed=$(BASE) --seconds=80 $(ARGS) $(NO_NOTICES)

test: .venv/.installed  ## test every promise on the newest TensorFlow and Keras
	@echo "Running the tests in $(JOBS) processes: ten to sixteen minutes on two cores."
	@$(BIN)/python $(PYTEST) --durations=10 --durations-min=1 $(ARGS) $(NO_NOTICES)

test-oldest: .venv-oldest/.installed  ## run a fast case of each test on the oldest
	@echo "Running a fast case of each test on TensorFlow 2.19 and Keras 3.10."
	@$(OLDEST)/python $(PYTEST) --thin --seed=oldest $(ARGS) $(NO_NOTICES)

test-whole: $(VERSIONS:%=test-whole-%)  ## run every case, on each of VERSIONS

test-whole-newest: .venv/.installed
	@echo "Running every case on the newest TensorFlow and Keras, part $(SHARD)."
	@$(BIN)/python $(PYTEST) --whole --shard=$(SHARD) $(ARGS) $(NO_NOTICES)

test-whole-oldest: .venv-oldest/.installed
	@echo "Running every case on TensorFlow 2.19 and Keras 3.10, part $(SHARD)."
	@$(OLDEST)/python $(PYTEST) --whole --shard=$(SHARD) $(ARGS) $(NO_NOTICES)

test-whole-nightly: .venv-nightly/.installed
	@echo "Running every case on last night's Keras, part $(SHARD)."
	@$(NIGHTLY)/python $(PYTEST) --whole --shard=$(SHARD) $(ARGS) $(NO_NOTICES)

test-clients: .venv-clients/.installed  ## ask the server by Triton's client, and serve through Ray
	@echo "Running the tests of the server with Triton's client and Ray Serve."
	@.venv-clients/bin/python $(PYTEST) --whole tests/server_process_test.py tests/serving_elsewhere_test.py $(ARGS) $(NO_NOTICES)

durations: .venv/.installed  ## measure every case and write tests/durations.json
	@$(BIN)/python $(PYTEST) --whole --shard=$(SHARD) --record $(ARGS) $(NO_NOTICES)

mutants: .venv/.installed  ## break a line at a time and see that a test notices
	@$(BIN)/python -m tests.suite.mutants $(ARGS)

lint: .venv/.installed  ## check format, style and types: ten seconds
	@$(BIN)/ruff format --check --diff .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

notebooks: .venv/.installed  ## build every .ipynb from its .py, and run those that changed
	@$(BIN)/python notebooks/build.py --execute $(ARGS) $(NO_NOTICES)

bench: .venv/.installed  ## measure the first parts of benchmarks/RESULTS.md
	@echo "Measuring builds, steps, updates, input pipelines and training: about an hour."
	@for name in enable_overhead loss_scale pipeline training; do \
	  $(BIN)/python -m benchmarks $$name $(ARGS) $(NO_NOTICES); done

wild: .venv/.installed  ## run the programs of the corpus and write docs/wild.md
	@echo "Running each program in every way and with three seeds: about an hour."
	@$(BIN)/python -W ignore -m tests.wild.table $(ARGS) $(NO_NOTICES)

docs: .venv-docs/.installed  ## build the documentation in build/site
	@$(DOCS)/python -m sphinx -W --keep-going -q -b html docs build/site $(ARGS) $(NO_NOTICES)
	@echo "Open build/site/index.html."

architecture: .venv/.installed  ## draw the floors of the package
	@$(BIN)/python -m docs.architecture $(ARGS)

clean:  ## remove the environments and everything built
	rm -rf .venv .venv-oldest .venv-nightly .venv-clients .venv-docs docs/generated build dist *.egg-info .coverage .coverage.*
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
