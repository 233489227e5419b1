# Everything runs in .venv, which tools/setup_env.py makes. DEVICE=cpu|cuda|npu|virtual-npu picks a device; without it the set-up
# keeps the last one (cpu at first), the demo runs on cpu and the tests on every device found.
DEVICE ?=
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$python && break; done)
# virtual-npu is torch_npu on a stand-in runtime: an environment of its own on top of the CPU's (tools/setup_env.py says why).
VIRTUAL := .venv-virtual-npu/bin
BIN = $(if $(filter virtual-npu,$(DEVICE)),$(VIRTUAL),.venv/bin)
SETUP_DEVICE = $(patsubst virtual-npu,cpu,$(DEVICE))
# What the virtual NPU adds to a run on the CPU: its own tests, those of the ops and what uses them, the contract checks, and the models end to end.
VIRTUAL_TESTS := tests/virtual_npu tests/npu_ops tests/mla_workspace tests/contract tests/vllm_plugin/test_moe_layer.py \
	tests/e2e/test_models.py tests/e2e/test_tensor_parallel.py tests/e2e/test_serve.py \
	tests/e2e/test_mla.py::test_tokens_equal_transformers tests/e2e/test_needle.py::test_the_sparse_needle_is_found \
	tests/e2e/test_sfa.py::test_tokens_equal_transformers tests/e2e/test_sfa.py::test_quantised_caches \
	tests/e2e/test_mla.py::test_a_prompt_of_full_length_fits_what_was_reserved \
	'tests/e2e/test_mla.py::test_sharded_caches_give_transformers_tokens[virtual-npu-2-2-16-a2a]' \
	--ignore tests/contract/test_static.py --ignore tests/contract/test_triton_ascend.py
# triton-ascend is for Python 3.11 on x86-64; elsewhere the tests of its compiler are skipped, and say so.
ASCEND = $(shell $(PYTHON) -c 'import platform, sys; print("require" if (sys.version_info[:2], platform.machine()) == ((3, 11), "x86_64") else "")')
# Two workers, a file at a time each: starting engines, which is most of the suite, keeps one core busy. They share the cores.
WORKERS ?= 2
PARALLEL = -n $(WORKERS) --dist loadfile
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0

.PHONY: help setup demo test lint docs mutate clean

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*##/make \1\t/p' Makefile

setup:  ## Make or refresh .venv for DEVICE
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed: install one, or name it (make PYTHON=/path/to/python3.11)"; exit 1; }
	@$(PYTHON) tools/setup_env.py $(if $(DEVICE),--device $(SETUP_DEVICE))

demo: setup  ## Serve a small model with the real vLLM and show mixed long and short requests
	@$(BIN)/python -m vllm_plugin demo --device $(or $(DEVICE),cpu)

test: export OMP_NUM_THREADS := $(or $(OMP_NUM_THREADS),$(shell nproc | awk '{print ($$1 > $(WORKERS)) ? int($$1 / $(WORKERS)) : 1}'))
test: setup  ## Run the whole test suite; without DEVICE on every device found, and on the virtual NPU
	@if test "$(ASCEND)" = require; then $(BIN)/python tools/triton_ascend_check.py --setup; fi
	@if test -z "$(DEVICE)" -a -x $(VIRTUAL)/python; then \
		$(VIRTUAL)/python -m pytest --device virtual-npu $(PARALLEL) $(VIRTUAL_TESTS) --durations=5 $(PYTEST_ARGS); fi
	@TRITON_ASCEND=$(ASCEND) $(BIN)/python -m pytest $(PARALLEL) $(if $(DEVICE),--device $(DEVICE)) --durations=10 $(PYTEST_ARGS)

lint: setup  ## Check style, types, the direction of imports and spelling
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/codespell

docs: setup  ## Write the generated pages and tables of docs/
	@$(BIN)/python tools/generate_docs.py

mutate: setup  ## Change each number of the planner's formulas: does a test notice?
	@$(BIN)/python tools/mutate_planner.py

clean:  ## Remove .venv, caches and build outputs
	@rm -rf .venv .venv-virtual-npu build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
