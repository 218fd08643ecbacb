# Targets work on a fresh machine: each makes its own virtual environment when that is missing or out of date.
#
#   make demo                    train a GPT on two ranks, without and with gtp, and compare
#   make test                    the whole suite; TEST=path and ARGS='-k name' narrow it
#   make test TORCH=2.14.1       the same in a second environment with that torch (TORCH=latest: the newest)
#   make test MEGATRON=0.19.0    and with that megatron-core
#   make install                 the environment alone: .venv, about 5 GB
#   make lint format typecheck bench clean
#
# PYTHON=/path/to/python3.12 chooses the interpreter; otherwise tools/find_python.sh does.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

EXTRAS := dev,megatron,hf,demo
TEST ?= tests
ARGS ?=
BENCH ?= benchmarks/host_overhead.py
RANKS ?= 2

# other versions live in an environment of their own
VENV := .venv$(TORCH:%=-torch-%)$(MEGATRON:%=-megatron-%)
# pins that do not hold there: of torch, of what each torch release pins itself, of megatron-core (none is called "-")
UNPINNED := ^($(if $(TORCH),torch|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+|setuptools|)$(if $(MEGATRON),megatron-core|)-)==
REQUIREMENTS := torch$(if $(filter-out latest,$(TORCH)),==$(TORCH)) megatron-core$(MEGATRON:%===%)

RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: help install demo test lint format typecheck bench clean

help:
	@sed -n '3,10s/^# \{0,1\}//p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(RUN) || { python="$$(PYTHON='$(PYTHON)' tools/find_python.sh)" && "$$python" -m venv $(VENV); }
	@grep -vE '$(UNPINNED)' constraints.txt > $(VENV)/constraints.txt
	$(RUN) -m pip install --quiet -c $(VENV)/constraints.txt $(REQUIREMENTS) -e '.[$(EXTRAS)]'
	@touch $@

# one thread per rank: two ranks on two cores would otherwise fight for them
demo: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/pretrain_gpt.py $(ARGS)

test: $(STAMP)
	$(RUN) -m pytest $(TEST) $(ARGS)

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(STAMP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

typecheck: $(STAMP)
	$(RUN) -m mypy

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) $(BENCH) $(ARGS)

clean:
	rm -rf .venv .venv-* *.egg-info build dist out demo_output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
