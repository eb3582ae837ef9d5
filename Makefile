# `make` prints what there is. `make testcases` and `make test` do all their own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Where Python is told to keep no bytecode, each process of pytest would compile all tests anew, for 4 s.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help testcases test test-pythons torch test-gpu torture emulate compile-all sanitize bench-cpu bench-e2e bench-scaling bench-arrays bench-backward bench-halves bench-science bench-second bench-packed bench-pairs bench-training bench-gpt2 bench-models bench-grid lint clean

help:
	@echo "make testcases      run all test cases and check every output (on the GPU if there is one)"
	@echo "make test           run all tests that can be run here"
	@echo "make test-pythons   run all tests by each Python from 3.11 to 3.14 that is here"
	@echo "make torch          install PyTorch's build for the CPU: its tests run in make test then"
	@echo "make test-gpu       run the tests that need a GPU"
	@echo "make lint           check the style of the code, its types, and which module imports which"
	@echo "make torture        hurt runs and judgings at random; call every function with random arrays and odd arguments"
	@echo "make emulate        run every kernel on the CPU, emulated, on all that make sanitize has (ten minutes)"
	@echo "make compile-all    compile every kernel for every GPU that it claims, and write what each takes (needs nvcc)"
	@echo "make sanitize       run every kernel under compute-sanitizer (needs a GPU)"
	@echo "make bench-cpu      time the CPU backend beside PyTorch's CPU attention"
	@echo "make bench-e2e      time whole commands beside the homework's program in C++ (needs a GPU and nvcc)"
	@echo "make bench-scaling  time runs on one GPU and on several (needs several GPUs)"
	@echo "make bench-arrays   time attention on PyTorch's tensors, where they lie (needs a GPU and PyTorch, as do these:)"
	@echo "make bench-backward  time the gradients of attention"
	@echo "make bench-halves   time attention of halves and its gradients, right to fp32, beside PyTorch's of halves"
	@echo "make bench-science  time triangle attention, with a bias and a mask, and its gradients"
	@echo "make bench-packed   time packed sequences and a window, and their gradients"
	@echo "make bench-second   time gradients of gradients, beside PyTorch's operations"
	@echo "make bench-pairs    train a small model with a pair bias in fp32"
	@echo "make bench-training  train a small GPT in fp32, and draw its losses"
	@echo "make bench-gpt2     generate text with GPT-2 in fp32, by each attention, and time a case study's steps"
	@echo "make bench-models   compare models of transformers with our attention with their own"
	@echo "make bench-grid     time each kernel beside every fp32 peer on a grid of shapes, and draw that"
	@echo "make clean          remove everything that make made"

# One virtual environment for all targets. PyCUDA is built from source, so only where a toolkit and a driver are; with
# a driver alone, files are computed without PyCUDA. Kernels of usual shapes are compiled in the background then.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flashcli needs Python 3.11 or newer: PYTHON=python3.11 make ...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@if ! nvidia-smi >/dev/null 2>&1; then \
		echo "No driver here: installing for the CPU backend only ('make clean' to choose again)."; \
	else \
		set -f; export PATH="$$PATH:$$CUDA_HOME/bin:/usr/local/cuda/bin"; \
		if command -v nvcc >/dev/null; then \
			echo "CUDA toolkit and driver found: installing PyCUDA (this takes a minute or two)."; wanted='--editable .[cuda]'; \
		else \
			echo "A driver without a CUDA toolkit: installing NVIDIA's bindings, with the compiler as a library."; wanted='cuda-bindings[all]'; \
		fi; \
		$(BIN)/python -m pip install --quiet $$wanted || echo "That could not be installed: going on without ('make clean' to try again)."; \
		$(BIN)/flashcli warm --background || true; \
	fi
	@touch $@

testcases: $(READY)
	$(BIN)/flashcli judge testcases

test: $(READY)
	$(BIN)/python -m pytest --numprocesses=auto --dist=worksteal --quiet

test-pythons:
	@for version in 3.11 3.12 3.13 3.14; do \
		command -v python$$version >/dev/null || { echo "python$$version is not here."; continue; }; \
		$(MAKE) --no-print-directory test PYTHON=python$$version VENV=.venv-$$version || exit; \
	done

# Where PyTorch's builds for the CPU are; on Linux the package index has those with CUDA, which are gigabytes.
TORCH ?= 2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# "+cpu" is in no build with CUDA; the package index has what else it needs.
torch: $(READY)
	@$(BIN)/python -c "import torch" 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet --no-compile --retries 1 --timeout 15 --extra-index-url $(TORCH_INDEX) torch==$(TORCH)+cpu \
		|| { echo "PyTorch's build for the CPU is not to be had from $(TORCH_INDEX)."; \
			echo "Name another index (make torch TORCH_INDEX=URL), or take the build with CUDA: $(BIN)/python -m pip install torch"; \
			exit 69; } >&2

bench-cpu: torch
	$(BIN)/flashcli bench --backend cpu --threads 2 --against torch --shape 10,2048,64 --shape 1360,128,32 --shape 1,8192,32

bench-e2e: $(READY)
	$(MAKE) -C testcases/hw4
	$(BIN)/python -m bench.end_to_end --json cuda/records/end-to-end.json

bench-scaling: $(READY)
	$(BIN)/python -m bench.scaling --json cuda/records/scaling.json

bench-arrays bench-backward bench-halves bench-science bench-second bench-packed bench-pairs bench-models: bench-%: $(READY)
	$(BIN)/python -m bench.$* --json cuda/records/$*.json

bench-gpt2: $(READY)
	$(BIN)/python -m bench.gpt2.times --json cuda/records/gpt2.json --plot cuda/records/gpt2.png
	$(BIN)/python -m bench.gpt2.times --batch 8 --tokens 256 --json cuda/records/gpt2-batch.json
	$(BIN)/python -m bench.gpt2.steps --json cuda/records/gpt2-steps.json

bench-training: $(READY)
	$(BIN)/python -m bench.training --json cuda/records/training.json --plot cuda/records/training.png

bench-grid: $(READY)
	$(BIN)/python -m bench.grid --json cuda/records/grid.json
	$(BIN)/python -m bench.fit cuda/records/grid.json
	$(BIN)/python -m bench.grid_plot cuda/records/grid.json cuda/records/grid.png

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu --numprocesses=auto --dist=worksteal --quiet

torture: $(READY)
	for what in torture torture_judge torture_arrays torture_files; do \
		PYTHONPATH=$(CURDIR)/tests $(BIN)/python -W ignore::RuntimeWarning tests/$$what.py || exit; \
	done

emulate: $(READY)
	EMULATE_ALL=1 $(BIN)/python -m pytest --numprocesses=auto --dist=worksteal --quiet tests/emulator

# GPUs before Turing need CUDA 12's NVRTC in the environment: pip install cuda-bindings==12.9.* nvidia-cuda-nvrtc-cu12
compile-all: $(READY)
	$(BIN)/python -m bench.compile_all --json cuda/records/compiled.json

sanitize: $(READY)
	tests/sanitize.sh $(BIN)/python

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	find bench cuda testcases/hw4 flashcli/emulator tests/emulator -name '*.c' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy

clean:
	rm -f testcases/hw4/hw4
	rm -rf $(VENV) .venv-3.1? build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis testcases/large
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
