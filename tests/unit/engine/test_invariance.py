"""A token's logits are the same bits, however many are verified with it and whoever shares the step."""

from __future__ import annotations

import random

import pytest
import torch
from outrider.engine import Engine, EngineConfig, EngineSequence, Row
from outrider.engine.backends.cpu import runnable_variants
from outrider.engine.loading.loader import load_engine
from outrider.testing.tiny import tiny_checkpoint
from torch import Tensor

from tests.unit.engine.test_supported_models import made
from tests.unit.engine.variants import skip_what_cannot_run, slow_but_the_best

LENGTH, PROMPT = 760, 490
TOKENS = [random.Random(i).randrange(3, 300) for i in range(LENGTH)]


@pytest.fixture(
    scope="module",
    params=[
        "bfloat16 fused",
        pytest.param("float32 fused", marks=pytest.mark.slow),
        # In float32 too.
        "windowed fused",
        *slow_but_the_best(),
    ],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Rows of the down projection longer than oneDNN sums in one go; context longer than attention takes in one."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("wide"), intermediate_size=1536, max_context_len=1024)
    skip_what_cannot_run(request.param.split()[-1])
    if request.param in runnable_variants():
        config = EngineConfig(execution="native", native_variant=request.param, num_blocks=300, prefix_cache=False)
        return load_engine(path, config)
    dtype, execution = request.param.split()
    if dtype == "windowed":
        # At the end of the text, all that attention takes in at first lies before the window.
        settings = {"sliding_window": 100, "intermediate_size": 1536, "max_position_embeddings": 1024}
        path, dtype = made("mistral", settings, tmp_path_factory.mktemp("windowed")), "float32"
    return load_engine(path, EngineConfig(dtype=dtype, execution=execution, num_blocks=300, prefix_cache=False))


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Tensor:
    """Logits of plain decoding: one token at a time, from PROMPT on."""
    return logits_of(engine, [1] * (LENGTH - PROMPT))


def logits_of(engine: Engine, sizes: list[int], beside: list[EngineSequence] | None = None) -> Tensor:
    """Logits from PROMPT on when the text is run in steps of these sizes, beside other sequences' rows."""
    sequence = engine.kv.open([])
    engine.forward([Row(sequence, TOKENS[:PROMPT], 0)])
    found = []
    for size in sizes:
        start = sequence.cached_len
        others = [Row(other, TOKENS[: 1 + number], 1) for number, other in enumerate(beside or [])]
        row = Row(sequence, TOKENS[start : start + size], size)
        found.append(engine.forward([row, *others])[:size])
    engine.kv.close(sequence)
    return torch.cat(found)


@pytest.mark.parametrize("size", [2, 3, 5, 6, 9, 11, 16, 22, 43])
def test_verifying_many_gives_the_bits_of_decoding_one(engine: Engine, alone: Tensor, size: int) -> None:
    steps = (LENGTH - PROMPT) // size
    assert torch.equal(logits_of(engine, [size] * steps), alone[: size * steps])


def test_the_batch_does_not_show(engine: Engine, alone: Tensor) -> None:
    beside = [engine.kv.open([]) for _ in range(3)]
    got = logits_of(engine, [4] * 60, beside)
    for other in beside:
        engine.kv.close(other)
    assert torch.equal(got, alone[:240])


@pytest.mark.parametrize("chunk", [32, 65, 100, 256])
def test_recomputing_a_text_in_chunks_gives_its_bits(engine: Engine, alone: Tensor, chunk: int) -> None:
    sequence = engine.kv.open([])
    for start in range(0, LENGTH - 1, chunk):
        engine.forward([Row(sequence, TOKENS[start : min(start + chunk, LENGTH - 1)], 0)])
    last = engine.forward([Row(sequence, TOKENS[-1:], 1)])
    engine.kv.close(sequence)
    assert torch.equal(last, alone[-1:])
