# Every verb does its own set-up: on a fresh machine with Python 3.11, `make train` and `make test` are all it takes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# A machine without CUDA takes the CPU build of torch.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,--constraint .ci/cpu.txt)
# And SGLang as it was tested there, whose own pins are for CUDA. The launcher refuses releases that were not tested.
SGLANG := $(if $(shell command -v nvidia-smi),sglang==0.5.23 sglang-router==0.3.2,--no-deps --requirement .ci/sglang-cpu.txt)
# The lock is the CPU's: with CUDA, SGLang brings what it pins itself, and is not held against that.
UNLOCKED := $(if $(shell command -v nvidia-smi),--deselect tests/sglang/test_real_launch.py::test_what_is_installed_is_what_was_tested)

.PHONY: help install train test check format serve browser screenshots atlas bench bench-trainer conformance bars bars-second bars-sight ablations sglang test-sglang kills bench-routing bench-gpu clean
.DEFAULT_GOAL := help

help:          ## Show these verbs
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 22

install: .venv/installed  ## Make .venv with everything in it

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' $(CONSTRAINTS)
	@touch $@

train: install  ## Make a tiny model and watch it learn to use tools
	$(BIN)/mtrl-train --tools tool_configs/

test: install browser check  ## Lint, types, all tests, coverage
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile
	$(BIN)/coverage combine --quiet
	@rm -f .coverage.*  # of processes that were killed while they wrote it
	$(BIN)/coverage report
	$(BIN)/coverage report --include 'gateway/*' --fail-under 90 --format total
	$(BIN)/coverage report --include 'trainer/*' --fail-under 90 --format total

check: install  ## Lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install  ## Put the code into its form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

serve: install  ## Serve tool_configs/ and mcp_servers.json on http://127.0.0.1:8765
	$(BIN)/mtrl-gateway serve

browser:       ## Install Chromium, which the tests of the pages drive, where it is missing
	@.ci/browser

screenshots: install browser  ## Pictures of every view of both pages, light and dark, in build/screens
	$(BIN)/python -m tests.browser.screens

atlas: install  ## Start the example MCP server that is reached over HTTP
	$(BIN)/python tool_configs/servers/atlas.py

bench: install  ## Measure the gateway beside its peers
	$(BIN)/python bench/gateway.py

bars: install  ## The default job on five seeds: success before and after, and what it cost
	$(BIN)/python bench/bars.py

bars-second: install  ## The same of the second task
	$(BIN)/python bench/bars.py --job second

bars-sight: install  ## The model that sees, on three seeds, and whether it answers from what it sees
	$(BIN)/python bench/bars.py --job sight

ablations: install  ## The default job without masking, and with credit by turn
	$(BIN)/python bench/ablations.py

kills: install sglang  ## The default job while its SGLang server is killed twenty times, beside the same job in peace
	$(BIN)/python bench/kills.py

bench-routing: install sglang  ## What is cached on two SGLang servers, by three ways of sharing the work
	$(BIN)/python bench/routing.py

bench-gpu: install sglang  ## All that is to be known on a GPU; without one, whether it would run
	$(BIN)/python bench/gpu.py $(if $(shell command -v nvidia-smi),,--small)

bench-trainer: install  ## Measure a step of GRPO beside TRL's
	$(BIN)/python bench/trainer.py

conformance: install  ## The official MCP conformance suite, through the gateway (needs npm)
	$(BIN)/python tests/conformance/run.py

sglang: .sglang/installed  ## Make .sglang: SGLang with a Python of its own, for CUDA or for the CPU

.sglang/installed: .ci/sglang-cpu.txt
	$(PYTHON) -m venv .sglang
	.sglang/bin/python -m pip install --quiet --disable-pip-version-check $(SGLANG)
	@touch $@

test-sglang: install sglang  ## What is true only of a real SGLang server, some ten minutes
	$(BIN)/python -m pytest tests/sglang -m "not long" $(UNLOCKED)

clean:         ## Remove what the other verbs made
	rm -rf .venv .sglang .bench .conformance .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
