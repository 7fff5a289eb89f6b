"""What every test may use."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests import running

# Modules that every worker of xdist, and every process that a test starts, imports: compiled once.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

NOBODY = "127.0.0.1:1"
# What is costly to make again: converted models and compiled kernels.
_KEPT = ("OUTRIDER_CACHE", "OUTRIDER_KERNELS")

# An example takes as long as a machine with other work needs. Tests on GPUs and of vLLM run without the package.
with suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("outrider", deadline=None)
    settings.load_profile("outrider")
# One core for a test's model leaves the other to the process it talks to.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As `keep_to_vector_code` of the engine does: oneDNN reads it at its first product, which another test may make.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Triton reads it when it is first imported, whoever does that. With a GPU its kernels are compiled: see tests/gpu.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# At DEBUG gRPC's core logs each event of each loop, from its own threads, and pytest keeps every record.
logging.getLogger("grpc").setLevel(logging.INFO)

# Nobody listens on port 1. A stack of the developer's own may listen on the default ports.
for name in [name for name in os.environ if name.startswith("OUTRIDER_") and name not in _KEPT]:
    del os.environ[name]
for name in ("OUTRIDER_GATEWAY", "OUTRIDER_CONTROL"):
    os.environ[name] = NOBODY
for name in ("OUTRIDER_UP_HTTP_PORT", "OUTRIDER_UP_GRPC_PORT", "OUTRIDER_UP_CONTROL_PORT"):
    os.environ[name] = "0"

HERE = Path(__file__).parent
# Where `make prometheus` unpacks promtool and Prometheus.
os.environ["PATH"] = f"{HERE.parent / 'build/prometheus/usr/bin'}:{os.environ['PATH']}"


# Until the tests begin, everything that is made stays: the collector would look through it again and again for nothing.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(running)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test bears the name of its tier, which is the folder it lies in; a soak is slow by nature."""
    for item in items:
        tier = item.path.relative_to(HERE).parts[0]
        item.add_marker(tier)
        if tier == "soak":
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # Otherwise what is freed when the interpreter ends would count as leaked.
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny real checkpoint, made once."""
    from outrider.testing.tiny import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
