"""What a process takes beside its model is a part of the memory plan on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider.engine import EngineConfig
from outrider.engine.loading.loader import load_engine
from outrider.engine.models.memory import DoesNotFit


def test_a_model_that_leaves_no_memory_for_the_rest_does_not_fit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 64 << 20
    monkeypatch.setattr("outrider.engine.loading.loader.available_bytes", lambda device: free)
    assert load_engine(tiny, EngineConfig(dtype="float32", num_blocks=4), host_bytes=free // 2)
    with pytest.raises(DoesNotFit):
        load_engine(tiny, EngineConfig(dtype="float32", num_blocks=4), host_bytes=free)
