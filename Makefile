# Everything starts here. `make demo` on a fresh clone builds .venv, trains, and prints where the report is.
#
#   PYTHON=...    interpreter to build .venv with (3.11 or newer); the first one found when not given
#   PLATFORM=...  cpu or gpu: which list of requirements/ to install; gpu where nvidia-smi runs when not given
#   JOBS=...      files of tests that run at the same time; 2 when not given (each starts up to three processes)
#   ARGS=...      more words for the command of demo, nightly, test, parity, faults, fuzz, bench or doctor: make test ARGS="-k torchx"

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# 3.11 first: the one version that every wheel of the lists is known to exist for.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
JOBS ?= 2
PLATFORM ?= $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
LIST := requirements/$(PLATFORM).txt
STAMP := $(VENV)/installed-$(PLATFORM)
PACKAGES := embeddings models trainer pipelines deploy

PARITY := .parity
DOCS := .docs

.PHONY: help demo nightly test parity faults fuzz bench docs lint format doctor install clean

help: ## list these targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(STAMP) ## write click logs, train the recipes on 2 nodes x 1 process, print the table and the report's path
	$(BIN)/python -m pipelines.demo $(ARGS)

nightly: $(STAMP) ## replay 16 generated days, night by night, and print the table; ARGS="--data LOGS" for other days
	$(BIN)/python -m pipelines.replay $(ARGS)

test: $(STAMP) ## run all tests
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

parity: $(PARITY)/installed ## compare towers with FuxiCTR's and DeepCTR-Torch's own, with the same weights
	PYTHONPATH=$(PARITY) $(BIN)/python -m pytest tests/parity $(ARGS)

faults: $(STAMP) ## inject every fault into small jobs and print what was left; ARGS="clock disk" for some of them
	$(BIN)/python -m tests.faults.run $(ARGS)

fuzz: $(STAMP) ## read damaged inputs for ten minutes and list what was not refused; ARGS="--seed 1 --seconds 3600 csv"
	$(BIN)/python -m tests.fuzz.run --jobs $(JOBS) $(ARGS)

bench: $(STAMP) ## measure speed in alternating pairs and write docs/benchmarks.md; ARGS="--only loader --pairs 9"
	$(BIN)/python -m tests.benchmarks.bench $(ARGS)

docs: $(DOCS)/installed ## build the site of the documents in .docs/site, and refuse broken links
	$(BIN)/python -m tests.site.generate $(DOCS)/source
	NO_MKDOCS_2_WARNING=1 $(DOCS)/venv/bin/mkdocs build --strict --quiet

lint: $(STAMP) ## check style, formatting, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the files as lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

doctor: $(STAMP) ## check the installed packages against each other and against this machine
	$(BIN)/python -m trainer.doctor $(ARGS)

install: $(STAMP) ## build .venv, or rebuild it where requirements/ has changed

clean: ## remove .venv and caches; runs/ and logs/ stay
	rm -rf $(VENV) $(PARITY) $(DOCS) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Rebuilt from nothing, not patched: leftovers of the other platform's list (fbgemm-gpu beside fbgemm-gpu-cpu) break both.
# --no-deps because torchrec would pull the CUDA build of fbgemm-gpu onto every machine.
# deepspeed comes as source: it is built first, with the pinned setuptools instead of the newest one.
# Last comes the project itself, as a link to this checkout: the command fullrank.
$(STAMP): $(LIST) requirements/mlflow.txt requirements/sweep.txt requirements/dev.txt
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.11 or newer found. Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "PYTHON=$(PYTHON) does not run or is older than 3.11: $$("$(PYTHON)" --version 2>&1)" >&2; exit 1; }
	@echo "Building $(VENV) with $$("$(PYTHON)" --version) from $(LIST): about 1 GB to download for cpu, 5 GB for gpu."
	"$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --no-deps --disable-pip-version-check --quiet "$$(grep '^setuptools==' $(LIST))"
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --no-deps --disable-pip-version-check --quiet \
		--no-build-isolation "$$(grep '^deepspeed==' $(LIST))"
	$(BIN)/python -m pip install --no-deps --disable-pip-version-check \
		-r $(LIST) -r requirements/mlflow.txt -r requirements/sweep.txt -r requirements/dev.txt
	$(BIN)/python -m pip install --no-deps --no-build-isolation --disable-pip-version-check --quiet --editable .
	$(BIN)/python -m trainer.doctor
	touch $@

# A folder of its own before .venv's: what references need beyond .venv never gets into it.
$(PARITY)/installed: requirements/parity.txt $(STAMP)
	rm -rf $(PARITY)
	$(BIN)/python -m pip install --no-deps --disable-pip-version-check --quiet --target $(PARITY) -r $<
	touch $@

# An environment of its own: MkDocs needs other versions of what .venv holds too.
$(DOCS)/installed: requirements/docs.txt $(STAMP)
	rm -rf $(DOCS)
	"$(PYTHON)" -m venv $(DOCS)/venv
	$(DOCS)/venv/bin/python -m pip install --no-deps --disable-pip-version-check --quiet -r $<
	touch $@
