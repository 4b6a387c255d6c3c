# The commands of this project. Everything runs in .venv, which is made when it is missing or out of date.
#   make reproduce              the default pipeline and its report (2 cores, no GPU)
#   make quick                  the same figures at small sizes, in minutes
#   PYTHON=python3.12 make ...  another interpreter
#   TORCH_INDEX=URL make ...    take torch from this package index first (a CPU build, say)
#   CORES=8 make ...            cores for the pipeline

SHELL := /bin/bash
PYTHON ?= python3
CORES ?= 2
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
# The stamp's name is a checksum of what decides the environment's content: a change makes a new one.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
SNAKEMAKE := PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --cores $(CORES)

.DEFAULT_GOAL := help
.PHONY: help venv reproduce quick tune test test-all lint gpu-check

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile
	@echo "targets: venv reproduce quick tune test test-all lint gpu-check"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(1)' || { \
	    echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); Python 3.11 or newer is needed (make PYTHON=/path/to/python3.11 ...)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV); this takes a few minutes"
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[harness,test,dev]'
	@$(BIN)/python -c 'from torchgt.attention import build; why = build.load(); why is True or print(f"no fused CPU attention: {why}")'
	@rm -f $(VENV)/.installed-*
	@touch $(STAMP)

reproduce: venv
	$(SNAKEMAKE)
	$(SNAKEMAKE) --report results/report.html

quick: venv
	$(SNAKEMAKE) --configfile config/quick.yaml
	$(SNAKEMAKE) --configfile config/quick.yaml --report results-quick/report.html

# Searches learning rate and dropout for every system and rewrites config/hyperparameters.yaml.
tune: venv
	$(SNAKEMAKE) --configfile config/tune.yaml -- tune

test: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" python -m pytest

test-all: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" python -m pytest -m ""

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow
	PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --lint

gpu-check: venv
	@$(BIN)/python -c 'import torch; print("this version has no GPU checks" if torch.cuda.is_available() else "no GPU: nothing checked")'
