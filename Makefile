# Everything starts from a virtual environment in .venv, made on first use.
MODEL ?=
ENGINE ?= vllm
SEEDS ?= 500
FIRST ?= 1000
SECONDS ?= 180
SEED ?=
REPORT ?= chaos.json
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test soak chaos bench-engine lint typecheck protos check clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## Install AMPD with its CPU engine into .venv (nothing to do the second time)
	@scripts/install.sh $(VENV)

demo: install ## Run agents on a local cluster: MODEL=smollm2 (default), tiny or a folder; ENGINE=emulated
	@$(BIN)/ampdctl demo --engine $(ENGINE) $(if $(MODEL),--model $(MODEL))

test: install ## Run the test suite, the real engine included
	$(BIN)/pytest

soak: install ## Thousands of seeds of the simulated cluster: SEEDS=500 of each profile, from FIRST=1000
	$(BIN)/pytest tests/sim -q --tb=short --soak-seeds $(SEEDS) --sim-first-seed $(FIRST)

chaos: ENGINE = emulated
chaos: install ## Break a cluster of real processes under load: ENGINE=emulated, SECONDS=180, SEED=...
	$(BIN)/pytest tests/chaos -q -s --tb=short --timeout=0 --chaos-engine $(ENGINE) \
	  --chaos-seconds $(SECONDS) $(if $(SEED),--chaos-seed $(SEED)) --chaos-report $(REPORT)

bench-engine: install ## Rounds per second at the port of the emulated engine
	@$(BIN)/python benchmarks/engine_port.py

lint: install ## Check style, imports between layers, and the protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/buf lint

typecheck: install ## Check types
	$(BIN)/mypy

protos: install ## Generate ampd/v1 and ampd/worker/v1 from protos/
	$(BIN)/python scripts/generate_protos.py

check: lint typecheck ## All static checks, the freshness of generated code included
	$(BIN)/python scripts/generate_protos.py --check

clean: ## Remove the virtual environment and what the tools have cached (not the models)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
