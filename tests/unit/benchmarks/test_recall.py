"""What is recalled is what would have been computed, and is not computed again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from outrider.drafters import ModelDrafter
from outrider.engine import Engine, EngineConfig, Row
from outrider.engine.loading.loader import load_engine
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import SamplingParams, VerificationMode
from outrider.testing.tiny import tiny_checkpoint

from benchmarks.support.recall import RecallingEngine

# Of the benchmarks' own machine.
pytestmark = pytest.mark.slow

TEXT = [int(token) for token in torch.randint(3, 259, (40,), generator=torch.Generator().manual_seed(1))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_engine(checkpoint: Path) -> Engine:
    return load_engine(checkpoint, EngineConfig(dtype="float32", num_blocks=64, prefix_cache=False))


def logits_of(engine: Engine) -> list[torch.Tensor]:
    """A prompt in two parts, a few tokens, a rewind, another way on, both at once, and a tree, partly kept."""
    sequence = engine.kv.open([])
    engine.forward([Row(sequence, TEXT[:20], 0)])
    found = [engine.forward([Row(sequence, TEXT[20:23], 2)]).clone()]
    other = engine.kv.open([])
    engine.forward([Row(other, TEXT[:22], 0)])
    engine.kv.rewind(sequence, 21)
    found.append(engine.forward([Row(sequence, TEXT[30:33], 3), Row(other, TEXT[33:34], 1)]).clone())
    tree = Row(sequence, [TEXT[35], 7, 8, 9], 4, parents=[-1, 0, 0])
    found.append(engine.forward([tree]).clone())
    engine.kv.keep(sequence, [0, 2])
    found.append(engine.forward([Row(sequence, TEXT[36:37], 1)]).clone())
    engine.kv.close(other)
    engine.kv.close(sequence)
    return found


def test_what_is_recalled_is_what_would_have_been_computed(checkpoint: Path) -> None:
    plain, recalling = make_engine(checkpoint), RecallingEngine(make_engine(checkpoint))
    expected = logits_of(plain)
    for _ in range(2):
        for found, wanted in zip(logits_of(recalling), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert recalling.num_computed == 4, "the second time all is known"
    assert recalling.num_recalled == 8, "nobody wants to know anything of two of the parts, either time"
    assert recalling.kv.num_free_blocks == plain.kv.num_free_blocks - 2, "those of what was computed last"


def test_recalling_takes_as_long_as_computing_did(checkpoint: Path) -> None:
    engine = RecallingEngine(make_engine(checkpoint))
    logits_of(engine)
    engine.forward_s = [0.05] * 20
    began_s = time.perf_counter()
    logits_of(engine)
    assert time.perf_counter() - began_s >= 0.15


def test_a_drafter_says_the_same(checkpoint: Path) -> None:
    said = []
    for engine in (make_engine(checkpoint), RecallingEngine(make_engine(checkpoint))):
        drafter = ModelDrafter(engine)
        opening = SequenceSpec(TEXT, SamplingParams(temperature=0), VerificationMode.GREEDY, speculation=Speculation(5))
        [drafted] = drafter.draft([drafter.open(opening)])
        assert drafted is not None and drafted.token_ids
        said.append(drafted.token_ids)
    assert said[0] == said[1]
