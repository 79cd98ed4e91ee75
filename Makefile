# Each target sets up what it needs by itself; the second time that costs a second.
SHELL := /bin/bash
VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.kvoffload-dev

.PHONY: help demo test test-vllm lint format bench clean
help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

$(STAMP): pyproject.toml scripts/bootstrap
	@scripts/bootstrap $(VENV) dev && touch $@

demo: $(STAMP)   ## serve a chat workload three ways and compare them
	@$(PY) -m kvoffload demo $(ARGS)

test: $(STAMP)   ## lint, types and every test but the vLLM lane
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(PY) -m pytest $(ARGS)

test-vllm:       ## the tests that run the real vLLM, in an environment of their own
	@scripts/test-vllm $(ARGS)

lint: $(STAMP)   ## ruff and mypy only
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

format: $(STAMP) ## rewrite the tree the way ruff wants it
	@$(VENV)/bin/ruff check --fix . ; $(VENV)/bin/ruff format .

bench: $(STAMP)  ## the benchmarks, with ratios against their references
	@$(PY) -m bench $(ARGS)

clean:           ## remove environments and caches
	@rm -rf $(VENV) .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
