"""What the drafters' tests share: openings, and a plain decoder to compare with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from outrider.engine import Engine, EngineConfig, Row
from outrider.engine.loading.loader import load_engine
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import SamplingParams, VerificationMode

MakeEngine = Callable[..., Engine]
Continue = Callable[[list[int], int], list[int]]


@pytest.fixture
def make_engine(tiny: Path) -> MakeEngine:
    def make(**config: object) -> Engine:
        return load_engine(tiny, EngineConfig(**{"dtype": "float32", "num_blocks": 64, **config}))  # type: ignore[arg-type]

    return make


@pytest.fixture
def greedy_continuation(make_engine: MakeEngine) -> Continue:
    """What the tiny model itself says, token by token, from a fresh KV cache."""
    engine = make_engine()

    def go_on(prompt: list[int], count: int) -> list[int]:
        kv, output, feed = engine.kv.open(prompt), [], list(prompt)
        feed = feed[kv.cached_len :]
        for _ in range(count):
            feed = [int(engine.forward([Row(kv, feed, 1)])[0].argmax())]
            output += feed
        engine.kv.close(kv)
        return output

    return go_on


@pytest.fixture
def greedy() -> Callable[..., SequenceSpec]:
    """A greedy opening that may draft four tokens, unless told otherwise."""

    def make(prompt: list[int], max_draft_tokens: int = 4, **more: object) -> SequenceSpec:
        settings = {
            "speculation": Speculation(max_draft_tokens),
            "params": SamplingParams(temperature=0),
            "mode": VerificationMode.GREEDY,
        }
        return SequenceSpec(prompt, **{**settings, **more})  # type: ignore[arg-type]

    return make
