# Every target sets up what it needs, and is safe to run twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
DEMO_OUTPUT ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: setup demo test check bench format clean

setup: $(VENV)/installed

# Torch first. Without a GPU, its CPU build, where pip finds one (on Linux it may need PIP_EXTRA_INDEX_URL set to the
# CPU index that PyTorch's install page names); else the general build, which brings gigabytes of CUDA packages.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "the trainers need Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@echo "setting up $(VENV): a minute or two"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null \
		|| { ! command -v nvidia-smi >/dev/null && $(BIN)/pip install --quiet "torch==$(TORCH)+cpu" 2>/dev/null; } \
		|| $(BIN)/pip install --quiet "torch==$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $@

demo: setup
	$(BIN)/troll train quickstart --output_dir $(DEMO_OUTPUT)

# Two workers of one thread each: small tensors gain nothing from more.
test: setup
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Needs a quiet machine. On a GPU: $(BIN)/python -m benchmarks all --device cuda
bench: setup
	HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1 $(BIN)/python -m benchmarks all --device cpu

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
