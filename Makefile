# Two commands do everything: `make run` and `make test`. Each sets up what it needs.
PAIR ?= smol
VENV := .venv/bin

.PHONY: run models test test-fast check bench protos venv clean

venv:
	@deploy/tools/venv.sh

run: venv
	@$(VENV)/forebay up --pair $(PAIR)

# What the tests and benchmarks load: the demo release, with a float32 variant and the weights
# as the references, and the variants of the torch engine.
models: venv
	@$(VENV)/forebay models build --pair smol --variants int4,int8,fp32,nf4,llm-int8

test: models check
	$(VENV)/pytest

test-fast: venv
	$(VENV)/pytest -q -m "not slow and not model and not e2e"

check: venv
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports
	deploy/tools/check_protos.sh

bench: models
	$(VENV)/python tests/bench/run.py $(if $(ONLY),ONLY=$(ONLY))

protos: venv
	deploy/tools/protos.sh

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
