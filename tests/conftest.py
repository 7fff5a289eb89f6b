"""What every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# One core for a test's model leaves the other to the process it talks to.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton reads it when it is first imported, whoever does that. With a GPU its kernels are compiled: see tests/gpu.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny real checkpoint, made once."""
    from outrider.testing.tiny import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
