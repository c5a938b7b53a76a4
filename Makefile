# Each target sets up what it needs: `make demo` in a fresh clone is enough.

PYTHON ?= python3
JOBS   ?= 2
SECONDS ?= 300
DEFAULT_TORCH := 2.13.0
TORCH  ?= $(DEFAULT_TORCH)
# An environment of its own for each release of torch that is asked for.
VENV   := .venv$(if $(filter $(DEFAULT_TORCH),$(TORCH)),,-$(TORCH))
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet install
BASE   := $(VENV)/.installed-base
TEST   := $(VENV)/.installed-test
LINT   := $(VENV)/.installed-lint
# torch first and by its exact version: from a range pip would take the newest release, with 3 GB of CUDA packages. Named
# again beside what is installed after it, so that nothing replaces it. So is its Triton: a CPU build of torch names none,
# and pip would take the newest of our range.
TRITON_2.13 := triton==3.7.*
TRITON_2.14 := triton==3.8.*
TRITON_2.15 := triton==3.9.*
TRITON      := $(if $(filter Linux,$(shell uname -s)),$(TRITON_$(basename $(TORCH))))
WITH_TORCH  := 'torch==$(TORCH)' $(if $(TRITON),'$(TRITON)')

.PHONY: help demo test fuzz bench lint clean
.DEFAULT_GOAL := help

help:            ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "With TORCH=2.15.0 each of them runs on that torch, in .venv-2.15.0; without it on $(DEFAULT_TORCH), in .venv."

demo: $(BASE)    ## train a small language model in FP8 next to full precision
	$(BIN)/python examples/quickstart.py

test: $(TEST)    ## run the tests (ARGS="-k name" to choose)
	$(BIN)/python -m pytest -n $(JOBS) --durations=20 $(ARGS)

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

clean:           ## remove the virtual environments and everything built or dumped
	rm -rf .venv .venv-* build dist *.egg-info fp8_dumps .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# The stamps are newer than pyproject.toml once its requirements are installed; a second run installs nothing.
$(BASE): pyproject.toml | $(BIN)/python
	@echo "installing fp8_compile and torch $(TORCH) into $(VENV): a minute or more"
	$(PIP) $(WITH_TORCH)
	$(PIP) $(WITH_TORCH) --editable .
	@touch $@

$(TEST): pyproject.toml $(BASE)
	@echo "installing what the tests need into $(VENV)"
	$(PIP) $(WITH_TORCH) --editable '.[test,bench]'
	@touch $@

# mypy reads the types of torch and of what the tests install, so these come first.
$(LINT): pyproject.toml $(TEST)
	@echo "installing ruff and mypy into $(VENV)"
	$(PIP) $(WITH_TORCH) --editable '.[lint]'
	@touch $@
