# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-slow check bench clean

setup: .venv/.ready

.venv/.ready: pyproject.toml scripts/setup
	PYTHON=$(PYTHON) scripts/setup .venv
	touch $@

demo: setup
	$(BIN)/phonograph generate --chat --prompt "What is the capital of France?" --report
	$(BIN)/python examples/decoder.py

test: setup .venv/.browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# The rest: many draws, whole domains, long attacks, other people's clients.
test-slow: setup .venv/.clients
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# For the tests of the status page; without a browser they are skipped, and say so.
.venv/.browser: scripts/browser | .venv/.ready
	scripts/browser .venv/browser && touch $@ || true

# For the tests of clients; those that can't be had are skipped, and say so.
.venv/.clients: scripts/clients pyproject.toml | .venv/.ready
	PYTHON=$(PYTHON) scripts/clients .venv/clients && touch $@ || true

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python bench/graph_layer.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
