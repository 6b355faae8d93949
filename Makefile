# Every target makes the environment it needs; `make` alone lists them.
PYTHON ?= python3
PYTHON_OLDEST ?= $(PYTHON)
# Processes that share the suite; TensorFlow takes about 1 GB in each.
JOBS ?= 2
ARGS ?=
# `make mutants` breaks lines that differ from this commit.
BASE ?= HEAD~1
# `make test-whole` runs on these.
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
  test-whole-oldest test-whole-nightly test-clients mutants lint notebooks bench wild docs \
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

# With what training needs alone; where all is there already, with that.
TRAIN := $(if $(wildcard .venv/.installed),.venv,.venv-train)
.venv-train/.installed: setup.cfg pyproject.toml
	@.ci/environment .venv-train "$(PYTHON)" "TensorFlow and tfamp" \
	  -e ".[report]" scikit-learn "keras==3.15.1"

train: $(TRAIN)/.installed  ## train a small CNN on digits in float32, with XLA, in half precision
	@echo "Training on scikit-learn's digits under three policies: 3 to 10 minutes, by the CPU."
	@$(TRAIN)/bin/python recipes/compare_digits.py $(ARGS)

check: lint  ## lint, and the tests that reach what changed since its last run
	@echo "Running the tests that reach what changed; the first run is as long as make test."
	@$(BIN)/python -m pytest -q --testmon --testmon-forceselect -m "not slow" $(ARGS) $(NO_NOTICES)

test: .venv/.installed  ## test every promise on the newest TensorFlow and Keras
	@echo "Running the tests in $(JOBS) processes: 10 to 15 minutes on two cores."
	@$(BIN)/python $(PYTEST) -m "not slow" --durations=10 --durations-min=1 $(ARGS) $(NO_NOTICES)

# The other files reach every line of keras_hooks that these reach, too;
# test-whole runs these on the oldest as well.
ANY_VERSION := benchmarks callbacks_device callbacks_monitor cli_ clusters
ANY_VERSION += compare data_ deploy docs doctor evidence export failure_to faults floors
ANY_VERSION += import joined_steps latency learning_rate lint machine measure memory
ANY_VERSION += multi_worker notebooks out_of_memory overrides plan_ public_names
ANY_VERSION += ranges recipes records release report security sensitivity server
ANY_VERSION += triage tuner
ANY_VERSION += $(addprefix wild/,autograph corpus export first_check first_steps lifetimes)
ANY_VERSION += $(addprefix wild/,old_lines order_of recovery_blame scaled_by_hand server)
ANY_VERSION += $(addprefix wild/,shown_results spoilt tool_pairs tools_and_seeds verdicts)
ANY_VERSION := $(ANY_VERSION:%=--ignore-glob='tests/%*')
test-oldest: .venv-oldest/.installed  ## what hangs on a version, on the oldest
	@echo "Running the tests on TensorFlow 2.19 and Keras 3.10."
	@$(OLDEST)/python $(PYTEST) -m "not slow" $(ANY_VERSION) $(ARGS) $(NO_NOTICES)

test-whole: $(VERSIONS:%=test-whole-%)  ## run every case, on each of VERSIONS

test-whole-newest: .venv/.installed
	@echo "Running every case on the newest TensorFlow and Keras."
	@$(BIN)/python $(PYTEST) $(ARGS) $(NO_NOTICES)

test-whole-oldest: .venv-oldest/.installed
	@echo "Running every case on TensorFlow 2.19 and Keras 3.10."
	@$(OLDEST)/python $(PYTEST) $(ARGS) $(NO_NOTICES)

test-whole-nightly: .venv-nightly/.installed
	@echo "Running every case on last night's Keras."
	@$(NIGHTLY)/python $(PYTEST) $(ARGS) $(NO_NOTICES)

test-clients: .venv-clients/.installed  ## ask the server by Triton's client, and serve through Ray
	@echo "Running the tests of the server with Triton's client and Ray Serve."
	@.venv-clients/bin/python $(PYTEST) tests/serving_elsewhere_test.py $(ARGS) $(NO_NOTICES)

# It knows the tests that reach a line from `make check`, which has to run before.
mutants: .venv/.installed  ## break what differs from BASE, a line at a time; do tests notice?
	@mkdir -p build && rm -f build/mutants.sqlite
	@files=$$(git diff --name-only --diff-filter=d $(BASE) -- 'tfamp/*.py' | sed 's/.*/"&",/'); \
	sed -e 's/^branch = .*/branch = "$(BASE)"/' -e "s|^module-path = .*|module-path = [$${files//$$'\n'/ }]|" \
	  .ci/cosmic-ray.toml > build/cosmic-ray.toml
	@$(BIN)/cosmic-ray init build/cosmic-ray.toml build/mutants.sqlite
	@$(BIN)/cr-filter-git --config build/cosmic-ray.toml build/mutants.sqlite
	@PATH="$$PWD/$(BIN):$$PATH" $(BIN)/cosmic-ray exec build/cosmic-ray.toml build/mutants.sqlite
	@$(BIN)/cr-report build/mutants.sqlite

lint: .venv/.installed  ## check format, style, types and floors: twenty seconds
	@$(BIN)/ruff format --check --diff .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

notebooks: .venv/.installed  ## build every .ipynb from its .py, and run those that changed
	@$(BIN)/python notebooks/build.py --execute $(ARGS) $(NO_NOTICES)

bench: .venv/.installed  ## measure the first parts of benchmarks/RESULTS.md
	@echo "Measuring builds, steps, updates, input pipelines and training: about an hour."
	@for name in enable_overhead loss_scale pipeline training; do \
	  $(BIN)/python -m benchmarks $$name $(ARGS) $(NO_NOTICES); done

wild: .venv/.installed  ## run the programs of the corpus and write docs/wild.md
	@echo "Running each program in every way and with three seeds: about a quarter of an hour."
	@$(BIN)/python -W ignore -m tests.wild.table $(ARGS) $(NO_NOTICES)

docs: .venv-docs/.installed  ## build the documentation in build/site
	@$(DOCS)/python -m sphinx -W --keep-going -q -b html docs build/site $(ARGS) $(NO_NOTICES)
	@echo "Open build/site/index.html."

architecture: .venv/.installed  ## draw the floors of the package
	@$(BIN)/python -m docs.architecture $(ARGS)

clean:  ## remove the environments and everything built
	rm -rf .venv .venv-train .venv-oldest .venv-nightly .venv-clients .venv-docs docs/generated build dist *.egg-info .coverage .coverage.*
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
