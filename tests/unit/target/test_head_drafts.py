"""Heads in the target: texts stay exact whatever a head proposes, and a good head saves steps."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.drafting.lookup import NAMES
from outrider.drafting.source import DraftSource, Features, Seen, make_sources
from outrider.engine import CheckpointError, Engine, EngineConfig, Row
from outrider.engine.checkpoints.checkpoints import read_config
from outrider.engine.checkpoints.fetching import directory, resolve
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from outrider.engine.loading.draft_checkpoint import read_embedding, read_head
from outrider.engine.loading.loader import load_engine
from outrider.engine.models.taps import HEAD_INPUT
from outrider.heads import DFlashHead, Eagle3Head, HeadDrafts, MedusaHead, MtpHead, TargetParts
from outrider.heads.eagle import EagleVariant
from outrider.heads.engine import torch_engine
from outrider.heads.interface import BlockShape, DraftHead
from outrider.heads.tensors import settings_of
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import SamplingParams, VerificationMode
from outrider.target.drafts.head import head_drafts, head_features, tried_head
from outrider.testing.tiny import tiny_checkpoint
from outrider.training.head_student import HeadLearner
from outrider.training.student import StudentConfig
from safetensors.torch import save_file
from torch import Tensor

from tests.unit.heads.dflash_formula import Formula
from tests.unit.target.harness import (
    FLOAT32,
    GREEDY,
    SAMPLED,
    Bench,
    Drafter,
    Liar,
    one_sampling_each,
    opening,
    prompts,
)

ALONE = Speculation(max_own_draft_tokens=4)
BOTH = Speculation(max_draft_tokens=4, max_own_draft_tokens=4)
LAYERS = 6


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EAGLE-3 reads three layers of it."""
    return tiny_checkpoint(tmp_path_factory.mktemp("deep"), layers=LAYERS, seed=4)


def knowing(path: Path, layers: int, token_map: Tensor | None = None) -> DraftHead:
    """An MTP head that begins as all layers of its target says what the target says."""
    config = StudentConfig(layers=tuple(range(layers)))
    head: DraftHead = HeadLearner("mtp", path, config, token_map, "cpu", None).module.eval().requires_grad_(False)
    return head


def random_head(kind: str, path: Path) -> DraftHead:
    torch.manual_seed(0)
    parts = TargetParts(read_embedding(path).float(), read_head(path).float(), LAYERS)
    settings = replace(settings_of(read_config(path), path), layers=1)
    variant = EagleVariant((2, 3, 3), parts.width, len(parts.head), fc_norm=True)
    made: dict[str, Callable[[], Any]] = {
        "mtp": lambda: MtpHead(settings, parts),
        "mtp of layers": lambda: MtpHead(replace(settings, layers=2), parts, early=1, taps=(3, 5)),
        "eagle3": lambda: Eagle3Head(settings, variant, parts),
        "medusa": lambda: MedusaHead(parts, 3),
        "dflash": lambda: DFlashHead(replace(settings, qk_norm=True), parts, (2, 3, 5), BlockShape(6, 300)),
    }
    head: Any = made[kind]()
    if kind == "dflash":
        head.lm_head.weight = torch.nn.Parameter(parts.head)
    return head.eval().requires_grad_(False)  # type: ignore[no-any-return]


def answered(
    path: Path,
    what: Sequence[SequenceSpec],
    sources: Sequence[DraftSource],
    drafter: Drafter = lambda sequence_id, tokens: (),
    arithmetic: EngineConfig = FLOAT32,
) -> Bench:
    bench = Bench(path, sources=sources, row_price=lambda cost: 0.0, arithmetic=arithmetic)
    bench.answer(what, drafter)
    assert bench.engine.kv.num_free_blocks == bench.limits.num_blocks
    return bench


def wanted(params: SamplingParams, speculation: Speculation) -> list[SequenceSpec]:
    return [opening(p, max_new_tokens=30, params=params, speculation=speculation) for p in prompts(6)]


@cache
def plain_tokens(path: Path, params: SamplingParams) -> dict[SequenceKey, list[int]]:
    """Of each text and its prompt, without drafts."""
    return answered(path, wanted(params, Speculation()), ()).tokens


@pytest.mark.parametrize("merged", [pytest.param(False, marks=pytest.mark.slow), True], ids=["alone", "merged"])
@one_sampling_each(
    "kind",
    {
        "mtp": SAMPLED,
        "mtp of layers": GREEDY,
        "eagle3": SAMPLED,
        "medusa": GREEDY,
        "dflash": SAMPLED,
        "knowing": SAMPLED,
    },
)
def test_texts_are_those_of_the_target_alone(deep: Path, kind: str, merged: bool, params: SamplingParams) -> None:
    plain = plain_tokens(deep, params)
    expected = {each.sequence_id: tokens for each, tokens in plain.items()}
    head = knowing(deep, LAYERS) if kind == "knowing" else random_head(kind, deep)
    sources = [HeadDrafts(head), *(make_sources(NAMES) if merged else ())]
    what = wanted(params, BOTH if merged else ALONE)
    bench = answered(deep, what, sources, Liar(expected, "beside")) if merged else answered(deep, what, sources)
    assert bench.tokens == plain
    assert bench.worker.stats.num_draft_tokens > 0 and not bench.worker.stats.num_source_failures
    # Tokens and the time between steps are counted under one name, the head's kind.
    counted = bench.worker.stats.sources[head.kind]
    assert counted.num_drafted > 0 and counted.draft_s > 0


class Recording(HeadDrafts):
    """Keeps the states it was shown."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head)
        self.seen: dict[tuple[int, int], Tensor] = {}

    def see(self, step: Sequence[Seen]) -> Sequence[tuple[SequenceKey, Features]]:
        for key, start, states in step:
            self.seen |= {(key.sequence_id, start + offset): state for offset, state in enumerate(states)}
        return super().see(step)


@one_sampling_each("kind", {"mtp": GREEDY, "mtp of layers": SAMPLED, "eagle3": GREEDY})
def test_a_head_is_shown_the_state_of_every_committed_position(deep: Path, kind: str, params: SamplingParams) -> None:
    """Accepted branches and rejected tokens included: the states are those of one pass over the finished text."""
    plain = plain_tokens(deep, params)
    expected = {each.sequence_id: tokens for each, tokens in plain.items()}
    source = Recording(random_head(kind, deep))
    bench = answered(deep, wanted(params, BOTH), [source, *make_sources(NAMES)], Liar(expected, "beside"))
    assert bench.worker.stats.num_accepted_tokens > 20
    engine = load_engine(deep, EngineConfig(dtype="float32", num_blocks=64, prefix_cache=False))
    for number, tokens in expected.items():
        row = Row(engine.kv.open([]), tokens, 1, num_tapped=len(tokens))
        _, states = engine.forward_tapped([row], source.taps or (HEAD_INPUT,))
        shown = torch.stack([source.seen[number, position] for position in range(len(tokens) - 1)])
        torch.testing.assert_close(shown, states[:-1], rtol=1e-3, atol=1e-3)


def test_a_sequence_that_may_have_no_draft_keeps_no_states_of_others(tiny: Path) -> None:
    source = HeadDrafts(random_head("mtp", tiny))
    bench = Bench(tiny, sources=[source])
    what = [opening(p, max_new_tokens=40, speculation=ALONE if n else Speculation()) for n, p in enumerate(prompts(6))]
    keys = [bench.open(number, one) for number, one in enumerate(what)]
    for _ in range(12):
        bench.step()
    waiting = source._texts[keys[0]].waiting
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in waiting}
    assert len(waiting) > 8 and sum(held.values()) == sum(one.nbytes for one in waiting)


class OneBuffer(Engine):
    """Its states are where those of the next step will be, as a recorded step's are. It fails at the token 3."""

    _last = torch.zeros(0)

    def forward_tapped(self, rows: Sequence[Row], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if any(3 in row.token_ids for row in rows):
            raise RuntimeError("device-side assert")
        self._last.fill_(torch.nan)
        logits, self._last = super().forward_tapped(rows, layers)
        return logits, self._last


def test_a_step_that_is_run_in_parts_shows_the_states_of_each_part(tiny: Path) -> None:
    def one_buffer(engine: Engine) -> Engine:
        engine.__class__ = OneBuffer
        return engine

    source = Recording(random_head("mtp", tiny))
    bench = Bench(tiny, wrap=one_buffer, sources=[source])
    for number, prompt in enumerate(([5, 6, 7], [8, 9], [5, 3])):
        bench.open(number, opening(prompt))
    bench.step()
    assert bench.worker.stats.num_step_failures == 1
    assert len(source.seen) == 3 + 2 and all(bool(state.isfinite().all()) for state in source.seen.values())


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_a_head_that_knows_its_target_saves_steps(tiny: Path, params: SamplingParams) -> None:
    bench = answered(tiny, wanted(params, ALONE), [HeadDrafts(knowing(tiny, 2))])
    alone = answered(tiny, wanted(params, Speculation()), ())
    # It never sees a text's first token, which a model of random weights cannot do without.
    assert bench.worker.stats.num_accepted_tokens > 40
    assert len(bench.reports) < len(alone.reports)


def test_ratio_mode_takes_a_head_s_own_distribution(tiny: Path) -> None:
    what = [replace(one, mode=VerificationMode.RATIO) for one in wanted(SAMPLED, ALONE)]
    bench = answered(tiny, what, [HeadDrafts(knowing(tiny, 2))])
    assert bench.worker.stats.num_accepted_tokens > 20 and not bench.worker.stats.num_source_failures


class Forgetful(HeadDrafts):
    """Neither keys nor states of a prefix are kept."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head, engine=torch_engine(head, prefix_cache=False))
        self._cache.most_bytes = 0


@pytest.mark.parametrize("kind", [HeadDrafts, Forgetful])
def test_after_a_cached_prefix_a_head_drafts_as_well_as_before_unless_its_states_are_forgotten(
    tiny: Path, kind: type[HeadDrafts]
) -> None:
    accepted, source = [], kind(knowing(tiny, 2))
    bench = Bench(tiny, sources=[source], row_price=lambda cost: 0.0)
    long = opening(prompts(1, longest=60)[0] * 2, max_new_tokens=20, speculation=ALONE)
    for number in range(2):
        before = bench.worker.stats.num_accepted_tokens
        bench.open(number, long)
        bench.run()
        accepted.append(bench.worker.stats.num_accepted_tokens - before)
    assert accepted[0] > 0 and (accepted[1] == accepted[0]) == (kind is HeadDrafts)
    assert len({*map(tuple, bench.tokens.values())}) == 1 and not bench.worker.stats.num_source_failures
    assert not source._texts and not source._writers and not source._due


def test_a_sequence_without_drafts_is_read_once_it_may_have_some(tiny: Path) -> None:
    source = HeadDrafts(knowing(tiny, 2))
    read, begins = [], source._runner.read
    source._runner.read = lambda texts: read.extend(texts) or begins(texts)  # type: ignore[method-assign,func-returns-value]
    bench = Bench(tiny, sources=[source], row_price=lambda cost: 0.0)
    bench.open(0, opening(prompts(1)[0], max_new_tokens=60, speculation=Speculation()))
    for _ in range(20):
        bench.step()
    assert bench.worker.stats.num_steps == 20 and not read
    bench.adjust(0, ALONE)
    bench.run()
    assert bench.worker.stats.num_accepted_tokens > 10 and not bench.worker.stats.num_source_failures


def test_a_head_drafts_no_more_than_it_is_given_however_much_the_target_would_verify(tiny: Path) -> None:
    source = HeadDrafts(knowing(tiny, 2), max_tokens=2)
    bench = Bench(tiny, sources=[source], row_price=lambda cost: 0.0)
    bench.open(0, opening(prompts(1)[0], max_new_tokens=30, speculation=Speculation(max_own_draft_tokens=32)))
    bench.run()
    stats = bench.worker.stats
    assert 0 < stats.num_draft_tokens <= 2 * stats.num_steps


def test_a_head_is_loaded_beside_its_model_and_warned_of_when_it_knows_nothing(
    deep: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(2)
    tensors = {f"blocks.{n}.layers.0.weight": torch.randn(64, 64) for n in range(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MedusaModel"], "medusa_num_heads": 2}))
    engine = load_engine(deep, EngineConfig(dtype="float32", num_blocks=64))
    with caplog.at_level(logging.WARNING):
        source = head_drafts(engine, tried_head(engine, deep, tmp_path, [5, 6, 7]))
    assert "this medusa head guesses" in caplog.text and engine.kv.num_free_blocks == 64
    bench = answered(deep, wanted(GREEDY, ALONE), [source])
    assert bench.tokens == plain_tokens(deep, GREEDY)
    save_file({"blocks.0.layers.0.weight": torch.randn(64, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"head: blocks\.0\.layers\.0\.weight: has the shape \[64, 32\]"):
        tried_head(engine, deep, tmp_path, [5, 6, 7])


@pytest.mark.parametrize("arithmetic", [FLOAT32, EngineConfig()], ids=["float32", "as served"])
def test_a_dflash_head_as_published_drafts_whole_blocks_beside_its_target(
    deep: Path, tmp_path: Path, arithmetic: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the features that the target sends are those that the head here reads, but for 8 bits of our kernels."""
    monkeypatch.setattr("outrider.tuning.HEAD_MIN_JOINT", 0.0)
    torch.manual_seed(3)
    path = Formula.random(read_embedding(deep).float(), read_head(deep).float()).write(tmp_path / "head")
    engine = load_engine(deep, replace(arithmetic, num_blocks=64))
    here, there = (tried_head(engine, deep, path, [5, 6, 7]) for _ in range(2))
    source, sent = head_drafts(engine, here, 2), head_features(engine, there)
    what = [replace(one, max_new_tokens=12) for one in wanted(GREEDY, Speculation(max_own_draft_tokens=32))[:3]]
    plain = answered(deep, [replace(one, speculation=Speculation()) for one in what], (), arithmetic=arithmetic)
    bench = answered(deep, what, [source], arithmetic=arithmetic)
    assert bench.tokens == plain.tokens and not bench.worker.stats.num_source_failures
    # Five tokens are of one pass, so that `max_tokens`, of passes, does not bound them.
    stats = bench.worker.stats
    assert 2 * stats.num_steps < stats.num_draft_tokens
    states = torch.randn(1, 9, 3 * 64)
    exact, found = here.features(states), sent._read(states)
    assert (found - exact).abs().max() <= (0.02 * exact.abs().max() if arithmetic != FLOAT32 else 0)


@pytest.mark.slow
def test_the_shipped_head_guesses_what_its_target_says() -> None:
    path = resolve("smollm2-135m-instruct")
    question = load_tokenizer(path).encode("<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n")
    what, served = opening(question, max_new_tokens=32, speculation=ALONE), EngineConfig()
    alone = answered(path, [replace(what, speculation=Speculation())], (), arithmetic=served)
    head = tried_head(alone.engine, path, directory("smollm2-135m-mtp"), question)
    bench = answered(path, [what], [head_drafts(alone.engine, head)], arithmetic=served)
    assert bench.tokens == alone.tokens
    assert bench.worker.stats.num_steps < 0.7 * alone.worker.stats.num_steps


def test_a_preempted_text_is_read_again_from_where_it_is_recomputed(deep: Path) -> None:
    what = wanted(SAMPLED, ALONE)
    expected = plain_tokens(deep, SAMPLED)
    source = HeadDrafts(random_head("eagle3", deep))
    bench = Bench(deep, sources=[source], num_blocks=16, row_price=lambda cost: 0.0)
    bench.answer(what)
    stats = bench.worker.stats
    assert stats.num_preemptions > 0 and stats.num_draft_tokens > 0 and not stats.num_source_failures
    assert bench.tokens == expected
