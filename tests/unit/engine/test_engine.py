"""The engine gives the logits transformers gives, however the work is cut up, shared or rewound."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from outrider.engine import Engine, EngineConfig, EngineSequence, OutOfBlocks, Row
from outrider.engine.loading.loader import load_engine
from torch import Tensor
from transformers import AutoModelForCausalLM

TOLERANCE = 2e-5


def config(**changes: object) -> EngineConfig:
    return EngineConfig(**{"dtype": "float32", "num_blocks": 32, "block_size": 8, **changes})  # type: ignore[arg-type]


@pytest.fixture(params=["fused", "transformers"])
def engine(request: pytest.FixtureRequest, tiny: Path) -> Engine:
    return load_engine(tiny, config(execution=request.param))


@pytest.fixture(scope="module")
def reference(tiny: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)


def expected(reference: AutoModelForCausalLM, token_ids: list[int]) -> Tensor:
    """[tokens, vocab]."""
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0]


def tokens(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(3, 300) for i in range(count)]


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() < TOLERANCE * want.abs().max()


def test_one_forward_gives_transformers_logits(engine: Engine, reference: AutoModelForCausalLM) -> None:
    prompt = tokens(40)
    assert_close(engine.forward([Row(engine.kv.open(prompt), prompt, 40)]), expected(reference, prompt))


def test_a_chunked_prefill_equals_a_whole_one(engine: Engine, reference: AutoModelForCausalLM) -> None:
    prompt = tokens(50)
    sequence = engine.kv.open(prompt)
    for start, end in ((0, 7), (7, 24), (24, 49)):
        engine.forward([Row(sequence, prompt[start:end], 0)])
    assert_close(engine.forward([Row(sequence, prompt[49:], 1)]), expected(reference, prompt)[-1:])


def test_ragged_rows_do_not_see_one_another(engine: Engine, reference: AutoModelForCausalLM) -> None:
    prompts = [tokens(n, seed=n) for n in (3, 30, 9, 17)]
    cached = [n // 2 for n in (3, 30, 9, 17)]
    sequences = [engine.kv.open(p) for p in prompts]
    engine.forward([Row(s, p[:c], 0) for s, p, c in zip(sequences, prompts, cached, strict=True)])
    rows = [Row(s, p[c:], len(p) - c) for s, p, c in zip(sequences, prompts, cached, strict=True)]
    got = engine.forward(rows)
    want = torch.cat([expected(reference, p)[c:] for p, c in zip(prompts, cached, strict=True)])
    assert_close(got, want)


def test_a_rewound_sequence_goes_on_as_if_it_had_never_strayed(engine: Engine, reference: AutoModelForCausalLM) -> None:
    prompt = tokens(29)
    sequence = engine.kv.open(prompt)
    engine.forward([Row(sequence, [*prompt[:20], 7, 8, 9, 10, 11, 12], 1)])
    engine.kv.rewind(sequence, 20)
    assert sequence.cached_len == 20
    assert_close(engine.forward([Row(sequence, prompt[20:], 9)]), expected(reference, prompt)[20:])


def test_a_published_prefix_is_shared_without_a_copy(engine: Engine, reference: AutoModelForCausalLM) -> None:
    prompt = tokens(30)
    first = engine.kv.open(prompt)
    engine.forward([Row(first, prompt, 1)])
    engine.kv.publish(first, 30)
    free = engine.kv.num_free_blocks
    second = engine.kv.open(prompt)
    assert second.cached_len == 24
    assert engine.kv.num_free_blocks == free
    assert_close(engine.forward([Row(second, prompt[24:], 1)]), expected(reference, prompt)[-1:])


def test_salts_keep_prefixes_apart(engine: Engine) -> None:
    prompt = tokens(30)
    first = engine.kv.open(prompt, b"one")
    engine.forward([Row(first, prompt, 1)])
    engine.kv.publish(first, 30)
    assert engine.kv.open(prompt, b"two").cached_len == 0
    assert engine.kv.open(prompt, b"one").cached_len == 24


def test_only_blocks_below_the_committed_length_are_published(engine: Engine) -> None:
    prompt = tokens(30)
    first = engine.kv.open(prompt)
    engine.forward([Row(first, prompt, 1)])
    engine.kv.publish(first, 15)
    assert engine.kv.open(prompt).cached_len == 8


def test_writing_after_a_rewind_leaves_a_shared_block_untouched(
    engine: Engine, reference: AutoModelForCausalLM
) -> None:
    prompt = tokens(24)
    first = engine.kv.open(prompt)
    engine.forward([Row(first, prompt, 1)])
    engine.kv.publish(first, 24)
    second = engine.kv.open([*prompt, 5])
    engine.kv.rewind(first, 12)
    assert first.cached_len == 8  # the published block could not be cut
    engine.forward([Row(first, [9] * 16, 1)])
    got = engine.forward([Row(second, [5], 1)])
    assert_close(got, expected(reference, [*prompt, 5])[-1:])


def test_out_of_blocks_changes_nothing(tiny: Path) -> None:
    engine = load_engine(tiny, config(num_blocks=4))
    first, second = engine.kv.open([]), engine.kv.open([])
    engine.forward([Row(first, tokens(20), 1)])
    with pytest.raises(OutOfBlocks):
        engine.forward([Row(first, [5], 1), Row(second, tokens(20), 1)])
    assert (first.cached_len, second.cached_len, engine.kv.num_free_blocks) == (20, 0, 1)


def test_an_evicted_prefix_is_reported_and_recomputed(tiny: Path, reference: AutoModelForCausalLM) -> None:
    engine = load_engine(tiny, config(num_blocks=4))
    prompt = tokens(24)
    first = engine.kv.open(prompt)
    engine.forward([Row(first, prompt, 1)])
    engine.kv.publish(first, 24)
    added, removed = engine.kv.take_prefix_changes()
    assert (len(added), removed) == (3, [])
    engine.kv.close(first)
    other = engine.kv.open([])
    engine.forward([Row(other, tokens(32, seed=1), 1)])
    assert sorted(engine.kv.take_prefix_changes().removed) == sorted(added)
    engine.kv.close(other)
    again = engine.kv.open(prompt)
    assert again.cached_len == 0
    assert_close(engine.forward([Row(again, prompt, 1)]), expected(reference, prompt)[-1:])


def test_random_work_returns_every_block(tiny: Path, reference: AutoModelForCausalLM) -> None:
    engine = load_engine(tiny, config(num_blocks=24))
    rng = random.Random(3)
    texts = [tokens(40, seed=i % 3) for i in range(6)]
    live: dict[int, EngineSequence] = {}
    for _ in range(200):
        which = rng.randrange(len(texts))
        if which not in live:
            live[which] = engine.kv.open(texts[which])
        sequence = live[which]
        action = rng.random()
        if action < 0.15 or sequence.cached_len == 40:
            engine.kv.close(live.pop(which))
        elif action < 0.35:
            engine.kv.rewind(sequence, rng.randint(0, sequence.cached_len))
        else:
            start = sequence.cached_len
            end = rng.randint(start + 1, 40)
            if engine.kv.blocks_needed(sequence, end - start) > engine.kv.num_free_blocks:
                continue
            got = engine.forward([Row(sequence, texts[which][start:end], 1)])
            assert_close(got, expected(reference, texts[which][:end])[-1:])
            engine.kv.publish(sequence, sequence.cached_len)
    for sequence in live.values():
        engine.kv.close(sequence)
    assert engine.kv.num_free_blocks == 24


def test_blocks_out_of_order_are_read_in_the_sequences_order(tiny: Path, reference: AutoModelForCausalLM) -> None:
    engine = load_engine(tiny, config(num_blocks=4))
    prompt = tokens(32)
    sequence, *others = (EngineSequence() for _ in range(4))
    engine.forward([Row(sequence, prompt[:8], 0)])
    for other in others:
        engine.forward([Row(other, prompt[:8], 0)])
    # Leaves the sequence with blocks 0, 2, 1, 3: first and last as far apart as if they were consecutive.
    for freed, chunk in zip((1, 0, 2), (prompt[8:16], prompt[16:24], prompt[24:31]), strict=True):
        engine.kv.close(others[freed])
        engine.forward([Row(sequence, chunk, 0)])
    assert list(sequence.blocks) == [0, 2, 1, 3]
    assert_close(engine.forward([Row(sequence, prompt[31:], 1)]), expected(reference, prompt)[-1:])
