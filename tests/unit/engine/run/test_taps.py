"""Hidden states that heads draft from: those of transformers, and a chain's along a tree's paths."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from outrider.engine import HEAD_INPUT, Engine, EngineConfig, EngineSequence, Row
from outrider.engine.loading.loader import load_engine
from outrider.testing.tiny import tiny_checkpoint
from transformers import AutoModelForCausalLM

from tests.unit.engine.variants import slow_but_the_best

TEXT = [random.Random(i).randrange(3, 259) for i in range(40)]
LAYERS = 3
TAPS = (2, 0, LAYERS, HEAD_INPUT)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), layers=LAYERS)


@pytest.fixture(scope="module", params=["transformers", "fused", *slow_but_the_best()])
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Engine:
    if request.param in ("transformers", "fused"):
        return load_engine(checkpoint, EngineConfig(dtype="float32", execution=request.param, num_blocks=32))
    if shutil.which("cc") is None:
        pytest.skip("no compiler")
    return load_engine(checkpoint, EngineConfig(execution="native", native_variant=request.param, num_blocks=32))


def expected(checkpoint: Path, text: list[int]) -> torch.Tensor:
    """[tokens, taps * width], by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    taken = {}
    model.model.norm.register_forward_pre_hook(lambda _, args: taken.update({LAYERS: args[0][0]}))
    with torch.inference_mode():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    taken |= {0: states[0][0], 2: states[2][0], HEAD_INPUT: states[-1][0]}
    return torch.cat([taken[layer] for layer in TAPS], -1)


def tolerance(engine: Engine) -> float:
    return 1e-4 if engine.info.dtype == "float32" else 3e-2


def test_taps_are_the_states_that_enter_the_layers(engine: Engine, checkpoint: Path) -> None:
    """Also of more tokens than have logits, as in a chunk of prefill, and beside a row that gives none."""
    sequence, other = engine.kv.open([]), engine.kv.open([])
    rows = [Row(other, [9, 8], 1), Row(sequence, TEXT[:30], 0, num_tapped=30)]
    logits, first = engine.forward_tapped(rows, TAPS)
    assert len(logits) == 1
    _, rest = engine.forward_tapped([Row(sequence, TEXT[30:], 1, num_tapped=5)], TAPS)
    want = expected(checkpoint, TEXT)
    got = torch.cat([first, rest]).float()
    error = (got - torch.cat([want[:30], want[-5:]])).abs().max()
    assert error <= tolerance(engine) * want.abs().max()


def test_taps_of_a_tree_come_in_its_order_with_the_bits_of_chains(engine: Engine) -> None:
    nodes, parents = [7, 8, 9, 10, 11], [-1, -1, 1, 0, 2]
    sequence = engine.kv.open([])
    engine.forward([Row(sequence, TEXT[:20], 0)])
    _, got = engine.forward_tapped([Row(sequence, [TEXT[20], *nodes], 6, num_tapped=6, parents=parents)], TAPS)
    for path in ([0, 2, 3, 5], [0, 1, 4]):
        chain = engine.kv.open([])
        engine.forward([Row(chain, TEXT[:20], 0)])
        tokens = [([TEXT[20], *nodes])[at] for at in path]
        _, want = engine.forward_tapped([Row(chain, tokens, 1, num_tapped=len(tokens))], TAPS)
        if engine.info.execution.startswith("native"):
            assert torch.equal(got[path], want)
        else:
            torch.testing.assert_close(got[path], want, rtol=1e-4, atol=1e-4)


def test_logits_are_the_same_with_and_without(engine: Engine) -> None:
    first, second = engine.kv.open([]), engine.kv.open([])
    want = engine.forward([Row(first, TEXT, 2)]).clone()
    got, _ = engine.forward_tapped([Row(second, TEXT, 2, num_tapped=1)], TAPS)
    assert torch.equal(got, want)


def test_a_layer_that_the_model_lacks_is_named(engine: Engine) -> None:
    with pytest.raises(ValueError, match="taps: the model has no layer 7"):
        engine.forward_tapped([Row(engine.kv.open([]), TEXT, 1, num_tapped=1)], (2, 7))


def test_no_more_tokens_are_tapped_than_are_run() -> None:
    with pytest.raises(ValueError, match="num_tapped"):
        Row(EngineSequence(), [5, 6], 1, num_tapped=3)
