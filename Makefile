# Everything sets itself up: `make demo` and `make test` need only Python 3.11 to 3.14 and a C library.
#
#   make demo            train a GPT on real text on two processes, from nothing
#   make test            the tests of the gate: what must pass before a change lands
#   make gate            the same and lint, some of it at a time: what .ci/run runs
#   make nightly         every test: longer runs, full tables, large worlds, new random cases; then `make compat`; then
#                        the gate's tests on the other Pythons on PATH and with the other torches that install; then
#                        `make sim`
#   make sim             the distributed tests once more, on a simulated accelerator
#   make compat          Lightning and TRL on Thalweg, in an environment of their own
#   make fast            the tests of the gate without the slow ones
#   make durations       tests/durations.json from a run of the gate's tests
#   make lint            ruff and pyright
#   make gpu             twenty checks of a machine with a GPU, in about ten minutes, with the Python that has its torch
#   make bench-peers     an environment of its own with the systems Thalweg is measured against
#
# VENV=DIR puts the environment elsewhere; ARGS="..." is passed on (`make demo ARGS="--steps 20"`);
# TORCH=2.11.0 picks another torch; PYTHON=python3.12 another Python; WORKERS=1 runs tests one by one.

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && echo "$$p" && break; done)
TORCH ?= 2.13.0
ARGS ?=
WORKERS ?= 2
THREADS ?= 2

# Modules are compiled where they are imported, once (see PYTHONPYCACHEPREFIX): most of what is installed never is.
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-compile
# uv installs in six seconds what takes pip 45.  It reads no pip.conf: where it finds nothing, pip looks.
install = $(VENV)/bin/uv pip install -q --python $(VENV)/bin/python $(PINNED) $(WHAT) 2>/dev/null || $(PIP) $(PINNED) $(WHAT)
PINNED = -c requirements/constraints.txt
TORCH_STAMP = $(VENV)/.torch-$(TORCH)
DEMO_STAMP = $(VENV)/.installed-demo
TEST_STAMP = $(VENV)/.installed-test
SOURCES = pyproject.toml requirements/constraints.txt

.PHONY: demo test gate prepare nightly sim compat fast durations lint gpu format clean
.DELETE_ON_ERROR:

demo: $(DEMO_STAMP)
	$(VENV)/bin/thalweg demo $(ARGS)

# Every process of a run finds the bytecode that the first one wrote, outside the tree.  An environment may switch
# the writing off (containers do): each of the hundreds of processes of a run would then compile the package anew.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/pycache

# Three phases.  Tests that wait within limits of time for what others do come first: one core is enough for them, and
# `make gate` gives the other to lint.  Tests that measure time, or look at what all processes share, have the machine to
# themselves.  The others run on two workers, as most of them wait for ranks or processes; a file stays with one worker,
# and what runs long comes first.  pytest says 5 where a phase has no test: a selection may lie in one, but not in none.
# `make gate` prepares during the first phase what both workers would do or wait for at once in the last: bytecode of all
# tests and of what they and their ranks import, and the simulated device, which g++ compiles for half a minute.
PYTEST = $(VENV)/bin/python -m pytest
SHARED = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
GATE = and not nightly
waiting = $(PYTEST) -m "waits $(1)" $(2) $(ARGS); waits=$$?
define others
$(PYTEST) -m "alone $(1)" $(2) $(ARGS); alone=$$?; \
$(PYTEST) $(SHARED) -m "not alone and not waits $(1)" $(2) $(ARGS); shared=$$?; \
case $$waits,$$alone,$$shared in *[1-46-9]*|5,5,5) \
	echo "pytest ended with $$waits (waits), $$alone (alone) and $$shared (shared)" >&2; exit 1;; esac
endef

test: $(TEST_STAMP)
	@$(call waiting,$(GATE),--check-durations); $(call others,$(GATE),--check-durations)

gate: $(TEST_STAMP)
	@$(MAKE) --no-print-directory lint THREADS=1 >$(VENV)/lint.log 2>&1 & lint=$$!; \
	nice -n 19 $(MAKE) --no-print-directory prepare & prepare=$$!; \
	$(call waiting,$(GATE),--check-durations); \
	wait $$prepare; wait $$lint; lint=$$?; cat $(VENV)/lint.log; test $$lint = 0 || exit $$lint; \
	$(call others,$(GATE),--check-durations)

prepare: $(TEST_STAMP)
	@$(PYTEST) --collect-only -qq -m "not alone and not waits $(GATE)" -p no:cacheprovider >/dev/null; \
	$(VENV)/bin/python -c "from tests import preload, simdevice; simdevice.missing_tool() or simdevice.build()"

# Each other Python and torch has an environment of its own, which stays; one that does not install is left out, and said.
OTHER_PYTHONS ?= $(shell for p in python3.11 python3.12 python3.13 python3.14; do \
	$$p -c '' 2>/dev/null && test "$$($$p -V)" != "$$($(PYTHON) -V)" && echo $$p; done)
OTHER_TORCHES ?= 2.11.0 2.12.1 2.14.1 2.15.0

define in_another
	venv=$(VENV)-$(1); \
	if $(MAKE) --no-print-directory $$venv/.installed-test VENV=$$venv $(2); then \
		$(MAKE) --no-print-directory test VENV=$$venv $(2) || exit 1; \
	else echo "left out: $(1), for which there is no environment: see pip's message above" >&2; fi
endef

nightly: $(TEST_STAMP)
	@$(call waiting,); $(call others,)
	@$(MAKE) --no-print-directory compat
	@for python in $(OTHER_PYTHONS); do $(call in_another,$$python,PYTHON=$$python); done
	@for torch in $(OTHER_TORCHES); do $(call in_another,torch-$$torch,TORCH=$$torch); done
	@$(MAKE) --no-print-directory sim

# tests/dist/conftest.py says what is left out, and why.  test_device*.py take the simulated device by themselves, in the
# phases above too.
SIM = --device sim --ignore-glob='$(CURDIR)/tests/dist/test_device*.py' tests/dist

sim: $(TEST_STAMP)
	@$(call waiting,,$(SIM)); $(call others,,$(SIM))

compat:
	@$(MAKE) --no-print-directory compat-tests VENV=$(VENV)-compat

.PHONY: compat-tests
compat-tests: $(VENV)/.installed-compat
	$(PYTEST) tests/compat/test_lightning.py tests/compat/test_trl.py tests/dist/test_documentation.py \
		--required-tools=lightning,trl $(ARGS)

fast: $(TEST_STAMP)
	@$(call waiting,$(GATE) and not slow); $(call others,$(GATE) and not slow)

durations: $(TEST_STAMP)
	@$(call waiting,$(GATE),--save-durations); $(call others,$(GATE),--save-durations)

lint: $(TEST_STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --threads $(THREADS) --pythonpath $(VENV)/bin/python

gpu:
	$(PYTHON) bench/gpu/run.py $(ARGS)

format: $(TEST_STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# torch comes first and alone: a range such as Thalweg's own, with no torch there yet, would fetch the newest
# build with several gigabytes of CUDA libraries, where the pinned version may be had as a CPU wheel.
$(TORCH_STAMP):
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.14 is needed; none is on PATH (or set PYTHON=...)" >&2; exit 1; }
	@echo "making $(VENV) with torch $(TORCH) (once; some minutes)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==$(TORCH)
	@$(PIP) $(PINNED) uv 2>/dev/null || true
	@touch $@

$(DEMO_STAMP): WHAT = -e '.[demo]'
$(DEMO_STAMP): $(TORCH_STAMP) $(SOURCES)
	@echo "installing thalweg into $(VENV)"
	@$(install)
	@touch $@

$(TEST_STAMP): WHAT = -e '.[demo,diffusion,hf,plots,monitor,serve,study,test]'
$(TEST_STAMP): $(TORCH_STAMP) $(SOURCES)
	@echo "installing thalweg with what its tests need into $(VENV)"
	@$(install)
	@touch $@ $(DEMO_STAMP)

# Lightning and TRL are no extra: nothing in the package imports them but what their users call.
$(VENV)/.installed-compat: WHAT = -e '.[hf,test]' lightning trl==1.16.0
$(VENV)/.installed-compat: $(TORCH_STAMP) $(SOURCES)
	@echo "installing thalweg with Lightning and TRL into $(VENV)"
	@$(install)
	@touch $@

PEERS_PYTHON = $(PYTHON)
include bench/peers.mk

clean: clean-peers
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
