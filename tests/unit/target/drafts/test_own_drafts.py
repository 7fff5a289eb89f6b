"""Drafts that the target makes itself: exact with every other draft beside them, and no fault of theirs ends a text."""

from __future__ import annotations

import gc
import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from outrider.drafting.lookup import ALL_NAMES, NAMES
from outrider.drafting.pool import DraftLeases, no_leases
from outrider.drafting.source import DraftSource, make_sources
from outrider.engine import EngineConfig
from outrider.options.sampling import DraftDistribution
from outrider.rpc.v1 import target_pb2
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import SamplingParams, VerificationMode
from outrider.target.drafts.choice import Pricing
from outrider.target.drafts.pool import PoolDrafts
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.tree import DraftTree
from outrider.worker.events import Opened

from tests.unit.engine.test_trees import skip_what_cannot_run
from tests.unit.engine.variants import slow_but_the_best
from tests.unit.target import toy_source
from tests.unit.target.harness import GREEDY, SAMPLED, Bench, Liar, key, one_sampling_each, opening, prompts

ALONE = Speculation(max_own_draft_tokens=4)
BOTH = Speculation(max_draft_tokens=4, max_own_draft_tokens=4)


def repeating(**fields: object) -> list[SequenceSpec]:
    """Prompts that say everything twice."""
    return [opening([*prompt, *prompt], max_new_tokens=30, **fields) for prompt in prompts(6, longest=20)]


def texts(tiny: Path, what: Sequence[SequenceSpec], **bench: object) -> dict[int, list[int]]:
    return Bench(tiny, **bench).answer(what)  # type: ignore[arg-type]


@one_sampling_each("how", {"none": SAMPLED, "right": GREEDY, "random": SAMPLED, "beside": GREEDY})
def test_texts_are_the_same_with_lookups_alone_and_merged_with_what_draft_workers_send(
    tiny: Path, how: str, params: SamplingParams
) -> None:
    expected = texts(tiny, repeating(params=params, speculation=Speculation()))
    bench = Bench(tiny, sources=make_sources(NAMES), row_price=lambda cost: 0.0)
    what = repeating(params=params, speculation=ALONE if how == "none" else BOTH)
    assert bench.answer(what, *(() if how == "none" else (Liar(expected, how),))) == expected
    assert bench.worker.stats.num_draft_tokens > 0
    assert bench.engine.kv.num_free_blocks == bench.limits.num_blocks


def test_without_any_draft_worker_a_text_that_was_predicted_takes_fewer_steps(tiny: Path) -> None:
    plain = opening(prompts(1)[0], max_new_tokens=60, speculation=Speculation())
    text = texts(tiny, [plain])[0]
    bench = Bench(tiny, sources=make_sources(NAMES))
    bench.open(0, replace(plain, speculation=ALONE, prediction=tuple(text[len(plain.prompt) :])))
    bench.run()
    assert bench.tokens[key(0)] == text
    assert bench.worker.stats.num_steps <= 13, "four drafts and the target's own token, each step"


@pytest.mark.parametrize("params", [pytest.param(GREEDY, marks=pytest.mark.slow), SAMPLED], ids=["greedy", "coupled"])
def test_an_answer_given_again_takes_fewer_steps_to_the_same_text_and_only_under_its_salt(
    tiny: Path, params: SamplingParams
) -> None:
    what = [opening(prompt, max_new_tokens=40, params=params, speculation=ALONE) for prompt in prompts(4)]
    expected = texts(tiny, what)
    bench = Bench(tiny, sources=make_sources(ALL_NAMES), row_price=lambda cost: 0.0)
    verified = []
    for number, salt in enumerate((b"a", b"b", b"a", b"b")):
        before = bench.worker.stats.num_accepted_tokens
        for index, one in enumerate(what):
            bench.open(10 * number + index, replace(one, salt=salt))
        bench.run()
        assert [bench.tokens[key(10 * number + index)] for index in range(4)] == list(expected.values())
        verified.append(bench.worker.stats.num_accepted_tokens - before)
    # The first answers under each salt find nothing in the past.
    assert verified[0] == verified[1] and min(verified[2:]) > max(60, 2 * verified[0])


def test_a_request_may_have_no_lookups(tiny: Path) -> None:
    bench = Bench(tiny, sources=make_sources(NAMES))
    bench.answer(repeating(speculation=Speculation()))
    assert bench.worker.stats.num_draft_tokens == 0


def test_a_kind_that_is_not_shipped_serves_once_it_is_registered(tiny: Path) -> None:
    what = repeating(speculation=ALONE)
    expected = texts(tiny, [replace(one, speculation=Speculation()) for one in what])
    toy_source.TEXTS.update({one.prompt: expected[number] for number, one in enumerate(what)})
    bench = Bench(tiny, sources=make_sources([toy_source.NAME, *NAMES]), row_price=lambda cost: 0.0)
    assert bench.answer(what) == expected
    # Two of three are right, and each third token is wrong.
    assert bench.worker.stats.num_accepted_tokens > 60


class RandomTrees(DraftSource):
    """Proposes trees of three or four positions in which the text to come is somewhere, or almost."""

    def __init__(self, texts: dict[int, list[int]], seed: int) -> None:
        self._texts, self._rng = texts, random.Random(seed)
        self._lengths: dict[SequenceKey, int] = {}
        self.name = f"random {seed}"

    def open(self, key: SequenceKey, spec: SequenceSpec, tokens: Sequence[int]) -> None:
        self._lengths[key] = len(spec.prompt)

    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None:
        self._lengths[key] = base_len + len(tokens)

    def close(self, key: SequenceKey, reason: object) -> None:
        del self._lengths[key]

    def poll(self) -> Iterator[tuple[SequenceKey, DraftTree]]:
        for each, length in self._lengths.items():
            yield each, self._tree(length, self._texts[each.sequence_id][length:])

    def _tree(self, length: int, text: list[int]) -> DraftTree:
        rng, tokens, parents, right = self._rng, [], [], -1
        for token in text[: rng.randint(3, 4)]:
            known = len(tokens)
            for other in rng.sample([token - 1, token, token + 1], 3):
                tokens.append(max(0, other))
                parents.append(rng.choice([right, right, *range(right, known)]) if other != token else right)
            right = known + tokens[known:].index(token)
        # A source names each follower of a token once.
        named = dict.fromkeys(zip(parents, tokens, strict=True))
        if len(named) < len(tokens):
            return DraftTree(length, tuple(text[:3]), source=self.name)
        return DraftTree(length, tuple(tokens), tuple(parents), source=self.name)


@pytest.fixture(params=[pytest.param("fused float32", marks=pytest.mark.slow), "fused bfloat16", *slow_but_the_best()])
def arithmetic(request: pytest.FixtureRequest) -> EngineConfig:
    execution, _, dtype = request.param.partition(" ")
    skip_what_cannot_run(execution)
    if execution == "fused":
        return EngineConfig(dtype=dtype, execution=execution, block_size=8)
    return EngineConfig(execution="native", native_variant=execution, block_size=16)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_texts_are_the_same_under_deep_trees_of_several_sources(
    tiny: Path, params: SamplingParams, arithmetic: EngineConfig
) -> None:
    what = [opening(prompt, params=params, speculation=ALONE) for prompt in prompts(40)]
    expected = texts(tiny, what, arithmetic=arithmetic)
    sources = [RandomTrees(expected, 1), *make_sources(NAMES), RandomTrees(expected, 2)]
    bench = Bench(tiny, sources=sources, max_batch_tokens=400, row_price=lambda cost: 0.0, arithmetic=arithmetic)
    assert bench.answer(what) == expected
    stats = bench.worker.stats
    assert stats.num_branch_tokens_accepted > 100 and stats.num_steps < 20
    assert bench.engine.kv.num_free_blocks == bench.limits.num_blocks


def test_what_each_source_proposed_and_what_came_of_it_is_counted(tiny: Path) -> None:
    plain = opening(prompts(1)[0], max_new_tokens=30, speculation=Speculation())
    text = texts(tiny, [plain])[0]
    bench = Bench(tiny, sources=make_sources(NAMES), row_price=lambda cost: 0.0)
    predicted = tuple(text[len(plain.prompt) : -10])
    bench.open(0, replace(plain, speculation=BOTH, prediction=predicted))
    bench.run(Liar({0: text}, "wrong"))
    sources = bench.worker.stats.sources
    # The liar gives no name.
    assert sources["other"].num_drafted > 0 and sources["prediction"].num_accepted > 10
    told = {one.source for commit in bench.answers[key(0)].commits for one in commit.sources}
    assert {"prediction", ""} <= told


def test_a_targets_process_holds_the_tokens_of_a_text_once_beside_the_kv_cache(tiny: Path) -> None:
    bench = Bench(tiny, sources=make_sources(ALL_NAMES))
    pool = PoolDrafts(
        bench.limits, lambda: 0.0, lambda events: None, lambda *answer: None, DraftLeases(no_leases, lambda: 0.0)
    )
    what = replace(opening([*range(40, 60)] * 2, max_new_tokens=30, speculation=BOTH), prediction=(1, 2, 3))
    opened = Opened(key(0), what, 0.0)
    pool.apply(1, target_pb2.VerifyRequest(), [opened])
    bench.worker.apply(opened)
    for _ in range(4):
        bench.worker.step()
        report = bench.worker.take_report()
        pool.take_report(report)
    # What other tests left.
    gc.collect()
    prompt, length = list(what.prompt), len(what.prompt)
    lists = (each for each in gc.get_objects() if type(each) is list and each is not prompt and len(each) >= length)
    held = [each for each in lists if all(map(operator.is_, each, prompt))]
    assert len(held) == 2 and min(map(len, held)) > length


class Broken(DraftSource):
    """A source that fails whatever it is asked."""

    name = "broken"

    def __getattribute__(self, name: str) -> object:
        if name in ("name", "taps"):
            return super().__getattribute__(name)
        raise RuntimeError(name)


def test_a_source_that_fails_ends_no_text(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    what = repeating(speculation=ALONE)
    expected = texts(tiny, what)
    assert texts(tiny, what, sources=[Broken(), *make_sources(NAMES)]) == expected


@pytest.mark.parametrize("matched", [1, 20])
def test_in_ratio_mode_what_was_drawn_decides_neither_which_source_is_verified_nor_how_far(matched: int) -> None:
    params, point = SamplingParams(temperature=1.0, seed=3), DraftDistribution((7,), (65536,))
    what = opening([1, 2, 3], params=params, mode=VerificationMode.RATIO, speculation=BOTH)
    q = DraftDistribution((6, 7, 8), (60000, 5000, 536))
    verified = set()
    for drawn in q.token_ids:
        drafts = SequenceDrafts.of(what, what.tokens)
        chance = q.count_of(drawn) / 65536
        drafts.offer(DraftTree(3, (drawn,), chances=(chance,), q=(q,), source="model"))
        drafts.put(DraftTree(3, (7,), q=(point,), source="ngram", matched=matched))
        chosen = Pricing().offered(drafts, 4)
        assert chosen is not None
        verified.add(chosen.source)
    assert verified == {"ngram" if matched == 20 else "model"}
