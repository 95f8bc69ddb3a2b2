SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
ORACLE := .venv-oracle
TRAINED := results/pocket/model
KERNELS := $(wildcard models/native/csrc/*.* models/native/csrc/*/*.*)
PROTOS := rpc/inference.proto rpc/link.proto
# A step allocates the same memory again and again: without a heap that keeps it, a tenth of the tokens per second is lost.
KEEP_MEMORY := GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=100000000000
LOCKED := --universal --python-version 3.12 --no-header --no-emit-index-url --no-emit-find-links --generate-hashes
# By default tests marked `unoptimised` let XLA optimise nothing (tests/conftest.py).
OPTIMISED := XLA_FLAGS="$${XLA_FLAGS:-} --xla_backend_optimization_level=3"
PYTEST := $(BIN)/python -m pytest -p tests.phases --slowest 50

# Candidates are run, not only looked up: a version manager's shim exists, and fails, for every version that is not selected.
find_python = for p in python3.12 python3.13 python3.14 python3 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do \
	if "$$p" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then echo "$$p"; exit 0; fi; done; \
	echo "moonshard needs Python 3.12 or newer with venv" >&2; exit 1
find_oracle_python = for p in python3.11 python3 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.11*/bin/python3; do \
	if "$$p" -c 'import sys, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; then echo "$$p"; exit 0; fi; done; \
	echo "make oracle needs Python 3.11 with venv" >&2; exit 1

.PHONY: help setup ray demo serve test test-slow clients check format proto bench bench-gpu notebooks pocket pocket-draft oracle lock
help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# Bytecode is made here, since where PYTHONDONTWRITEBYTECODE is set nothing else makes it: each process of a deployment
# would then compile jax from its sources, which takes longer than the rest of its start.
$(BIN)/uv: locks/bootstrap.txt
	@py=$$($(find_python)); "$$py" -m venv --clear .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r locks/bootstrap.txt
	@touch $@
.venv/.ready: $(BIN)/uv pyproject.toml setup.py locks/requirements.txt Makefile $(KERNELS)
	@$(BIN)/uv pip sync -q --compile-bytecode --require-hashes --python $(BIN)/python locks/requirements.txt locks/bootstrap.txt
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@[ -e models/native/kernels.so ] || echo "The kernels for CPUs were not built: see setup.py, which needs a C++ compiler on x86-64" >&2
	@$(BIN)/python -m compileall -q src/moonshard/*/
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends libibverbs1 >/dev/null; } \
	|| echo "Mooncake needs libibverbs1: run 'sudo apt-get install libibverbs1'" >&2
	@touch $@

setup: .venv/.ready  ## make .venv with everything, leaving .venv/bin/moonshard

ray: .venv/.ray  ## add Ray to .venv, for serve --launcher ray and its tests
.venv/.ray: .venv/.ready locks/ray.txt
	@$(BIN)/uv pip install -q --compile-bytecode --require-hashes --python $(BIN)/python -r locks/ray.txt
	@touch $@

demo: setup  ## serve the embedded model, ask three questions, show where the time went
	@$(BIN)/moonshard demo

serve: setup  ## serve the embedded model, left running
	@$(BIN)/moonshard serve

test: setup  ## every test that is not slow
	@$(PYTEST) -m "not slow and not alone and not clients"

test-slow: setup ray  ## the long tests and those that compile most, optimised; then those that measure times, by themselves
	@$(OPTIMISED) $(PYTEST) -m "(slow or unoptimised) and not alone and not clients"
	@$(OPTIMISED) $(PYTEST) -m alone -n 0

clients: setup  ## other people's clients against a real server; LARGE=1: also those that take several GB
	@$(PYTEST) tests/clients -m clients -n 0 $(if $(LARGE),--large)

check: setup  ## lint, types, import directions, generated code
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/pyright
	@$(BIN)/python tests/check_generated.py

format: setup
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

proto: setup  ## regenerate the gRPC code from rpc/*.proto
	@$(BIN)/python -m grpc_tools.protoc -Imoonshard/rpc=rpc --python_out=src --pyi_out=src --grpc_python_out=src $(PROTOS:rpc/%=moonshard/rpc/%)

bench: setup  ## latency and throughput table, JSON in results/bench; PEERS="NAME=URL ...": other servers beside us
	@$(BIN)/moonshard bench $(foreach peer,$(PEERS),--peer $(peer))

bench-gpu:  ## on a machine with an NVIDIA GPU and jax and numpy: check, then measure
	@PYTHONPATH=src $${PYTHON:-python3} -m moonshard.experiments.bench.gpu.command

notebooks: setup  ## each study that has a run under results/: its notebook executed, with its pictures beside it
	@$(BIN)/python -m moonshard.experiments.reading.notebooks

# The second recipe goes on from the embedded weights, so the first one's are put in place before it, and mixed with its.
pocket: setup  ## train the embedded model anew, hours on two cores, and put it in its place; a run that was stopped goes on
	@for recipe in cpu clients; do \
	  $(KEEP_MEMORY) $(BIN)/python -m moonshard.experiments.training.run.train --recipe $$recipe --out results/pocket/$$recipe && \
	  $(BIN)/python -m moonshard.experiments.training.export --run results/pocket/$$recipe --out $(TRAINED) && \
	  $(BIN)/python -m moonshard.experiments.training.run.balance --model $(TRAINED) && \
	  { [ $$recipe = cpu ] || $(BIN)/python -m moonshard.experiments.training.texts.mix $(TRAINED); } && \
	  mv $(TRAINED)/*.json $(TRAINED)/model.safetensors models/pocket/ || exit; \
	done

pocket-draft: setup  ## train the embedded model's draft anew and put it beside the model; a run that was stopped goes on
	@$(KEEP_MEMORY) $(BIN)/python -m moonshard.experiments.training.draft.learn --run results/pocket-draft
	@$(BIN)/python -m moonshard.experiments.training.draft.acceptance

oracle: setup $(ORACLE)/.ready  ## Hugging Face transformers in a venv of its own, and the tests that compare with it
	@$(PYTEST) -m oracle
$(ORACLE)/.ready: Makefile
	@py=$$($(find_oracle_python)); "$$py" -m venv $(ORACLE)
	@$(ORACLE)/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 safetensors tiktoken numpy \
		compressed-tensors==0.20.0 accelerate  # what transformers reads INT4 and FP8 with
	@touch $@

# Versions that are locked already stay where they still fit; neither file says which registry was asked.
lock: $(BIN)/uv  ## resolve pyproject.toml into locks/requirements.txt and locks/ray.txt, with the hashes of what may be installed
	@$(BIN)/uv pip compile -q $(LOCKED) --group dev pyproject.toml -o locks/requirements.txt
	@sed -n 's/^ray = \["\(.*\)"\]$$/\1/p' pyproject.toml \
	| $(BIN)/uv pip compile -q $(LOCKED) --no-annotate -c locks/requirements.txt - -o locks/ray.txt
	@sed -n 's/^\(uv==[^ ]*\).*/\1/p' locks/bootstrap.txt | $(BIN)/uv pip compile -q $(LOCKED) --no-annotate - -o locks/bootstrap.txt
