"""Tests on a real GPU. They need PyTorch, Triton, transformers, pytest with pytest-timeout, and of the package's other
dependencies protobuf, prometheus-client and psutil; and its generated code, which `make proto` writes anywhere.

PYTHONPATH=services python -m pytest tests/gpu
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def _why_not() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is set: kernels would be interpreted, not run"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if reason and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    return torch.device("cuda")
