# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# The oldest transformers that is supported; the newest tested one is in constraints.txt.
OLDEST := 5.17.0
# Tests are many and small: one thread each, and as many workers as cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: help demo test test-slow test-oldest lint format bench clean

help:
	@echo "make demo         install, and extend the bundled model 8x: table and picture in demo-output/"
	@echo "make test         install, and run the test suite (minutes)"
	@echo "make test-slow    the tests that take longer"
	@echo "make test-oldest  the core tests on transformers $(OLDEST)"
	@echo "make lint         ruff and mypy --strict"
	@echo "make bench        speed and memory against named peers"

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
	$(PYTEST) -m "not slow and not gpu"

test-slow: .venv/.dev
	$(PYTEST) -m "slow and not gpu"

.venv-oldest/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet -c .venv-oldest/constraints.txt \
		transformers==$(OLDEST) -e ".[test]"
	@touch $@

test-oldest: .venv-oldest/.installed
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n auto --dist worksteal -m "not slow and not gpu" \
		tests/test_encodings.py tests/test_rotary.py tests/test_matrix.py tests/test_patching.py \
		tests/test_attention.py tests/test_families.py tests/test_transformers_checks.py \
		tests/test_loss.py tests/test_perplexity.py tests/test_checkpoint.py

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.runtime
	$(BIN)/python scripts/bench.py

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
