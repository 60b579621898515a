# Everything that a person or CI does with this repository. `make help` lists it.
# Needs Python 3.11 with venv and headers, GNU make, git and a C++ compiler; everything else is installed into .venv.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install test lint format demo bench soak screenshots constraints clean

# The torch build that constraints.txt pins is chosen by Python version, so the interpreter is asked, not trusted.
PYTHON ?= $(shell for python in python3.11 python3; do \
	if $$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := client,server,dev,torchtitan-tests
# Arguments for pytest, such as PYTEST_ARGS='-k legality -x'; SEED_START=N resumes a soak test.
PYTEST_ARGS ?=

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv with every extra at the pinned versions

# The stamp is written last, so an installation that was interrupted is repeated and a finished one costs nothing.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 found. Install it, or say which: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.3'
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]' --constraint constraints.txt
	$(BIN)/python -m pip check
	touch $@

lint: $(STAMP)  ## ruff, strict mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --cache-dir build/import-linter

format: $(STAMP)  ## rewrite the sources as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint  ## lint, then every test with bounded counts
	$(BIN)/python -m pytest $(PYTEST_ARGS)

demo: $(STAMP)  ## train on two ranks with plans from a server, and check the losses
	$(BIN)/python deploy/demo/run.py

bench: $(STAMP)  ## run tests/benchmarks; figures go to build/bench/NAME.json
	$(BIN)/python -m tests.benchmarks $(BENCH_ARGS)

soak: $(STAMP)  ## the tests marked soak at their full counts; SEED_START=N resumes
	BUCKETPLAN_SOAK=1 $(BIN)/python -m pytest -m soak -s --timeout=0 $(PYTEST_ARGS)

screenshots: $(STAMP)  ## take the READMEs' pictures again, in server/docs (needs chromium)
	$(BIN)/python -m tests.support.screenshots

# Needed after a change of dependencies; torch without its local label, which names a build and not a version.
constraints: $(STAMP)  ## pin in constraints.txt what .venv now holds
	$(BIN)/python -m pip freeze --quiet --all --exclude-editable \
		| grep -v '^pip==' | sed 's/^\(torch==[0-9.]*\)+.*/\1/' | LC_ALL=C sort -f > constraints.txt
	touch $(STAMP)

clean:  ## remove build output; the virtual environment stays
	rm -rf build dist
	find core server client tests deploy -type d -name __pycache__ -prune -exec rm -rf {} +
