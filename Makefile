# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. They work in .venv, without root, a GPU, the Hub or a container; only
# `make test-container` needs podman or docker, and `make test-page` a Chromium.

# The first Python that fits: the server's Python stub needs numpy below 2, which has wheels for 3.11 and 3.12.
IS_FIT := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do $$p -c '$(IS_FIT)' 2>/dev/null && echo $$p && break; done)
# The image's Python, on PATH or of pyenv, whose own python3.12 may not run.
PYTHON312 ?= $(shell for p in python3.12 $$(ls -d $$(pyenv root 2>/dev/null)/versions/3.12*/bin/python3.12 2>/dev/null); do \
  $$p -c 'import ensurepip, ssl, sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo $$p && break; done)
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
OPENAI_PORT ?= 9000
# A model repository to serve in place of the demo model.
MODELS ?=
TESTS ?= tests

# Each worker, command and model's process would compile all modules that it imports if none may be kept.
unexport PYTHONDONTWRITEBYTECODE

# Modules run in parallel (tests/conftest.py says which of them on one worker), then the tests that measure time alone.
# One worker more than CI's cores, as many tests wait for servers. With less than 24 GB of memory, WORKERS=2.
# Exit status 5: TESTS has no such test. RECORD is a folder for the results of each part as JUnit's XML.
WORKERS ?= 3
RECORD ?=
record = $(if $(RECORD),--junitxml=$(RECORD)/$(1).xml)
# The chat page has a target of its own.
PAGE := tests/openai/test_page*.py
define pytest
	$(BIN)/pytest --durations=40 -n $(WORKERS) --dist loadscope --no-loadscope-reorder -m "not serial and $(1)" $(TESTS) \
	  $(if $(filter tests,$(TESTS)),--ignore-glob='*/$(PAGE)') $(call record,$@) || test $$? -eq 5
	$(BIN)/pytest -m "serial and $(1)" $(TESTS) $(call record,$@-serial) || test $$? -eq 5
endef

VENV := .venv
BIN := $(VENV)/bin
# uv installs faster than pip, and takes PyTorch for this machine; UV_TORCH_BACKEND=cpu is the small build, and `make UV= ...`
# takes pip. Modules are compiled when they are imported, which halves the work.
UV := $(shell command -v uv)
export UV_TORCH_BACKEND ?= auto
INSTALL := $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/pip install --no-compile) --constraint constraints.txt --editable
TORCH := $(if $(UV),uv takes PyTorch for this machine,without a GPU set PIP_EXTRA_INDEX_URL to PyTorch's CPU index: 1.5 GB in place of 6)
SERVER := $(VENV)/.server
SETUP := $(VENV)/.set-up
PERF_ANALYZER := .venv/perf_analyzer/.set-up
LITELLM := .venv/litellm/.set-up
GENAI_PERF := .venv/genai_perf/.set-up
AIPERF := .venv/aiperf/.set-up
FRAMEWORKS := .venv/frameworks/.set-up
NPM := .venv/npm/.set-up
AGENTS := .venv/agents/.set-up
INSTRUCTOR := .venv/instructor/.set-up
AIDER := .venv/aider/.set-up
CODING_AGENTS := .venv/coding_agents/.set-up
GPTQ := .venv/gptq/.set-up
PROGRAMS := .venv/programs/.set-up
RAY := .venv/ray/.set-up
TRITON := .venv/triton/.set-up
TORCHVISION := .venv/torchvision/.set-up

.PHONY: help setup setup-python312 ports serve test test-all test-python312 on-python312 test-clients bench soak check format docs lock test-gptq test-ray test-page \
  test-container wheel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(SETUP) ## Make .venv with everything in it

# An empty environment, in which others are made too.
IS_OWN := test ! -L .venv || { echo ".venv is a link: run make setup in the checkout that it belongs to" >&2; exit 1; }
$(BIN)/pip:
	@$(IS_OWN)
	@$(or $(PYTHON),false) -c '$(IS_FIT)' 2>/dev/null || \
	  { echo "Python 3.11 or 3.12 is needed: install one, or say which: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)

# What serving needs.
$(SERVER): pyproject.toml constraints.txt | $(BIN)/pip
	@$(IS_OWN)
	@echo "Setting up $(VENV) with PyTorch and the server, which takes minutes ($(TORCH))."
	$(INSTALL) '.[server]'
	@touch $@

# What the tests need too.
$(SETUP): $(SERVER)
	$(INSTALL) '.[dev]'
	@$(BIN)/python -W ignore -m compileall -q -j 0 -x '/tests/' $(VENV)/lib > /dev/null || true  # here tests take warnings as errors
	@touch $@

# A set-up takes minutes: ports in use are told before it.
ARE_FREE := import sys; from hf_triton.server import busy_ports; busy = busy_ports(list(map(int, sys.argv[1:]))); \
  sys.exit(f"in use: {busy}; try make serve HTTP_PORT=8010 GRPC_PORT=8011 METRICS_PORT=8012 OPENAI_PORT=9010" if busy else 0)
ports:
	@test -e $(SERVER) || $(or $(PYTHON),true) -c '$(ARE_FREE)' $(HTTP_PORT) $(GRPC_PORT) $(METRICS_PORT) $(OPENAI_PORT)

serve: ports $(SERVER) ## Serve the demo model, or the folders in MODELS=...; HTTP_PORT=8010 OPENAI_PORT=9010 if ports are taken
	@exec $(BIN)/hf-triton serve $(MODELS) --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) \
	  --metrics-port $(METRICS_PORT) --openai-port $(OPENAI_PORT)

test: $(SETUP) $(PERF_ANALYZER) $(PROGRAMS) ## Run the tests; TESTS=tests/unit for some of them
	$(call pytest,not container and not full)

test-all: $(SETUP) $(PERF_ANALYZER) $(PROGRAMS) $(TRITON) $(TORCHVISION) ## Run every test but the page's: all architectures, the simulated GPU, a short soak
	$(call pytest,not container)

# What another Python can break is how a module is compiled and imported, Triton's stub, threads and event loops: each client
# and stream of Triton once, a download from the Hub, encoders, and each API, disconnect and process of a gateway.
ON_PYTHON312 := $(addprefix tests/server/test_,clients.py requested_outputs.py streaming.py encoders.py) \
  $(addprefix tests/openai/test_,chat.py completions.py disconnect.py http.py messages.py responses.py restart.py \
  run_batch.py)
OF_PYTHON312 = VENV=.venv/python312 PYTHON=$(PYTHON312)
test-python312: setup-python312 ## Test what another Python can break on Python 3.12, if there is one (6 GB)
	$(if $(PYTHON312),$(MAKE) $(OF_PYTHON312) TESTS="$(ON_PYTHON312)" on-python312)

setup-python312: | $(BIN)/pip
	$(if $(PYTHON312),$(MAKE) $(OF_PYTHON312) setup,\
	  @echo "test-python312 is skipped: there is no Python 3.12 that runs; make test-python312 PYTHON312=/path/to/python3.12")

on-python312: $(SETUP)
	$(call pytest,not container and (not full or python312))

# perf_analyzer comes in an older client wheel, and finds two libraries in the server's wheel.
$(PERF_ANALYZER): $(SETUP)
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv/perf_analyzer tritonclient==2.51.0
	@libs=$$($(BIN)/python -c 'import pathlib, pytriton; print(pathlib.Path(pytriton.__file__).parents[1] / "nvidia_pytriton.libs")'); \
	  ln -sf $$libs/libb64-*.so.0d .venv/perf_analyzer/bin/libb64.so.0d; \
	  ln -sf $$libs/libcudart-*.so.12* .venv/perf_analyzer/bin/libcudart.so.12
	@touch $@

$(PROGRAMS): $(SETUP) tests/server/programs.sh
	tests/server/programs.sh $(@D)
	@touch $@

# Triton's language, whose interpreter runs the kernels of GPUs; apart, because torch would use it (700 MB).
$(TRITON): $(SETUP)
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(@D) triton==3.7.1
	@touch $@

# Processors with a video part need it. Apart, as the build for CUDA, beside torch for a CPU, breaks transformers' import
# unless its operators are declared first (24 MB).
$(TORCHVISION): $(SETUP) tests/support/torchvision_operators.py
	rm -rf $(@D)
	$(BIN)/pip install --quiet --no-deps --target $(@D) torchvision==0.28.0
	cat tests/support/torchvision_operators.py $(@D)/torchvision/__init__.py > $(@D)/declared.py
	mv $(@D)/declared.py $(@D)/torchvision/__init__.py
	@touch $@

CLIENTS := $(LITELLM) $(GENAI_PERF) $(AIPERF) $(FRAMEWORKS) $(NPM) $(AGENTS) $(INSTRUCTOR) $(AIDER) $(CODING_AGENTS)
test-clients: $(SETUP) $(PERF_ANALYZER) $(CLIENTS) ## Run other clients, frameworks and coding agents (4 GB, npm)
	REQUIRE_CLIENTS=1 $(BIN)/pytest tests/server/test_dialects.py tests/openai/test_clients_frameworks.py \
	  tests/openai/test_client_loops.py tests/openai/test_client_coding_agents.py \
	  tests/openai/test_encoders.py \
	  tests/cli/test_bench.py tests/deploy/test_kserve.py

# They need other versions of packages in .venv.
$(LITELLM): $(SETUP)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet litellm==1.106.2 mcp==2.3.0
	@touch $@

$(GENAI_PERF): $(SETUP)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet genai-perf==0.0.16
	@touch $@

$(AIPERF): $(SETUP)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet aiperf==0.13.0
	@touch $@

$(FRAMEWORKS): $(SETUP)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet langchain-openai==1.7.4 llama-index-llms-openai-like==0.8.1 cohere==7.3.1 \
	  llama-index-embeddings-text-embeddings-inference==0.6.0 llama-index-postprocessor-tei-rerank==0.6.0 kubernetes==37.0.2
	$(@D)/bin/pip install --quiet --no-deps kserve==0.21.0  # its models are all that is read
	@touch $@

$(NPM): $(SETUP)
	npm install --silent --no-audit --no-fund --prefix $(@D) openai@6.49.0
	@touch $@

$(AGENTS): $(SETUP)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet openai-agents==0.24.0 'pydantic-ai-slim[openai,anthropic]==2.68.0' langgraph==1.2.24 \
	  langchain-openai==1.7.4 huggingface_hub==2.4.0
	@touch $@

$(INSTRUCTOR): $(SETUP)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet instructor==1.17.0
	@touch $@

$(AIDER): $(SETUP)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet aider-chat==0.86.2
	@touch $@

$(CODING_AGENTS): $(SETUP)
	npm install --silent --no-audit --no-fund --prefix $(@D) @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.332 \
	  opencode-ai@1.18.33 @continuedev/cli@1.5.47
	@touch $@

test-gptq: $(SETUP) $(GPTQ) ## Test checkpoints of GPTQ and AWQ (45 MB; compiles a C extension)
	REQUIRE_CLIENTS=1 $(BIN)/pytest tests/server/test_gptq.py

$(GPTQ): $(SETUP) requirements-gptq.txt
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(@D) --requirement requirements-gptq.txt
	@touch $@

test-ray: $(SETUP) $(RAY) ## Test replicas on Ray Serve (330 MB)
	REQUIRE_CLIENTS=1 $(BIN)/pytest tests/deploy/test_ray.py

# It sees the packages of .venv, and adds Ray's.
$(RAY): $(SETUP)
	$(BIN)/python -m venv $(@D)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth
	$(@D)/bin/pip install --quiet --constraint constraints.txt 'ray[serve]==2.60.0'
	@touch $@

check: $(SETUP) ## Check format, lint, types, import contracts, the Dockerfile, and GitHub's files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile deploy/gateway/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml

format: $(SETUP) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(SETUP) ## Measure the engine and the server; figures and plots go to .venv/bench
	$(INSTALL) '.[bench]'
	$(BIN)/python benchmarks/engine.py --out .venv/bench
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/server.py --out .venv/bench
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gateway.py --beside --out .venv/bench/gateway.json

soak: $(SETUP) ## Send 20,000 requests of all kinds and watch the memory
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py

docs: $(SETUP) ## Write the generated tables of README.md and docs/
	$(BIN)/python scripts/render_docs.py
	$(BIN)/python scripts/make_dashboard.py

# For the Python and the C library of NVIDIA's image; hatchling builds the package in it.
EXTRAS := audio cli cpu cuda gateway gguf image lora model optimize quantized tracing
COMPILE = uv pip compile --quiet --no-config --python-version 3.12 --python-platform x86_64-manylinux_2_39 --generate-hashes \
  --only-binary :all: --no-annotate --no-header --constraint constraints.txt
lock: ## Write the hashes of the images' packages (uv, an index)
	echo torch | env -u UV_TORCH_BACKEND $(COMPILE) - --output-file requirements-torch.txt
	echo hatchling | env -u UV_TORCH_BACKEND $(COMPILE) pyproject.toml - $(addprefix --extra ,$(EXTRAS)) \
	  --constraint requirements-torch.txt $$(sed -n 's/==.*//p' requirements-torch.txt | sed 's/^/--no-emit-package /') \
	  --output-file requirements-image.txt
	echo hatchling | env -u UV_TORCH_BACKEND $(COMPILE) pyproject.toml - --extra gateway --extra tracing \
	  --constraint requirements-image.txt --output-file requirements-gateway.txt

test-page: $(SETUP) ## Test the chat page in a headless Chromium
	tests/openai/setup.sh
	REQUIRE_CHROMIUM=1 $(BIN)/pytest -n 2 --dist loadscope --no-loadscope-reorder $(PAGE) $(call record,$@)

# The base's Python is PYTHON312 where pip's settings offer torch's CPU build for it, else Debian's 3.11.
test-container: export PYTHON312 := $(PYTHON312)
test-container: $(SETUP) ## Build the container image on a stand-in base and try it (podman or docker)
	tests/container/setup.sh
	REQUIRE_CONTAINER=1 $(BIN)/pytest -m container tests/container $(call record,$@)

wheel: $(SERVER) ## Build the wheel in dist/; PROJECT_URL=https://... is the repository's address in its metadata
	$(BIN)/pip wheel --no-deps --wheel-dir dist .

clean: ## Remove .venv and caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
