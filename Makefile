# Each target sets up what it needs by itself; the second time that costs a second.
SHELL := /bin/bash
VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.kvoffload-dev
# Without bytecode on the disk each process of the tests compiles everything again, half a minute of its time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-remote test-vllm test-sglang test-everything soak mutants lint advice format bench docs dist clean
help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 17

$(STAMP): pyproject.toml scripts/bootstrap
	@scripts/bootstrap $(VENV) dev && touch $@

demo: $(STAMP)   ## serve a chat workload three ways and compare them
	@$(PY) -m kvoffload demo $(ARGS)

# Files side by side: one worker more than cores, as tests wait for a third of the time. "-n0" in ARGS comes later, and wins.
PYTEST := $(PY) -m pytest -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Linters have one core busy for a while: they run beside the tests, and what they say comes last.
BESIDE_LINT = said=$$(mktemp) && { $(MAKE) --no-print-directory lint >$$said 2>&1 & } && code=0 && { $(1) || code=$$?; } && \
	{ wait $$! || code=$$?; } && cat $$said && rm $$said && exit $$code

test: $(STAMP)   ## lint, types and every test but the vLLM lane, in its quick size
	@$(call BESIDE_LINT,$(PYTEST) $(ARGS))

test-all: $(STAMP) ## the same in the thorough size, with the tests that are long on purpose
	@$(call BESIDE_LINT,KVOFFLOAD_TESTS=thorough $(PYTEST) --timeout 1200 -o faulthandler_timeout=1000 $(ARGS))

# THIN=1 takes the part of a lane that .ci/run takes.
test-vllm:       ## the tests that run the real vLLM, in an environment of their own; VLLM=0.30.0 takes that version
	@VLLM=$(VLLM) THIN=$(THIN) scripts/test-vllm $(ARGS)

test-sglang:     ## the tests that run the real SGLang, in an environment of their own
	@THIN=$(THIN) scripts/test-sglang $(ARGS)

test-remote: $(STAMP) ## the remote stores with Debian's Redis (TLS too) and SeaweedFS
	@THIN=$(THIN) scripts/test-remote $(ARGS)

ALSO :=
test-everything: ## all of it, in the thorough size: an hour and more; ALSO="0.30.0 0.31.0" takes these versions of vLLM too
	@$(MAKE) test-all ARGS=
	@$(MAKE) test-remote THIN= ARGS=
	@$(MAKE) test-vllm VLLM= THIN= ARGS=
	@$(MAKE) test-sglang THIN= ARGS=
	@set -e; for version in $(ALSO); do $(MAKE) test-vllm VLLM=$$version THIN= ARGS=; done
	@$(MAKE) soak MINUTES=5 ARGS=

MINUTES := 5
soak: $(STAMP)   ## MINUTES (5) of served traffic while disk, neighbours and clients go wrong; SEED=N repeats one; ARGS="--engine vllm"
	@PYTHONPATH=src $(if $(findstring vllm,$(ARGS)),.venv-vllm/bin/python,$(PY)) -m tests.soak.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

N := 100
mutants: $(STAMP) ## put N (100) faults into copies of the sources, one at a time, and print those that no test notices; SEED=N repeats
	@$(PY) -m tests.mutants --count $(N) $(if $(SEED),--seed $(SEED)) $(ARGS)

lint: $(STAMP)   ## ruff, mypy and the direction of imports
	@$(VENV)/bin/pre-commit run --all-files

advice: $(STAMP) ## definitions that nothing seems to use: a list to read, no gate
	@$(VENV)/bin/vulture || true

format: $(STAMP) ## rewrite the tree the way ruff wants it
	@$(VENV)/bin/ruff check --fix . ; $(VENV)/bin/ruff format .

bench: $(STAMP)  ## the benchmarks, with ratios against their references
	@$(PY) -m bench $(ARGS)

DOCS := .venv-docs
docs:            ## the site in build/site, from mkdocs.yml; a broken link fails; writes what is made of the code and of runs
	@[ -x $(DOCS)/bin/zensical ] || { scripts/bootstrap $(DOCS) && $(DOCS)/bin/python -m pip install --quiet '.[docs]'; }
	@$(DOCS)/bin/python scripts/configuration-reference
	@$(DOCS)/bin/python scripts/figures
	@$(DOCS)/bin/zensical build --strict

dist: $(STAMP)   ## build the wheel and the sdist in dist/
	@rm -rf dist && $(PY) -m build --no-isolation --outdir dist

clean:           ## remove environments and caches
	@rm -rf $(VENV) .venv-vllm* .venv-sglang $(DOCS) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
