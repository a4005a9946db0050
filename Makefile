PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test check bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s  %s\n", $$1, $$2 }' Makefile

demo: out := runs/demo-$(shell date +%Y%m%d-%H%M%S)
demo: $(INSTALLED) ## train a small speech recogniser on two ranks of this machine, and report what was sent
	$(BIN)/oktopk train --config demo --ranks 2 --out $(out)
	$(BIN)/oktopk report $(out) -o $(out)/report.html

test: export OMP_NUM_THREADS := 1
test: $(INSTALLED) ## run the tests; options for pytest: make test ARGS="-k wire"
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

check: $(INSTALLED) ## what CI runs besides the tests: lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED) ## run the benchmarks one after another, for some hours; some of them need root
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/wire.py
	$(BIN)/python benchmarks/tracking.py
	$(BIN)/python benchmarks/volume.py
	$(BIN)/python benchmarks/metrics.py
	$(BIN)/python benchmarks/digits.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/mpi.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/judge.py

clean: ## remove caches and build products; .venv stays
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv, which takes some minutes"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[mpi,train,report,examples,dev]'
	touch $@
