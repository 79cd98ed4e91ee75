# Each target sets up its own environment. After the first time, this takes a second.
SHELL := /bin/bash
VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.kvoffload-dev
# Without bytecode on the disk, each test process would compile everything again, which takes half a minute.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-remote test-vllm test-sglang test-container test-everything soak mutants lint advice format bench docs dist clean
help:            ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 17

$(STAMP): pyproject.toml scripts/bootstrap
	@scripts/bootstrap $(VENV) dev && touch $@

demo: $(STAMP)   ## serve a chat workload in three variants and compare them
	@$(PY) -m kvoffload demo $(ARGS)

# There is one worker more than cores, because tests wait for a third of the time. "-n0" in ARGS overrides it.
PYTEST := $(PY) -m pytest -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Linters keep one core busy for a while, so they run beside the tests, and their output is printed last.
BESIDE_LINT = said=$$(mktemp) && { $(MAKE) --no-print-directory lint >$$said 2>&1 & } && code=0 && { $(1) || code=$$?; } && \
	{ wait $$! || code=$$?; } && cat $$said && rm $$said && exit $$code

test: $(STAMP)   ## run linters, type checks and all quick tests except those of the real engines
	@$(call BESIDE_LINT,$(PYTEST) $(ARGS))

test-all: $(STAMP) ## run the same tests in their thorough size, including the long ones
	@$(call BESIDE_LINT,KVOFFLOAD_TESTS=thorough $(PYTEST) --timeout 1200 -o faulthandler_timeout=1000 $(ARGS))

# THIN=1 runs only the part of a lane that .ci/run needs.
test-vllm:       ## run the tests with the real vLLM in their own environment; VLLM=0.32.0 selects a version
	@VLLM=$(VLLM) THIN=$(THIN) scripts/test-vllm $(ARGS)

test-sglang:     ## run the tests with the real SGLang in their own environment
	@THIN=$(THIN) scripts/test-sglang $(ARGS)

test-remote: $(STAMP) ## test the remote stores with Debian's Redis (also over TLS) and SeaweedFS
	@THIN=$(THIN) scripts/test-remote $(ARGS)

test-container: $(STAMP) ## build the container image on a Debian that replaces vLLM's image, and run kvoffload in it
	@$(PY) scripts/test-container

ALSO := 0.32.0
test-everything: ## run all of these, thoroughly, in over an hour; ALSO=0.32.0 adds that version of vLLM
	@$(MAKE) test-all ARGS=
	@$(MAKE) test-remote THIN= ARGS=
	@$(MAKE) test-vllm VLLM= THIN= ARGS=
	@$(MAKE) test-sglang THIN= ARGS=
	@$(MAKE) test-container
	@set -e; for version in $(ALSO); do $(MAKE) test-vllm VLLM=$$version THIN= ARGS=; done
	@$(MAKE) soak MINUTES=5 ARGS=

MINUTES := 5
soak: $(STAMP)   ## serve traffic for MINUTES (5) while disks, other programs and clients fail; SEED=N repeats a run; ARGS="--engine vllm"
	@PYTHONPATH=src $(if $(findstring vllm,$(ARGS)),.venv-vllm/bin/python,$(PY)) -m tests.soak.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

N := 100
mutants: $(STAMP) ## insert N (100) faults into copies of the sources, one at a time, and print undetected ones; SEED=N repeats a run
	@$(PY) -m tests.mutants --count $(N) $(if $(SEED),--seed $(SEED)) $(ARGS)

lint: $(STAMP)   ## run ruff and mypy, and check the direction of imports
	@$(VENV)/bin/pre-commit run --all-files

advice: $(STAMP) ## list definitions that seem to be unused; this never fails
	@$(VENV)/bin/vulture || true

format: $(STAMP) ## format the sources with ruff
	@$(VENV)/bin/ruff check --fix . ; $(VENV)/bin/ruff format .

bench: $(STAMP)  ## run the benchmarks, with ratios to their references
	@$(PY) -m bench $(ARGS)

DOCS := .venv-docs
docs:            ## renew generated pages and build the site in build/site from mkdocs.yml; fails on broken links
	@[ -x $(DOCS)/bin/zensical ] || { scripts/bootstrap $(DOCS) && $(DOCS)/bin/python -m pip install --quiet '.[docs]'; }
	@$(DOCS)/bin/python scripts/configuration-reference
	@$(DOCS)/bin/python scripts/figures
	@$(DOCS)/bin/zensical build --strict

dist: $(STAMP)   ## build the wheel, the sdist and the list of dependencies in dist/, and check their metadata
	@$(PY) scripts/dist

clean:           ## remove environments and caches
	@rm -rf $(VENV) .venv-vllm* .venv-sglang $(DOCS) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
