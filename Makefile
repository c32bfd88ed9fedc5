# `make` prints the targets. Every target sets the environment up first if need be.
#
#   make test                              own environment in .venv, pinned versions
#   make test PYTHON=python3.12            the same, made with that interpreter
#   make test VENV=~/envs/gpu              an existing environment; its torch >= 2.11 is kept
#   make test VENV= PYTHON=~/env/bin/python   that interpreter as it is; its torch >= 2.11 is kept

ASKED := $(origin PYTHON)
PYTHON ?= python3
VENV ?= .venv
DEVICE ?= auto
GPU ?= h200
PRESET ?= quick
JOBS ?= 1
ARGS ?=

override VENV := $(patsubst ~/%,$(HOME)/%,$(VENV))
override PYTHON := $(patsubst ~/%,$(HOME)/%,$(PYTHON))
ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
STAMP := build/setup/$(shell command -v "$(PYTHON)" | tr -c 'A-Za-z0-9.\n' '_')
else
ifneq ($(words $(VENV)),1)
$(error VENV=$(VENV) has a space in it; make cannot have that in a target)
endif
PY := $(VENV)/bin/python
STAMP := $(VENV)/.mila_kernels
endif

VERSION := import sys; print("%d.%d" % sys.version_info[:2])
HAS_TORCH := import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)

.DEFAULT_GOAL := help
.PHONY: interpreter setup reproduce test lab static figures sanitize profile lint strip clean help

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=$(PYTHON) VENV=$(VENV) DEVICE=$(DEVICE) (auto, cuda, emulation) GPU=$(GPU) PRESET=$(PRESET) (quick, full)"
	@echo "  ARGS=... is handed to the command, e.g. make test ARGS='-k prefill', make reproduce ARGS='--only 01,02'"

setup: $(STAMP) ## make the environment and install the package into it

# An environment keeps the interpreter that it was made with: another one asked for would be ignored.
interpreter:
ifneq ($(ASKED),undefined)
ifneq ($(strip $(VENV)),)
	@test ! -x "$(PY)" || { \
	    asked=$$("$(PYTHON)" -c '$(VERSION)') && has=$$("$(PY)" -c '$(VERSION)') && \
	    { test "$$asked" = "$$has" || { \
	        echo "$(VENV) has Python $$has, and PYTHON=$(PYTHON) is $$asked: remove $(VENV), or give another VENV=..." >&2; \
	        exit 2; }; }; }
endif
endif

# An environment that this file made is filled from the pins. Any other keeps its torch if that is new enough,
# and gets only what is missing, because replacing a working CUDA build is worse than an untested version.
$(STAMP): requirements.txt pyproject.toml | interpreter
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
ifneq ($(strip $(VENV)),)
	@test -x "$(PY)" || { "$(PYTHON)" -m venv "$(VENV)" && touch "$(VENV)/.pinned"; }
endif
	@if test ! -e "$(VENV)/.pinned" && "$(PY)" -c '$(HAS_TORCH)' 2>/dev/null; then \
	    echo "keeping torch $$("$(PY)" -c 'import torch; print(torch.__version__)') of $(PY)"; \
	    "$(PY)" -m pip install --no-build-isolation -e '.[dev]'; \
	else \
	    "$(PY)" -m pip install -r requirements.txt && "$(PY)" -m pip install --no-build-isolation --no-deps -e .; \
	fi
	@mkdir -p "$(dir $(STAMP))" && touch "$(STAMP)"

reproduce: $(STAMP) ## run every notebook: tables, charts, executed notebooks under results/local/
	"$(PY)" -m mila_kernels reproduce --device $(DEVICE) --gpu $(GPU) --preset $(PRESET) $(ARGS)

test: $(STAMP) ## run the tests (DEVICE=cuda: on the GPU too)
	MILA_TEST_DEVICE=$(DEVICE) "$(PY)" -m pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile) $(ARGS)

lab: $(STAMP) ## open JupyterLab on the notebooks
	"$(PY)" -m jupyterlab notebooks $(ARGS)

static: $(STAMP) ## registers, spills, instruction mix of every step into results/static.csv (nvcc, no GPU)
	"$(PY)" -m mila_kernels static $(ARGS)

figures: $(STAMP) ## draw the charts of the recorded results of GPU=... and the README's generated parts
	"$(PY)" -m mila_kernels.report --figures --readme --gpu $(GPU) $(ARGS)

sanitize: $(STAMP) ## compute-sanitizer, four tools over every step (a GPU)
	"$(PY)" -m mila_kernels.sanitize $(ARGS)

profile: $(STAMP) ## hardware counters of one step (a GPU, ncu): make profile STEP=prefill/01_scalar
	@test -n "$(STEP)" || { echo "make profile STEP=op/NN_name; the steps: $(PY) -m mila_kernels list"; exit 2; }
	"$(PY)" -m mila_kernels profile $(STEP) $(ARGS)

lint: $(STAMP) ## style, format, types
	"$(PY)" -m ruff check .
	"$(PY)" -m ruff format --check .
	"$(PY)" -m mypy

strip: $(STAMP) ## remove outputs from the notebooks that are committed
	"$(PY)" -m jupyter nbconvert --log-level WARN --clear-output --inplace notebooks/*.ipynb

clean: ## remove what tools leave here; keeps results/ and the environment
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find mila_kernels tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
