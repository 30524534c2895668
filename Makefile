# Everything from a fresh clone: `make demo` draws eight pictures, `make test` runs the whole suite.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PACKAGES := protocol engine worker stages cli
TYPING := build/typing/omni_engine

# Engines under test have one thread and often wait: two test files at once keep two cores busy.
TWO_AT_ONCE := --numprocesses 2 --dist loadfile

.PHONY: demo test test-quick lint format typecheck wheel clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/python -m omni_engine.cli.demo

test: $(INSTALLED)
	$(BIN)/python -m pytest $(TWO_AT_ONCE) -m 'not alone'
	$(BIN)/python -m pytest -m alone

test-quick: $(INSTALLED)
	$(BIN)/python -m pytest $(TWO_AT_ONCE) -m 'not slow'

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Type checkers don't see through the folder mapping of pyproject.toml: give them a linked tree.
$(TYPING): $(INSTALLED)
	mkdir -p $(TYPING)
	ln -sfn $(CURDIR)/omni_engine/__init__.py $(CURDIR)/omni_engine/py.typed $(TYPING)/
	for package in $(PACKAGES); do ln -sfn $(CURDIR)/$$package $(TYPING)/$$package; done

typecheck: $(TYPING)
	$(BIN)/mypy --package omni_engine

wheel: $(INSTALLED)
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf build dist demo-output .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
