PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
INTEGRATIONS := .venv-integrations
# A file stays with one worker, so that what its tests share is made once; the longest files begin.
BY_FILE := --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test quick seeds chaos elastic kills fuzz large soak meet hsdp dist wheel-smoke integrations
.PHONY: check docs bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s  %s\n", $$1, $$2 }' Makefile

demo: out := runs/demo-$(shell date +%Y%m%d-%H%M%S)
demo: $(INSTALLED) ## train a small speech recogniser over a slow link, dense and with oktopk, for the same time
	$(BIN)/oktopk demo --out $(out)

test quick seeds: export OMP_NUM_THREADS := 1
test quick seeds: export PYTHONDONTWRITEBYTECODE := # hundreds of processes would compile the same sources
test: $(INSTALLED) ## run the tests; options for pytest: make test ARGS="-k wire"
	$(BIN)/python -m pytest -n 6 $(BY_FILE) $(ARGS)

quick: $(INSTALLED) ## laws, contracts and units only, with fewer examples of each property
	$(BIN)/python -m pytest -m quick -n 4 --dist worksteal --hypothesis-profile quick $(ARGS)

seeds: $(INSTALLED) ## all property tests with 20 hypothesis seeds
	env -u CI $(BIN)/python -m pytest -m property -n 2 $(BY_FILE) --seeds 20 -o timeout=2400 $(ARGS)

integrations: export OMP_NUM_THREADS := 1
integrations: $(INTEGRATIONS)/.installed ## test oktopk inside Lightning, transformers, Accelerate, Ray, wandb and MLflow
	$(INTEGRATIONS)/bin/python -m pytest integrations_tests -n 2 --dist worksteal $(ARGS)

elastic kills: export OMP_NUM_THREADS := 1
elastic: $(INSTALLED) ## let a job of torchrun lose one of four hosts, and gain another
	$(BIN)/python -m stress.elastic.run

kills: $(INSTALLED) ## kill training 200 times while it saves, and resume it; ARGS="--kills 20" for fewer
	$(BIN)/python -m stress.kills.save_deaths
	$(BIN)/python -m stress.kills.run $(ARGS)

fuzz: export OMP_NUM_THREADS := 1
fuzz: $(INSTALLED) ## a million damaged messages, and 200,000 reductions with a lying rank; make fuzz ARGS="--case 7"; to go on later: ARGS="--out fuzz.jsonl"
	$(BIN)/python -m stress.fuzz.run $(ARGS)
	$(BIN)/python -m stress.fuzz.run --lying $(ARGS)

large: export OMP_NUM_THREADS := 1
large: $(INSTALLED) ## vectors of more than 2^31 entries, in 19 GiB of memory
	$(BIN)/python -m stress.large.run $(ARGS)

soak: export OMP_NUM_THREADS := 1
soak: $(INSTALLED) ## 20,000 steps through all that a long run meets, in 10 to 20 minutes; make soak ARGS="--seed 2"
	$(BIN)/python -m stress.soak.run $(ARGS)

meet: export OMP_NUM_THREADS := 1
meet: $(INSTALLED) ## 64 processes meet, 128 ranks on threads reduce, and a message has more than 2 GiB
	$(BIN)/python -m stress.meet $(ARGS)

hsdp: export OMP_NUM_THREADS := 1
hsdp: $(INSTALLED) ## HSDP on 8 ranks in fp16, with tensor parallelism, for 200 steps, with a killed rank, and its memory
	$(BIN)/python -m stress.hsdp $(ARGS)

dist: $(INSTALLED) ## build the source distribution and the wheel in dist/, and check them
	rm -rf dist
	$(BIN)/python -m tests.support.wheel.building dist
	$(BIN)/python -m twine check --strict dist/*

wheel-smoke: $(INSTALLED) ## install the wheel in empty environments, for each Python that is here; needs the network
	$(BIN)/python -m tests.support.wheel.every_python $(ARGS)

chaos: export OMP_NUM_THREADS := 1
chaos: $(INSTALLED) ## let ranks fail in thousands of random ways; how many: make chaos ARGS="--threads 200 --processes 14"; to go on later: ARGS="--out chaos.jsonl"
	$(BIN)/python -m stress.chaos.run $(ARGS)

check: $(INSTALLED) ## what CI runs besides the tests: lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: export OMP_NUM_THREADS := 1
docs: $(INSTALLED) ## build the site in build/docs, with warnings as errors, in half a minute
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs
	@$(BIN)/python -m tests.support.docs
	@echo "build/docs/index.html: $$(du -sh build/docs | cut -f 1)"

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
	$(BIN)/python benchmarks/hierarchical.py
	$(BIN)/python benchmarks/hsdp.py
	$(BIN)/python benchmarks/judge.py

clean: ## remove caches and build products; environments stay
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv, which takes some minutes"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[mpi,train,report,examples,docs,dev]'
	touch $@

$(INTEGRATIONS)/.installed: pyproject.toml constraints.txt
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	@echo "installing into $(INTEGRATIONS), which takes some minutes"
	$(INTEGRATIONS)/bin/python -m pip install --quiet -c constraints.txt -e '.[integrations,examples]' \
		pytest pytest-timeout pytest-xdist
	touch $@
