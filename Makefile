# Everything runs in .venv, which tools/setup_env.py makes. DEVICE=cpu|cuda|npu|virtual-npu picks a device; without it the set-up
# keeps the last one (cpu at first), the demo runs on cpu and the tests on every device found.
DEVICE ?=
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
# virtual-npu is torch_npu on a stand-in runtime: the same packages as npu.
SETUP_DEVICE = $(patsubst virtual-npu,npu,$(DEVICE))

.PHONY: help setup demo test lint docs clean

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*##/make \1\t/p' Makefile

setup:  ## Make or refresh .venv for DEVICE
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed: install one, or name it (make PYTHON=/path/to/python3.11)"; exit 1; }
	@$(PYTHON) tools/setup_env.py $(if $(DEVICE),--device $(SETUP_DEVICE))

demo: setup  ## Serve a small model with the real vLLM and show mixed long and short requests
	@$(BIN)/python -m vllm_plugin demo --device $(or $(DEVICE),cpu)

test: setup  ## Run the whole test suite
	@$(BIN)/python -m pytest $(if $(DEVICE),--device $(DEVICE)) --durations=10 $(PYTEST_ARGS)

lint: setup  ## Check style, types, the direction of imports and spelling
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/codespell

docs: setup  ## Write the generated pages and tables of docs/
	@$(BIN)/python tools/generate_docs.py

clean:  ## Remove .venv, caches and build outputs
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
