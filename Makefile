# Needs Python 3.11+ and make, nothing else. Every target installs what it needs into .venv first,
# and installs again only when pyproject.toml or constraints.txt changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_DIR ?= build/demo
BENCH_DIR ?= bench/results
BENCH_ARGS ?=
TEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench docs clean

help: ## show this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "longspan needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	@echo "installing into $(VENV): a minute or two"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(INSTALLED) ## time and memory against length, as a table and a figure: a minute on a CPU
	$(BIN)/longspan bench attention --quick --output $(DEMO_DIR)

test: lint ## lint, then every test
	$(BIN)/python -m pytest -n 2 --durations 10 $(TEST_ARGS)

lint: $(INSTALLED) ## ruff (rules and format) and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(INSTALLED) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## all benchmarks on the best device here; resumes when interrupted
	$(BIN)/longspan bench attention --output $(BENCH_DIR) $(BENCH_ARGS)
	$(BIN)/longspan bench models --output $(BENCH_DIR) $(BENCH_ARGS)

docs: $(INSTALLED) ## run every Python snippet of the documentation and check its links
	$(BIN)/python -m pytest tests/test_docs.py -v

clean: ## remove the environment, caches and what the demo wrote
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +
