# flwr-decentral: everything runs from the repository's own .venv, which `make install` builds.

SHELL := /bin/sh
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := strategies/kernels
STRATEGIES := $(filter-out $(KERNELS),$(patsubst %/pyproject.toml,%,$(wildcard strategies/*/pyproject.toml)))
# Everything that stands in the virtual environment.
READY := $(STAMP) $(VENV)/.kernels
BENCHES := $(wildcard tests/bench/bench_*.py strategies/*/bench/bench_*.py)
# More arguments for pytest, for example: make test ARGS="-x -k layout"
ARGS ?=
# How many calls of the compiled kernels `make harden` makes in each way.
CALLS ?= 200000

# One thread per process: what is timed and what is compared must not depend on the machine's cores.
export OMP_NUM_THREADS := 1
# Flower and Ray stay on this machine, and install nothing while a run goes on.
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help install demo test test-unit test-slow test-flower lint bench harden clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-20s%s\n", $$1, $$2 }'

install: $(READY) ## build .venv with the plugin, the algorithms and all tools (about 4 minutes, once)
	@:

$(STAMP): pyproject.toml Makefile $(STRATEGIES:%=%/pyproject.toml)
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "$(PYTHON) not found: install Python 3.11 or newer, or name one with PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed, but $(PYTHON) is" \
	    "$$("$(PYTHON)" -V 2>/dev/null || echo unusable): name another one with PYTHON=..." >&2; exit 1; }
	@echo "installing into $(VENV): about 4 minutes the first time"
	@"$(PYTHON)" -m venv "$(VENV)"
	@"$(BIN)/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(VENV) holds an older Python: remove it and run make install again" >&2; exit 1; }
	@"$(BIN)/python" -m pip install -qq --disable-pip-version-check hatchling editables
	@# The wheels share that one build backend, instead of installing it once for each.
	@"$(BIN)/python" -m pip install -qq --disable-pip-version-check --no-build-isolation \
	  -e '.[simulation,dev]' $(STRATEGIES:%=-e %) torch torchvision flwr-datasets scikit-learn
	@touch $@

# Compiled, where there is a compiler; `flwr-decentral doctor` says whether. CMake comes by itself.
$(VENV)/.kernels: $(STAMP) $(shell find $(KERNELS)/src -type f) $(KERNELS)/CMakeLists.txt $(KERNELS)/pyproject.toml
	@# What was compiled before must not stand in for what no longer compiles.
	@rm -f $(KERNELS)/*/*.so $(KERNELS)/*/*.fatbin
	@"$(BIN)/python" -m pip install -qq --disable-pip-version-check --no-deps -e $(KERNELS)
	@set -- $(KERNELS)/*/*.so; test -e "$$1" || for name in $${CXX-c++ g++ clang++}; do \
	  if command -v "$$name" >/dev/null; then \
	    echo "$$name is there, but the kernels did not compile. What it says is shown by" \
	      "$(BIN)/python -m pip install -v --no-deps -e $(KERNELS);" \
	      "make install CXX= does without them" >&2; exit 1; \
	  fi; done
	@touch $@

demo: $(READY) ## run the digits app with several algorithms and compare them
	@"$(BIN)/python" tools/demo.py

test: test-unit test-slow test-flower ## run all tests: quick ones, slow ones, Flower's engine's

test-unit: $(READY) ## run the quick tests, which need no engine: the same as plain `pytest`, on all cores
	@"$(BIN)/python" -m pytest -q -n auto --dist worksteal $(ARGS)

test-slow: $(READY) ## run the slow tests that need no engine, on all cores
	@"$(BIN)/python" -m pytest -q -n auto --dist worksteal -m "slow and not flower" $(ARGS)

# Flower keeps its settings, logs and database in FLWR_HOME: the user's own are left alone.
test-flower: export FLWR_HOME := $(CURDIR)/.cache/flwr
test-flower: $(READY) ## run the tests on Flower's Simulation Engine and on deployments
	@"$(BIN)/python" -m pytest -q -m flower tests $(ARGS)

lint: $(READY) ## check format, style, types and floors
	@rc=0; \
	"$(BIN)/ruff" format --check --quiet . || { rc=1; echo "to repair: $(BIN)/ruff format ." >&2; }; \
	"$(BIN)/ruff" check --quiet . || rc=1; \
	"$(BIN)/mypy" || rc=1; \
	"$(BIN)/lint-imports" --no-logo --cache-dir .cache/import-linter || rc=1; \
	exit $$rc

bench: $(READY) ## measure: every tests/bench/bench_*.py, and the large replications
	@"$(BIN)/python" -m pytest -q -m bench
	@for script in $(BENCHES); do \
	  echo "== $$script"; "$(BIN)/python" "$$script" || exit 1; done

harden: $(READY) ## test the compiled kernels under sanitizers (needs CMake 3.21 and g++)
	@$(KERNELS)/tests/harden.sh "$(CURDIR)/$(BIN)/python" $(CALLS)

clean: ## remove caches and builds; .venv and results stay
	@rm -rf .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache \
	  build dist strategies/*/build strategies/*/dist
	@rm -f $(VENV)/.kernels $(KERNELS)/*/*.so $(KERNELS)/*/*.fatbin
	@find flwr_decentral strategies tests apps tools -name __pycache__ -prune -exec rm -rf {} + \
	  2>/dev/null || true
