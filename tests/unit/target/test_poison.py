"""One sequence whose numbers are not finite spoils no other: not beside it, not after it, whatever runs the model."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from outrider.engine import EngineConfig, Row
from outrider.engine.backends.cpu import KernelsMissing, load_kernels
from outrider.engine.loading.loader import load_engine
from outrider.speculation import NotFinite, SamplingParams, VerificationMode
from outrider.testing.tiny import tiny_checkpoint

from tests.unit.engine.variants import slow_but_the_best
from tests.unit.target.harness import GREEDY, SAMPLED, Bench, key, opening

POISON = 370
"""Its embedding is infinite. No prompt here holds it but where that is meant."""
NUM_BLOCKS = 24

IN_TORCH = ("fused", "transformers")


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "poisoned", infinite_token=POISON)


@pytest.fixture(params=[*slow_but_the_best(), *IN_TORCH])
def config(request: pytest.FixtureRequest) -> EngineConfig:
    if request.param in IN_TORCH:
        return EngineConfig(num_blocks=NUM_BLOCKS, dtype="float32", execution=request.param)
    try:
        load_kernels(request.param)
    except KernelsMissing as error:
        pytest.skip(str(error))
    return EngineConfig(num_blocks=NUM_BLOCKS, execution="native", native_variant=request.param)


def prompt(count: int, seed: int = 0) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(3, 300) for _ in range(count)]


def bench(path: Path, config: EngineConfig) -> Bench:
    return Bench(path, wrap=lambda engine: load_engine(path, config))


def logits_alone(path: Path, config: EngineConfig, token_ids: list[int]) -> torch.Tensor:
    engine = load_engine(path, config)
    return engine.forward([Row(engine.kv.open(token_ids), token_ids, 1)]).clone()


def test_blocks_that_held_what_is_not_finite_serve_the_next_sequence(poisoned: Path, config: EngineConfig) -> None:
    engine = load_engine(poisoned, config)
    everywhere = [POISON] * NUM_BLOCKS * config.block_size
    spoiled = engine.kv.open(everywhere)
    for start in range(0, len(everywhere), 96):
        logits = engine.forward([Row(spoiled, everywhere[start : start + 96], 1)])
    assert not logits.isfinite().all()
    engine.kv.close(spoiled)
    for count in (1, 17, 40, 200):
        sequence = engine.kv.open(prompt(count))
        got = engine.forward([Row(sequence, prompt(count), 1)])
        assert torch.equal(got, logits_alone(poisoned, config, prompt(count)))
        engine.kv.close(sequence)


def test_a_poisoned_sequence_leaves_those_beside_it_their_text(poisoned: Path, config: EngineConfig) -> None:
    alone = bench(poisoned, config)
    for i in range(3):
        alone.open(i, opening(prompt(11 + 7 * i, i)))
    alone.run()
    beside = bench(poisoned, config)
    for i in range(3):
        beside.open(i, opening(prompt(11 + 7 * i, i)))
        beside.open(10 + i, opening([*prompt(5, i), POISON, *prompt(14, i)]))
    beside.run()
    for i in range(3):
        assert beside.answers[key(i)].text == alone.answers[key(i)].text
        [error] = beside.answers[key(10 + i)].errors
        assert isinstance(error, NotFinite)


def test_what_a_failed_sequence_held_is_found_by_nobody_and_is_wiped(poisoned: Path, config: EngineConfig) -> None:
    worker = bench(poisoned, config)
    # More than one step reads, so that a part of it is there to be found before the fault is seen.
    spoiled = [*prompt(40), POISON, *prompt(90)]
    worker.open(0, opening(spoiled))
    worker.run()
    assert worker.answers[key(0)].errors
    assert worker.engine.kv.open(spoiled).cached_len == 0
    worker.open(1, opening(prompt(9)))
    worker.run()
    assert worker.answers[key(1)].text
    cache = worker.engine._cache
    assert all(layer.isfinite().all() for layer in [*cache.keys, *cache.values])


@pytest.mark.parametrize(
    ("params", "mode"),
    [(GREEDY, VerificationMode.GREEDY), (SAMPLED, VerificationMode.COUPLED)],
    ids=["greedy", "coupled"],
)
def test_a_draft_that_guesses_a_poisoned_token_costs_only_time(
    poisoned: Path, config: EngineConfig, params: SamplingParams, mode: VerificationMode
) -> None:
    what = opening(prompt(12), params=params, mode=mode)
    alone = bench(poisoned, config)
    alone.open(0, what)
    alone.run()
    text = alone.answers[key(0)].text
    assert POISON not in text
    drafted = bench(poisoned, config)
    drafted.open(0, what)
    while not drafted.answers or len(drafted.answers[key(0)].text) < len(text):
        at = len(drafted.answers[key(0)].text) if drafted.answers else 0
        # Right, then poisoned, then right again.
        drafted.offer(0, len(what.prompt) + at, [*text[at : at + 1], POISON, *text[at + 2 : at + 4]][: len(text) - at])
        drafted.step()
        assert not drafted.answers or not drafted.answers[key(0)].errors
    assert drafted.answers[key(0)].text == text


def test_the_line_about_a_sequence_that_failed_names_its_request_and_tenant(
    poisoned: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(poisoned)
    bench.open(0, replace(opening([5, POISON, 7]), request_id="r1", tenant="acme"))
    bench.run()
    lines = [vars(record) for record in caplog.records if "failed in its step" in record.message]
    assert {(line["request_id"], line["tenant"]) for line in lines} == {("r1", "acme")}
