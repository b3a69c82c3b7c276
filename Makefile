# Every target makes what it needs: a fresh machine wants Python 3.11+ and make, nothing else.
PYTHON ?= python3
RUN := .venv/bin/python

# Whole models beside transformers, which take a minute or two: apart from the rest.
MODELS := tests/engine/test_fallback.py tests/engine/test_published.py tests/engine/test_resume_families.py \
	tests/e2e/test_resume_models.py tests/benchmarks/test_load_memory.py

.PHONY: setup demo test models gates chaos bench gpu-check lint format build clean

setup:
	@$(PYTHON) scripts/setup_env.py

demo: setup
	@.venv/bin/headrace demo

# The short run of the chaos suite comes by itself: how soon things happen is part of what it shows. Budgets are for two
# slow cores, of which some take twice as long as others.
test: setup
	@$(RUN) -m pytest -q -n 3 --dist worksteal $(addprefix --ignore ,tests/chaos tests/gates tests/gpu $(GPU_CHECK)) $(addprefix --ignore ,$(MODELS)) --budget-s 900
	@$(RUN) -m pytest -q tests/chaos --budget-s 400

models: setup
	@$(RUN) -m pytest -q -n 2 --dist worksteal $(MODELS) --budget-s 600

# The Triton kernels without a GPU: run by Triton's interpreter and held against float64, then compiled for GPUs that are
# not there (spills, registers, shared memory, instructions, number of binaries). CORE=1 is a part of it that takes two
# minutes; ALL=1 compiles every type of cache for every model. What is unchanged comes from a cache in build/.
CORE_GPU := $(addprefix tests/gpu/test_,decode.py prefill.py rotary.py row_operations.py cuts.py logprobs.py \
	engine.py::test_a_mixed_batch)
GPU_CHECK := tests/benchmarks/test_gpu_check.py
gates: setup
	@rm -rf build/kernel-errors
	@KERNEL_ERRORS=build/kernel-errors $(RUN) -m pytest -q -n 2 --dist worksteal $(if $(CORE),$(CORE_GPU),tests/gpu) --budget-s 600
	@$(RUN) -m pytest -q tests/gates --budget-s 120
	@$(RUN) -m tests.gates $(if $(CORE),--core) $(if $(ALL),--all)
	@$(if $(CORE),true,$(RUN) -m pytest -q $(GPU_CHECK) --budget-s 400)

# Everything that can go wrong, for half an hour: kills, freezes, lost replies, restarts, failovers, on Redis 7 and 8 and
# Valkey, alone, as a Cluster and behind sentinels. SEED=N repeats a run, SERVER=redis8 runs it on one kind.
chaos: setup
	@$(RUN) -m pytest -q -s -n 2 --dist worksteal tests/chaos --chaos-size full \
		$(if $(SEED),--chaos-seed $(SEED)) $(if $(SERVER),--chaos-server $(SERVER))

# Everything that is measured; ONLY="w1 streams" is some of it, QUICK=1 only shows that it works.
bench: setup
	@$(RUN) -m benchmarks $(if $(ONLY),--only "$(ONLY)") $(if $(QUICK),--quick)

# On a machine with a GPU: are the kernels, the runner and an engine right there, and how fast; under 8 minutes. Nothing is
# installed: any Python will do whose torch has CUDA, PYTHON or the set-up's. DRY=1 runs all of it without a GPU.
gpu-check:
	@for python in $(PYTHON) $(RUN); do \
		if $$python -c "import torch, triton; assert $(if $(DRY),1,torch.cuda.is_available())" 2>/dev/null; then \
			exec $$python -m benchmarks.gpu_check $(if $(DRY),--dry-run); \
		fi; \
	done; echo "Neither $(PYTHON) nor $(RUN) has a torch that can use an NVIDIA GPU here; make gpu-check DRY=1 needs none." >&2; exit 2

lint: setup
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@.venv/bin/pyright

format: setup
	@$(RUN) -m ruff format .
	@$(RUN) -m ruff check --fix .

build: setup
	@$(RUN) -m build --wheel

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
