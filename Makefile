# `make` alone lists the targets. All of them create or reuse .venv in the checkout.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-triton test-compile test-slow test-gpu lint format clean-demo
PY := .venv/bin/python
BIN := .venv/bin
# The oldest Triton that the kernels are for, which their timings were taken with; the environment's own is torch's.
TRITON := 3.6.0
SHELL := /bin/bash
# Two processes, file by file: the distributed tests spend much of their time waiting for processes of their own.
JOBS ?= 2
# Most of the GPU tests' time is compilation: 10 processes on 16 cores took 51 s for tests/ops.
GPU_JOBS ?= 8
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n $(JOBS) --dist loadfile

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup:  ## create or update .venv (PYTHON=/path/to/python3.12 picks the interpreter)
	@bash tools/setup_env.sh

demo: setup  ## train a small model on real text, interrupt and resume it, export it, plot it (minutes)
	@$(PY) examples/demo.py $(ARGS)

test: setup lint  ## lint, type check and every test that needs neither a GPU nor many minutes
	@$(PYTEST) -m "not gpu and not slow" $(ARGS)
	$(if $(ARGS),,@$(MAKE) --no-print-directory test-triton test-compile)

test-triton: setup  ## the Triton kernels on the CPU, in Triton's interpreter
	@TRITON_INTERPRET=1 $(PYTEST) -m "triton and not slow" $(or $(ARGS),tests/ops tests/testing)

test-compile: setup .venv/triton-$(TRITON)  ## every kernel compiled for SM90 with the oldest Triton, without a GPU
	@PYTHONPATH=.venv/triton-$(TRITON) $(PYTEST) -k "not cuda and not hopper" $(or $(ARGS),$(wildcard tests/ops/*/test_compile.py))

.venv/triton-%: | setup
	@rm -rf $@.new
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $@.new triton==$* && mv $@.new $@

test-slow: setup  ## the tests that take minutes each: a ladder killed twice, coverage of its intervals
	@$(PYTEST) -m "slow and not gpu" $(ARGS)

test-gpu: setup  ## the tests that need a GPU
	@$(PY) -m pytest -n $(GPU_JOBS) -m gpu $(ARGS)

lint: setup  ## ruff, pyright, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports

format: setup  ## rewrite the sources in the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean-demo:  ## delete what `make demo` wrote
	@rm -rf demo
