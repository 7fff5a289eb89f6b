"""Tokens run beside a row: the bits of plain decoding, whichever is followed, and every block comes back."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from outrider.engine import Engine, EngineConfig, EngineSequence, OutOfBlocks, Row, Sibling
from outrider.engine.loader import load_engine
from outrider.testing.tiny import tiny_checkpoint
from torch import Tensor

LENGTH, PROMPT = 180, 75
TEXT = [random.Random(i).randrange(3, 300) for i in range(LENGTH)]
WRONG = 2


def skip_what_cannot_run(execution: str) -> None:
    if execution == "fused" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("which shapes sum alike in torch is known of AVX-512 only")
    if execution != "fused" and shutil.which("cc") is None:
        pytest.skip("no compiler")


@pytest.fixture(
    scope="module",
    params=["fused bfloat16", "fused float32"],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tiny_checkpoint(tmp_path_factory.mktemp("model"), max_context_len=256)
    execution, how = request.param.split()
    skip_what_cannot_run(execution)
    yield load_engine(path, EngineConfig(dtype=how, execution=execution, num_blocks=64))


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Tensor:
    """Logits of plain decoding, from the prompt's last token on."""
    sequence = engine.kv.open([])
    engine.forward([Row(sequence, TEXT[: PROMPT - 1], 0)])
    found = [engine.forward([Row(sequence, [token], 1)]).clone() for token in TEXT[PROMPT - 1 :]]
    engine.kv.close(sequence)
    return torch.cat(found)


def begin(engine: Engine) -> EngineSequence:
    sequence = engine.kv.open([])
    engine.forward([Row(sequence, TEXT[: PROMPT - 1], 0)])
    return sequence


def step(engine: Engine, sequence: EngineSequence, guess: list[int], siblings: list[Sibling]) -> Tensor:
    """Logits of the last committed token, of the guess after it and of its siblings, as a target runs them."""
    committed = TEXT[sequence.cached_len]
    return engine.forward([Row(sequence, [committed, *guess], len(guess) + 1, siblings)])


@pytest.mark.parametrize("right", [0, 1, 2])
def test_a_sibling_that_is_followed_leaves_what_plain_decoding_would(engine: Engine, alone: Tensor, right: int) -> None:
    """Across every place in a block: the guess is right up to `right` tokens, and its sibling there is the text."""
    free, sequence = engine.kv.num_free_blocks, begin(engine)
    while (at := sequence.cached_len) + 6 < LENGTH:
        guess = [*TEXT[at + 1 : at + 1 + right], WRONG, WRONG]
        siblings = [Sibling(0, 1), Sibling(right, TEXT[at + right + 1]), Sibling(right + 1, 1)]
        logits = step(engine, sequence, guess, siblings)
        want = alone[at - PROMPT + 1 :]
        assert torch.equal(logits[: right + 1], want[: right + 1])
        assert torch.equal(logits[len(guess) + 2], want[right + 1]), at
        engine.kv.accept_branch(sequence, 1)
        engine.kv.rewind(sequence, at + right + 2)
        assert sequence.tokens == TEXT[: at + right + 2]
        engine.kv.publish(sequence, sequence.cached_len)
    engine.kv.close(sequence)
    assert engine.kv.num_free_blocks == free


def test_siblings_that_are_not_followed_leave_nothing(engine: Engine, alone: Tensor) -> None:
    free, sequence = engine.kv.num_free_blocks, begin(engine)
    while (at := sequence.cached_len) + 4 < LENGTH:
        logits = step(engine, sequence, TEXT[at + 1 : at + 3], [Sibling(0, WRONG), Sibling(1, 1), Sibling(2, WRONG)])
        assert torch.equal(logits[:3], alone[at - PROMPT + 1 :][:3])
        engine.kv.rewind(sequence, at + 3)
    # The last forward's are held until something is done with the sequence.
    step(engine, sequence, [], [Sibling(0, WRONG)])
    engine.kv.close(sequence)
    assert engine.kv.num_free_blocks == free


def test_rows_do_not_see_each_others_siblings(engine: Engine, alone: Tensor) -> None:
    first, second = begin(engine), begin(engine)
    at = first.cached_len
    rows = [
        Row(first, TEXT[at : at + 2], 2, [Sibling(0, TEXT[at + 1]), Sibling(1, TEXT[at + 2])]),
        Row(second, TEXT[at : at + 1], 1, [Sibling(0, TEXT[at + 1])]),
    ]
    logits = engine.forward(rows)
    want = alone[at - PROMPT + 1 :]
    assert torch.equal(logits, torch.stack([want[n] for n in (0, 1, 1, 2, 0, 1)]))
    for sequence in (first, second):
        engine.kv.close(sequence)


@pytest.mark.usefixtures("interpreted")
def test_on_a_gpus_kernels_a_sibling_is_what_a_chain_would_be(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, max_context_len=256)
    engine, chain = (
        load_engine(path, EngineConfig(dtype="float32", num_blocks=32, attention=attention))
        for attention in ("triton", "sdpa")
    )
    at, tokens = 21, TEXT[:26]
    beside, alone = engine.kv.open([]), chain.kv.open([])
    engine.forward([Row(beside, tokens[:at], 0)])
    want = chain.forward([Row(alone, tokens, 5)])
    got = engine.forward([Row(beside, [tokens[at], WRONG], 2, [Sibling(0, tokens[at + 1])])])
    torch.testing.assert_close(got[[0, 2]], want[:2])
    engine.kv.accept_branch(beside, 0)
    torch.testing.assert_close(engine.forward([Row(beside, tokens[at + 2 :], 3)]), want[2:])


def test_siblings_need_a_block_each(engine: Engine) -> None:
    sequence = begin(engine)
    at, free = sequence.cached_len, engine.kv.num_free_blocks
    many = [Sibling(0, WRONG)] * (free + 1)
    with pytest.raises(OutOfBlocks):
        engine.forward([Row(sequence, TEXT[at : at + 1], 1, many)])
    assert (sequence.cached_len, engine.kv.num_free_blocks) == (at, free)
    engine.kv.close(sequence)


def test_a_sibling_follows_one_of_the_rows_tokens(engine: Engine) -> None:
    with pytest.raises(ValueError, match="siblings"):
        Row(EngineSequence(), [5, 6], 1, [Sibling(2, 7)])
