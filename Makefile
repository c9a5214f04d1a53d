# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# The oldest transformers that is supported; the newest tested one is in constraints.txt.
OLDEST := 5.17.0
# Every process of the tests would compile the package and the tests again.
export PYTHONDONTWRITEBYTECODE :=
# For `make gpu`: any Python with this package, pytest and hypothesis.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
# Tests are many and small: one thread each, and as many workers as cores. A worker takes whole files.
PYTEST := -m pytest -n auto --dist loadfile
# Tests that compare float32 results of two orders of summation. Tests of attention that count pairs, look at masks or
# place tensors on devices give the same on every CPU.
NUMERICAL := $(filter-out tests/attention/test_remap_work.py tests/attention/test_masks.py \
	tests/attention/test_attention_on_a_gpu.py, $(wildcard tests/attention/test_*.py)) \
	tests/training/test_memory_options.py tests/training/test_loss.py \
	tests/data/test_packing.py tests/checkpoint/test_merge.py tests/checkpoint/test_golden.py
# Tests of what rope_extend uses of transformers: rotary modules, attention functions, masks and caches of every family,
# configs, loading and saving; and what runs on them: plans, memory options, evaluation, fine-tuning and benchmarks.
# Formulas and maps of methods, and where tensors lie, do not depend on its version.
CORE := tests/encodings/test_encodings.py tests/encodings/test_critical.py \
	tests/attention/test_attention.py tests/models/test_rotary.py tests/models/test_families.py \
	tests/patching/test_matrix.py tests/patching/test_patching.py tests/patching/test_transformers_checks.py \
	tests/training/test_loss.py tests/evaluation/test_perplexity.py tests/checkpoint/test_checkpoint.py \
	tests/attention/test_modes.py tests/attention/test_every_method.py \
	tests/evaluation/test_evaluation_on_a_gpu.py \
	tests/training/test_metrics.py \
	tests/models/test_gguf_models.py \
	tests/attention/test_causal_suffix.py tests/evaluation/test_forward_plan.py \
	tests/evaluation/test_chunked_forward.py tests/training/test_step_plan.py \
	tests/training/test_memory_options.py tests/training/test_finetune.py tests/front/test_bench.py

.PHONY: help demo docs test test-slow test-other-cpu test-oldest test-all lint format bench gpu coder clean

help:
	@echo "make demo            install, and extend the bundled model 8x: table and picture in demo-output/"
	@echo "make test            install, and run the test suite (minutes)"
	@echo "make test-slow       the tests that take longer"
	@echo "make test-other-cpu  numerical tests with other kernels and two threads"
	@echo "make test-oldest     the core tests on transformers $(OLDEST)"
	@echo "make test-all        every test, with many random examples (hours; not in CI)"
	@echo "make lint            ruff and mypy --strict"
	@echo "make bench           speed and memory against named peers"
	@echo "make docs            the documentation as a site, in build/site/"
	@echo "make gpu             tests and benchmarks on a CUDA device"
	@echo "make coder           perplexity and retrieval of Qwen2.5-Coder 1.5B up to 128k, on a CUDA device"

.venv/.runtime: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

.venv/.dev: .venv/.runtime
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test,lint]"
	@touch $@

demo: .venv/.runtime
	$(BIN)/rope-extend demo --output demo-output

test: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m "not slow and not gpu"

test-slow: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m "slow and not gpu"

# Threads that wait without sleeping would take the cores from the other workers: four times the CPU time.
test-other-cpu: .venv/.dev
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(BIN)/python $(PYTEST) \
		-m "not slow and not gpu" $(NUMERICAL)

test-all: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) --full -m "not gpu"

# Most modules of the libraries are never imported: those that are get compiled then.
.venv-oldest/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --no-compile -c .venv-oldest/constraints.txt \
		transformers==$(OLDEST) -e ".[test]"
	@touch $@

test-oldest: .venv-oldest/.installed
	OMP_NUM_THREADS=1 .venv-oldest/bin/python $(PYTEST) -m "not slow and not gpu" $(CORE)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Nothing is installed: a machine with a GPU may have no network, nor the libraries that tests/front imports. NAMES
# chooses benchmarks; rows are kept.
gpu:
	$(GPU_PYTHON) -m pytest -q -m gpu --ignore tests/front -p no:cacheprovider
	$(GPU_PYTHON) benchmarks/run_benchmarks.py --device cuda --output benchmarks/gpu.jsonl $(NAMES)

# The measurements of a model that people use. Each command stops in time, and continues when it is called again.
# MODEL is made by tools/packaged_models.py, and CORPUS by tools/code_corpus.py.
MODEL ?= models/Qwen2.5-Coder-1.5B-Instruct
CORPUS ?= corpus
coder:
	$(GPU_PYTHON) -m rope_extend report configs/results/coder.yaml --model $(MODEL) --data $(CORPUS)/validation \
		--output docs/results/coder --resume --budget 5min
	$(GPU_PYTHON) -m rope_extend retrieve configs/results/coder_tasks.yaml --model $(MODEL) --data $(CORPUS)/validation \
		--output docs/results/coder_tasks --resume --budget 4min

.venv/.docs: .venv/.runtime
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	@touch $@

# Strict: a broken link or a missing page is an error. Nothing is loaded from the network.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: .venv/.runtime
	$(BIN)/python benchmarks/run_benchmarks.py

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
