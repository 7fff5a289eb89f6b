"""A real vLLM engine in this process, one for each file: `make test-vllm` runs every file in a process of its own."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# The environment of `make test` has no vLLM, and runs the other tests in this process.
collect_ignore_glob: list[str] = []
if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # One thread, and no cores of its own: other tests run beside these.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # If it is set, a second data parallel rank needs no second memory node.
    os.environ.setdefault("VLLM_CPU_SIM_MULTI_NUMA", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture(scope="session")
def tiny_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, with heads of a size that vLLM's attention for CPUs has."""
    from tests.vllm.models import checkpoint

    return checkpoint("tiny", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for a text that does not end while somebody acts. In Triton's interpreter each row of a step costs time
    with the vocabulary's size, so servers run this one."""
    from tests.vllm.models import checkpoint

    return checkpoint("tiny", tmp_path_factory.mktemp("models"), max_context_len=1024)
