# You need git, make and Python 3.11 or newer. Targets make .venv when they first need it (see .ci/setup_env.py).
#
#   STAGE=3            the stage to run; by default, the nanovllm package
#   PROMPT="..."       the prompt, passed on exactly as typed: quotes, apostrophes and dollar signs need no escaping
#   ARGS="..."         more options for the command that the target runs, such as ARGS="--device cuda"
#   PYTHON=python3.12  the interpreter that .venv is based on; by default, the first of CANDIDATES that is new enough
#   PY=python3         run with this interpreter, and install nothing
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu   the package index for torch alone; this one has its CPU build
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run chat serve test test-all test-triton test-ray realmodel soak storm mutants clients setup notebooks notebook page
.PHONY: open-page book exercise check museum play diff scoreboard measure claims peers gpu pins lint train clean FORCE

# $(value) and the environment protect these from expansion by make and the shell.
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
    no Python 3.11 or newer among $(CANDIDATES); install one, or pass its path: make run PYTHON=/path/to/python))
# Each extra has a stamp, written after a complete install. A .venv that no longer runs is rebuilt.
needs = $(addprefix .venv/.with-,$1)
BROKEN := $(shell .venv/bin/python -c 'import safetensors' 2>/dev/null || echo FORCE)
.venv/.with-%: pyproject.toml constraints.txt $(BROKEN)
	@$(PYTHON) .ci/setup_env.py $*
endif

ENGINE = $(if $(STAGE),stages $(STAGE),nanovllm generate)
one_stage = $(or $(STAGE),$(error make $@ needs a stage: make $@ STAGE=3))

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

run: $(call needs,core) ## generate a story with nanovllm, or with STAGE=3; PROMPT="Once upon a time" ARGS="--device cuda"
	@$(PY) -m $(ENGINE) $(ARGS) $${PROMPT:+-- "$$PROMPT"}

# Under the system prompt of its template, the first word of many answers is a near tie that rounding decides.
SYSTEM := You are a helpful assistant. Answer with one short sentence.
chat: $(call needs,gguf) ## chat with a real model, SmolLM2 135M, which is downloaded once; ARGS="--temperature 0"
	@$(PY) -m nanovllm chat smollm2 --system "$(SYSTEM)" $(ARGS)

serve: $(call needs,serve) ## start an OpenAI-compatible server with a live page of its memory; ARGS="--port 8001"
	@$(PY) -m nanovllm serve models/storyteller --chat-template plain $(ARGS)

# Tests start hundreds of processes, which need compiled modules even where the environment asks for none.
PYTEST_FLAGS := -n auto --maxprocesses 4 --dist worksteal
TESTING := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1
PYTEST = $(TESTING) HF_HUB_OFFLINE=1 $(PY) -m pytest $(PYTEST_FLAGS)

test: $(call needs,test) ## run each distinct test once, in minutes
	@$(PYTEST) $(ARGS)

test-all: $(call needs,test $(if $(filter rest,$(PART)),,book)) ## run every test: copies in later stages, long histories, notebooks, exercises; PART=rest skips those of make test
	@$(PYTEST) --part $(or $(PART),all) $(ARGS)

.venv-triton/.complete: .ci/setup_triton.py $(call needs,test)
	@$(PY) .ci/setup_triton.py

test-triton: .venv-triton/.complete ## test the GPU kernels on the CPU, in Triton's interpreter and an environment of its own; PART=all
	@$(TESTING) TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest $(PYTEST_FLAGS) --part $(or $(PART),quick) \
	    nanovllm/tests/gpu nanovllm/backends/gpu tests/bench/test_paged_kernels.py tests/bench/test_triton_kernel.py $(ARGS)

.venv-ray/.complete: .ci/setup_ray.py $(call needs,test)
	@$(PY) .ci/setup_ray.py

test-ray: .venv-ray/.complete ## test batches and replicas on a local Ray cluster, in an environment of its own, with kills
	@$(TESTING) .venv-ray/bin/python -m pytest --part all nanovllm/tests/cluster nanovllm/cluster $(ARGS)

realmodel: $(call needs,test) ## compare SmolLM2 135M with transformers, and use it as people do; it is downloaded once
	@$(TESTING) HF_HUB_OFFLINE=1 $(PY) -m pytest nanovllm/tests/realmodel.py tests/realmodel_page.py $(ARGS)

soak: $(call needs,test) ## check a million random steps of the stages, and a million of the package with injected faults; ARGS="--stage s7 --steps 100000 --seed 1"
	@OMP_NUM_THREADS=1 $(PY) -m tests.soak $(ARGS)
	@$(if $(filter --stage --stage=% --kernels,$(ARGS)),,OMP_NUM_THREADS=1 $(PY) -m nanovllm.tests.soak $(ARGS))

storm: $(call needs,test) ## attack the server with 1,000 clients, 10,000 bad requests, extreme ones and kill -9; ARGS="clients --rounds 5 --seed 1"
	@$(PY) -m nanovllm.tests.server.storm $(ARGS)

mutants: $(call needs,test mutants) ## plant small faults, and count those that no test notices, about 40 minutes; ARGS=--survivors
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m tests.mutants $(ARGS)

clients: $(call needs,test) ## run programs of 12 client libraries against the server, in environments of their own; ARGS="litellm.py"
	@$(PY) .ci/setup_clients.py $(ARGS)
	@$(PY) -m nanovllm.tests.clients $(ARGS)

setup: $(call needs,test lint) ## install everything for tests and lint, and run nothing

notebooks: $(call needs,notebooks) ## execute all notebooks in place, with this machine's results
	@$(PY) -m notebooks $(ARGS)

notebook: $(call needs,notebooks) ## open a copy of a notebook without its answers in jupyter lab; STAGE=3, claims, nanovllm or routing
	@$(PY) -m notebooks.lab $(one_stage) $(ARGS)

page: $(call needs,core) ## rebuild notebooks/pool.html, which replays one workload in the pools of all stages
	@OMP_NUM_THREADS=1 $(PY) -m notebooks.page

open-page: ## open notebooks/pool.html in a browser; the repository includes it
	@echo notebooks/pool.html
	@$(PYTHON) -m webbrowser -t "file://$(CURDIR)/notebooks/pool.html"

book: $(call needs,book) ## build the course as a website, in build/book; OUT=folder
	@$(PY) -m sphinx -q -W --keep-going -c book . $(or $(OUT),build/book)
	@echo $(or $(OUT),build/book)/index.html

exercise: ## create exercises/s3, a stage with functions for you to write; STAGE=3, or STAGE=3 STEP=2
	@$(PYTHON) stages/chain.py exercise $(one_stage) $(addprefix --step ,$(STEP)) $(ARGS)

# Failing tests are a result here, not an error. chain.py exits with 1 for failing tests and with 2 for misuse.
check: $(call needs,test) ## test the current step of your exercise, and after the last step generate a story; STAGE=3
	@$(PY) stages/chain.py exercise $(one_stage) --check $(addprefix --step ,$(STEP)) $(ARGS) || test $$? -eq 1

museum: $(call needs,test) ## find faults that vLLM, SGLang, llama.cpp and LMCache had, with your tests; STAGE=6, ARGS="--hint NAME"
	@$(PY) -m stages.tools.museum $(STAGE) $(ARGS) || test $$? -eq 1

play: $(call needs,core) ## play your exercise on the page, up to the step where it parts from the course's stage; STAGE=3
	@$(PY) -m notebooks.page.play $(one_stage) $(ARGS)

diff: ## show what a stage changes, in reading order; STAGE=3 or nanovllm, ARGS="--file scheduler.py" for one file
	@$(PYTHON) stages/chain.py diff $(one_stage) $(ARGS)

scoreboard: $(call needs,test) ## compare what each stage gains and costs; ARGS="s1 s2" answers lessons' questions
	@$(PY) -m stages.bench $(or $(ARGS),scoreboard run)
	@$(PY) -m stages.tools.prose

measure: $(call needs,test) ## measure all figures of the course, about an hour on an idle machine; ARGS="decode offload", ARGS=--resume
	@$(PY) -m stages.bench $(or $(ARGS),all)
	@$(PY) -m stages.tools.prose

claims: $(call needs,test notebooks) ## run the texts' programs, time what must be timed, and print all claims with their verdicts
	@$(PY) -m stages.bench claims > /dev/null
	@$(PY) -m notebooks.helpers.claims

peers: $(call needs,test) ## race vLLM, llama.cpp and transformers, for two hours or more on an idle machine; VLLM=python LLAMA=python
	@$(PY) -m stages.bench.race_models $(addprefix --vllm ,$(VLLM)) $(addprefix --llama ,$(LLAMA)) $(ARGS)
	@$(PY) -m stages.tools.prose

gpu: $(call needs,test) ## measure on a GPU, in parts of a few minutes; PART=0 to 10, by default all; OUT=folder, ARGS="--device cpu --tiny"
	@$(PY) -m stages.bench.gpu $(PART) --out $(or $(OUT),gpu-results) $(ARGS)

pins: ## move the versions of constraints.txt to the newest ones; ARGS="--from .venv/bin/python" for an environment's
	@$(or $(shell command -v python3.11),$(PYTHON)) .ci/pins.py $(ARGS)

lint: $(call needs,test lint) ## check style and types, with ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy $(wildcard stages models nanovllm notebooks/page)

train: $(call needs,core) ## train the storyteller on a folder of text files; TEXT=folder
	@$(PY) -m models.training --text "$(if $(TEXT),$$TEXT,$(error make train needs a folder of text files: make train TEXT=folder))" $(ARGS)

clean: ## remove .venv, .venv-triton, .venv-ray, .venv-clients, caches, and exercises/ including your solutions
	rm -rf .venv .venv-triton .venv-ray .venv-clients .pytest_cache .hypothesis .mypy_cache .ruff_cache exercises build dist *.egg-info
	find . -path ./models -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
