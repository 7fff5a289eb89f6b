"""How long a target's requests may be: what its KV cache holds of the model's context."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from outrider.engine import CheckpointError, EngineConfig
from outrider.rpc.v1 import worker_pb2
from outrider.target.config import TargetConfig
from outrider.target.process import load


def info(tiny: Path, num_blocks: int) -> worker_pb2.WorkerInfo:
    engine = EngineConfig(dtype="float32", num_blocks=num_blocks)
    return load(TargetConfig(model=str(tiny), listen="127.0.0.1:0", engine=engine))[1]


@pytest.mark.parametrize(("num_blocks", "longest"), [(20, 320), (32, 512), (64, 512)])
def test_a_context_is_what_the_cache_holds_of_it(tiny: Path, num_blocks: int, longest: int) -> None:
    assert info(tiny, num_blocks).max_context_len == longest


def test_a_smaller_one_is_told(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        info(tiny, 20)
    assert "at most 320 tokens of the model's 512" in caplog.text


def test_a_cache_without_room_for_one_short_request_is_refused(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="kv_cache_bytes: the KV cache holds 240 tokens"):
        info(tiny, 15)
