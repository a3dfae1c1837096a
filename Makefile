# Everything sets itself up: `make demo` and `make test` need only Python 3.11 to 3.13 and a C library.
#
#   make demo            train a GPT on real text on two processes, from nothing
#   make test            the whole test suite
#   make fast            the test suite without the slow tests
#   make lint            ruff and pyright
#   make bench-peers     an environment of its own with the systems Thalweg is measured against
#
# VENV=DIR puts the environment elsewhere; ARGS="..." is passed on (`make demo ARGS="--steps 20"`);
# TORCH=2.11.0 picks another torch; PYTHON=python3.12 another Python; WORKERS=1 runs tests one by one.

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo "$$p" && break; done)
TORCH ?= 2.13.0
ARGS ?=
WORKERS ?= 2

PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install -qq
TORCH_STAMP = $(VENV)/.torch-$(TORCH)
DEMO_STAMP = $(VENV)/.installed-demo
TEST_STAMP = $(VENV)/.installed-test
SOURCES = pyproject.toml requirements/constraints.txt

.PHONY: demo test fast lint format clean
.DELETE_ON_ERROR:

demo: $(DEMO_STAMP)
	$(VENV)/bin/thalweg demo $(ARGS)

# Two workers, as most tests wait for ranks or processes; a file stays with one of them, and what runs long comes
# first.  Tests that measure time have the machine alone.
SHARED = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(TEST_STAMP)
	$(VENV)/bin/python -m pytest $(SHARED) $(ARGS)

fast: $(TEST_STAMP)
	$(VENV)/bin/python -m pytest $(SHARED) -m "not slow" $(ARGS)

lint: $(TEST_STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: $(TEST_STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# torch comes first and alone: a range such as Thalweg's own, with no torch there yet, would fetch the newest
# build with several gigabytes of CUDA libraries, where the pinned version may be had as a CPU wheel.
$(TORCH_STAMP):
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; none is on PATH (or set PYTHON=...)" >&2; exit 1; }
	@echo "making $(VENV) with torch $(TORCH) (once; some minutes)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==$(TORCH)
	@touch $@

$(DEMO_STAMP): $(TORCH_STAMP) $(SOURCES)
	@echo "installing thalweg into $(VENV)"
	@$(PIP) -c requirements/constraints.txt -e '.[demo]'
	@touch $@

$(TEST_STAMP): $(TORCH_STAMP) $(SOURCES)
	@echo "installing thalweg with what its tests need into $(VENV)"
	@$(PIP) -c requirements/constraints.txt -e '.[demo,diffusion,hf,plots,monitor,serve,test]'
	@touch $@ $(DEMO_STAMP)

PEERS_PYTHON = $(PYTHON)
include bench/peers.mk

clean: clean-peers
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
