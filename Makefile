# Every target sets up what it needs; run again, it finds it done.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: demo prometheus proto-baseline test test-all test-aarch64 chart-check loadtest docs linkcheck lint proto clean

# torch first, by an exact pin: a plain "torch" pulls gigabytes of CUDA onto a machine without a GPU.
TORCH ?= torch==2.13.0

$(VENV)/.ready: pyproject.toml hatch_build.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[engine,gateway,controller,embedded,quantization,structured,vllm-grpc,otel,loadtest,dev]"
	touch $@

$(VENV)/.proto: $(VENV)/.ready $(wildcard proto/outrider/rpc/v1/*.proto)
	$(BIN)/python hatch_build.py
	touch $@

proto: $(VENV)/.proto

# What the last release speaks: from now on every change to proto/ has to be one that its processes understand.
proto-baseline: $(VENV)/.proto
	$(BIN)/buf build --exclude-source-info --output proto/baseline.binpb

demo: proto
	$(BIN)/outrider demo $(ARGS)

# Two workers a core, each with whole files: half of the time they wait for processes. More than eight cost more to start
# than they bring.
WORKERS ?= $(shell echo $$((2 * $$(nproc))))
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

# Debian's Prometheus with promtool, unpacked and not installed: tests of alerts, dashboards and metrics that need it are
# skipped where the PATH has none.
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
