# Everything runs in .venv, which is made once and made again when what it is made from changes.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check bench docs

demo: .venv/.ready  ## one attention, step by step
	@$(BIN)/regard explain

test: .venv/.ready  ## all tests, the examples in docstrings and README included
	$(BIN)/pytest -q -n 2

check: .venv/.ready  ## layout, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

bench: .venv/.ready  ## speed on this machine, appended to benchmarks/results
	$(BIN)/python benchmarks/cpu.py

docs: .venv/.ready  ## write again what is generated: docs/help.md, docs/images
	$(BIN)/python docs/generate.py

# hatchling comes first, so that the build uses the version that constraints.txt names.
.venv/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing what constraints.txt names into .venv ..."
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--no-build-isolation --editable '.[dev]'
	@touch $@
