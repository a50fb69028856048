# make demo    train a real model over two ranks, and plot it
# make test    run the tests
# make check   formatting, lint, types, the dependency rule
#
# Each sets up what it needs in .venv, once: a second call starts at once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check format support clean

demo: $(INSTALLED)
	$(BIN)/ferrodist demo

test: $(INSTALLED)
	$(BIN)/python -m pytest

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

support: $(INSTALLED)
	$(BIN)/python -m ferrodist.testing.support_table --write docs/support.md

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# pip learned dependency groups in 25.1; Python 3.11 comes with an older one.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[demo]" --group test --group check
	touch $@
