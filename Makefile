# Each target sets up what it needs: `make demo` in a fresh clone is enough.

PYTHON ?= python3
JOBS   ?= 2
SECONDS ?= 300
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet install
BASE   := $(VENV)/.installed-base
TEST   := $(VENV)/.installed-test
LINT   := $(VENV)/.installed-lint

.PHONY: help demo test fuzz bench lint clean
.DEFAULT_GOAL := help

help:            ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(BASE)    ## train a small language model in FP8 next to full precision
	$(BIN)/python examples/quickstart.py

test: $(TEST)    ## run the tests (ARGS="-k name" to choose)
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

fuzz: $(TEST)    ## search for defects for a while (SECONDS=300 each): sequences of calls, graphs, files, C++ under sanitizers
	$(BIN)/python benchmarks/sequences.py
	$(BIN)/python tests/fuzz/graphs.py --seconds $(SECONDS)
	$(BIN)/python tests/fuzz/files.py --seconds $(SECONDS)
	$(BIN)/python tests/fuzz/sanitizers.py --seconds $(SECONDS)

bench: $(TEST)   ## run every benchmark, each against its peer
	@set -e; for script in $$(grep -l __main__ benchmarks/*.py); do echo "== $$script"; PYTHONPATH=examples $(BIN)/python $$script; done

# The package as it is installed: mypy finds passes/ and kernels/ inside of fp8_compile through links.
LINKED := build/lint/fp8_compile

lint: $(LINT)    ## check style (ruff) and types (mypy)
	$(BIN)/python -m ruff check .
	@rm -rf $(LINKED) && mkdir -p $(LINKED)
	@ln -s $(CURDIR)/fp8_compile/* $(CURDIR)/passes $(CURDIR)/kernels $(LINKED)
	cd build/lint && $(CURDIR)/$(BIN)/python -m mypy --config-file $(CURDIR)/pyproject.toml -p fp8_compile

clean:           ## remove the virtual environment and everything built or dumped
	rm -rf $(VENV) build dist *.egg-info fp8_dumps .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# The stamps are newer than pyproject.toml once its requirements are installed; a second run installs nothing.
$(BASE): pyproject.toml | $(BIN)/python
	@echo "installing fp8_compile and torch into $(VENV): a minute or more"
	$(PIP) --editable .
	@touch $@

$(TEST): pyproject.toml $(BASE)
	@echo "installing what the tests need into $(VENV)"
	$(PIP) --editable '.[test,bench]'
	@touch $@

# mypy reads the types of torch and of what the tests install, so these come first.
$(LINT): pyproject.toml $(TEST)
	@echo "installing ruff and mypy into $(VENV)"
	$(PIP) $(WITH_TORCH) --editable '.[lint]'
	@touch $@
