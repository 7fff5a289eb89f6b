"""What every test may use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

# One core for a test's model leaves the other to the process it talks to.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton reads it when it is first imported, whoever does that. With a GPU its kernels are compiled: see tests/gpu.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test bears the name of its tier, which is the folder it lies in; a soak is slow by nature."""
    for item in items:
        tier = item.path.relative_to(HERE).parts[0]
        item.add_marker(tier)
        if tier == "soak":
            item.add_marker("slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file goes to one worker as a whole, and so do all that share the stack of the e2e tier."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "tests/e2e" if nodeid.startswith("tests/e2e/") else str(super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny real checkpoint, made once."""
    from outrider.testing.tiny import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
