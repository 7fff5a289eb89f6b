"""Triton's kernels on a machine without a GPU: its interpreter runs them."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def interpreted() -> None:
    """Skips without Triton, or where a GPU is, whose kernels an interpreter in the same process would replace."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: tests/gpu runs the kernels themselves")
