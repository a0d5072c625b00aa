# Needs git, make and Python >= 3.11. The first target that needs it makes .venv (.ci/setup_env.py says how).
#
#   STAGE=3            which stage; without it the finished engine, nanovllm
#   PROMPT="..."       what to continue, taken as typed: quotes, apostrophes and dollars arrive unharmed
#   ARGS="..."         more flags for whatever the target runs: ARGS="--device cuda"
#   PYTHON=python3.12  what .venv is made from; without it the first of CANDIDATES that is new enough
#   PY=python3         run with this interpreter as it is and install nothing
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu   where torch alone comes from: here its CPU build
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run serve test test-all test-triton soak storm setup notebooks notebook page open-page exercise check
.PHONY: diff scoreboard measure gpu lint train clean FORCE

# $(value) and the environment carry these past what make and the shell would expand.
override PROMPT := $(value PROMPT)
override TEXT := $(value TEXT)
export PROMPT TEXT TORCH_INDEX

ifdef PY
PYTHON := $(PY)
needs :=
else
PY := .venv/bin/python
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11
PYTHON = $(or $(shell for p in $(CANDIDATES); do $$p -c 'import tomllib' 2>/dev/null && echo $$p && break; done),$(error \
    no Python 3.11 or newer among $(CANDIDATES): install one, or name it: make run PYTHON=/path/to/python))
# A stamp for each extra, written once its install is complete. A .venv that no longer runs is remade.
needs = $(addprefix .venv/.with-,$1)
BROKEN := $(shell .venv/bin/python -c 'import safetensors' 2>/dev/null || echo FORCE)
.venv/.with-%: pyproject.toml constraints.txt $(BROKEN)
	@$(PYTHON) .ci/setup_env.py $*
endif

ENGINE = $(if $(STAGE),stages $(STAGE),nanovllm generate)
one_stage = $(or $(STAGE),$(error which stage? make $@ STAGE=3))

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

run: $(call needs,core) ## tell stories with the finished engine; STAGE=3 PROMPT="Once upon a time" ARGS="--device cuda"
	@$(PY) -m $(ENGINE) $(ARGS) $${PROMPT:+-- "$$PROMPT"}

serve: $(call needs,serve) ## serve the finished engine to clients of OpenAI's API, and show its memory in a browser; ARGS="--port 8001"
	@$(PY) -m nanovllm serve models/storyteller --chat-template plain $(ARGS)

PYTEST_FLAGS := -n auto --maxprocesses 4 --dist worksteal
PYTEST = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m pytest $(PYTEST_FLAGS)

test: $(call needs,test) ## each distinct test once, in minutes; PY=python3 takes that one and installs nothing
	@$(PYTEST) $(ARGS)

test-all: $(call needs,test) ## every test: copies in later stages, long histories, notebooks, exercises; PART=rest without make test's
	@$(PYTEST) --part $(or $(PART),all) $(ARGS)

.venv-triton/.complete: .ci/setup_triton.py $(call needs,test)
	@$(PY) .ci/setup_triton.py

test-triton: .venv-triton/.complete ## the GPU's kernels on the CPU, in Triton's interpreter, in an environment of its own; PART=all
	@TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv-triton/bin/python -m pytest $(PYTEST_FLAGS) --part $(or $(PART),quick) \
	    nanovllm/tests/gpu nanovllm/backends/gpu -W "ignore:Conversion of an array" $(ARGS)

soak: $(call needs,test) ## a million random steps of all stages, and a million of the engine with faults, all checked; ARGS="--stage s7 --steps 100000 --seed 1"
	@OMP_NUM_THREADS=1 $(PY) -m tests.soak $(ARGS)
	@$(if $(filter --stage --stage=% --kernels,$(ARGS)),,OMP_NUM_THREADS=1 $(PY) -m nanovllm.tests.soak $(ARGS))

storm: $(call needs,test) ## 1,000 clients, 10,000 bad requests and kill -9 against nanovllm serve; ARGS="clients --rounds 5 --seed 1"
	@$(PY) -m nanovllm.tests.server.storm $(ARGS)

setup: $(call needs,test lint) ## the environment with the test extras (and lint's), running nothing

notebooks: $(call needs,notebooks) ## execute all notebooks in place, so that their pictures are this machine's
	@$(PY) -m notebooks $(ARGS)

notebook: $(call needs,notebooks) ## open a copy of a stage's notebook in jupyter lab: STAGE=3, claims or nanovllm
	@$(PY) -m notebooks.lab $(one_stage) $(ARGS)

page: $(call needs,core) ## run one workload through all stages, and make the page that plays their pools
	@OMP_NUM_THREADS=1 $(PY) -m notebooks.page

open-page: ## open notebooks/pool.html in a browser: it is in the repository, one file
	@echo notebooks/pool.html
	@$(PYTHON) -m webbrowser -t "file://$(CURDIR)/notebooks/pool.html"

exercise: ## write exercises/s3, a stage with functions for you to write: STAGE=3, or STAGE=3 STEP=2
	@$(PYTHON) stages/chain.py exercise $(one_stage) $(addprefix --step ,$(STEP)) $(ARGS)

# A red test is a result, not a failure of make. chain.py exits with 1 for red tests, and with 2 for misuse.
check: $(call needs,test) ## check your exercise: the tests of your current step, and at the end a story; STAGE=3
	@$(PY) stages/chain.py exercise $(one_stage) --check $(addprefix --step ,$(STEP)) $(ARGS) || test $$? -eq 1

diff: ## what a stage changes, in reading order: STAGE=3, or nanovllm; ARGS="--file scheduler.py" for one file
	@$(PYTHON) stages/chain.py diff $(one_stage) $(ARGS)

scoreboard: $(call needs,test) ## what each stage bought and what it cost; ARGS=--predict answers the lessons' questions
	@$(PY) -m stages.bench $(or $(ARGS),scoreboard run)
	@$(PY) -m stages.tools.prose

measure: $(call needs,test) ## all figures of the course, in about 15 minutes alone on the machine; ARGS="decode offload", ARGS=--resume
	@$(PY) -m stages.bench $(or $(ARGS),all)
	@$(PY) -m stages.tools.prose

gpu: $(call needs,test) ## what a GPU shows, in parts of minutes: PART=1, ... 9, else all; OUT=folder, ARGS="--device cpu --tiny"
	@$(PY) -m stages.bench.gpu $(PART) --out $(or $(OUT),gpu-results) $(ARGS)

lint: $(call needs,lint) ## ruff, and mypy on signatures
	@$(PY) -m ruff check .
	@$(PY) -m mypy $(wildcard stages models nanovllm notebooks/page)

train: $(call needs,core) ## train the story teller on a folder of text files: TEXT=folder
	@$(PY) -m models.training --text "$(if $(TEXT),$$TEXT,$(error which texts? make train TEXT=folder))" $(ARGS)

clean: ## remove .venv, .venv-triton, caches and exercises/ with your solutions; never models/
	rm -rf .venv .venv-triton .pytest_cache .hypothesis .mypy_cache .ruff_cache exercises build dist *.egg-info
	find . -path ./models -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
