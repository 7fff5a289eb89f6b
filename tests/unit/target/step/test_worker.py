"""The worker on a real model: whatever drafts say, the text is the target's own; whatever fails, only its own sequence.

Plain text is the same worker's without any draft.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from outrider.drafting.source import CloseReason, DraftSource
from outrider.engine import DeviceLost, Engine, Row
from outrider.errors import InvalidRequest, Overloaded, Unavailable
from outrider.sequence.key import Finish, SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import DraftDistribution, SamplingParams, VerificationMode
from outrider.target.requests.events import Offered
from outrider.tree import DraftTree
from outrider.worker.events import DrainExpired, DrainStarted, Opened
from outrider.worker.faults import WholeStepFailed
from outrider.worker.step_cost import StepCost
from torch import Tensor

from tests.unit.target.harness import GREEDY, SAMPLED, Bench, Liar, key, one_sampling_each, opening, prompts

PROMPTS = prompts(6)


def plain_texts(checkpoint: Path, what: Sequence[SequenceSpec]) -> dict[int, list[int]]:
    """Prompt and output of each opening, run without drafts."""
    return Bench(checkpoint).answer(what)


@one_sampling_each(
    "how",
    {
        "right": GREEDY,
        "wrong": SAMPLED,
        "stale": GREEDY,
        "gapped": SAMPLED,
        "ahead": GREEDY,
        "oversized": SAMPLED,
        "random": GREEDY,
        "beside": SAMPLED,
    },
)
def test_the_text_is_the_plain_text_whatever_drafts_say(tiny: Path, how: str, params: SamplingParams) -> None:
    what = [opening(prompt, params=params) for prompt in PROMPTS]
    texts = plain_texts(tiny, what)
    bench = Bench(tiny)
    assert bench.answer(what, Liar(texts, how)) == texts
    assert bench.engine.kv.num_free_blocks == bench.limits.num_blocks
    stats = bench.worker.stats
    assert stats.num_accepted_tokens <= stats.num_verified_tokens <= stats.num_draft_tokens
    assert (stats.num_accepted_tokens > 0) == (how != "gapped")
    assert stats.num_dropped_tokens > 0 or how in ("right", "wrong", "beside")
    assert (stats.num_branch_tokens_accepted > 0) == (stats.num_branch_tokens > 0) == (how == "beside")


def test_the_text_is_the_plain_text_however_the_price_of_rows_flaps(tiny: Path) -> None:
    asked = prompts(20, longest=20, seed=5)
    what = [opening(prompt, params=params) for params in (GREEDY, SAMPLED) for prompt in asked]
    texts = plain_texts(tiny, what)
    chance = random.Random(4)

    def price(cost: StepCost) -> float:
        return chance.choice((0.0, 0.2, 0.45, 0.7, 2.0))

    bench = Bench(tiny, row_price=price)
    assert bench.answer(what, Liar(texts, "random")) == texts
    assert len(texts) == 40
    judged = {commit.num_drafted for answer in bench.answers.values() for commit in answer.commits}
    assert {0, 1, 2, 3, 4} <= judged


def test_a_right_token_beside_a_wrong_one_is_accepted_and_followed_by_the_targets_own(tiny: Path) -> None:
    what = [opening(PROMPTS[0], max_new_tokens=40)]
    [text] = plain_texts(tiny, what).values()
    bench = Bench(tiny)
    bench.open(0, what[0])
    bench.step()
    at = len(bench.tokens[key(0)])
    guess, right = (text[at], 1 + text[at + 1] % 300, 7), text[at + 1]
    tree = DraftTree(at, (*guess, right), parents=(-1, 0, 1, 0), chances=(0.9, 0.5, 0.5, 0.4))
    bench.apply(Offered(key(0), tree))
    bench.step()
    [_, commit] = bench.answers[key(0)].commits
    assert commit.token_ids == text[at : at + 3]
    assert (commit.num_drafted, commit.num_verified, commit.num_accepted) == (3, 2, 2)
    assert commit.rejected == [7]
    assert bench.reports[-1].batch_tokens == 5
    bench.run()
    assert bench.tokens[key(0)] == text


def test_a_token_accepted_before_a_branch_that_a_stop_token_cuts_off_counts_as_accepted(tiny: Path) -> None:
    [text] = plain_texts(tiny, [opening(PROMPTS[0])]).values()
    bench = Bench(tiny)
    bench.open(0, opening(PROMPTS[0]))
    bench.step()
    at = len(bench.tokens[key(0)])
    assert text[at] not in text[len(PROMPTS[0]) : at]
    bench = Bench(tiny)
    bench.open(0, opening(PROMPTS[0], stops=[text[at]]))
    bench.step()
    guess, right = (text[at], 1 + text[at + 1] % 300), text[at + 1]
    tree = DraftTree(at, (*guess, right), parents=(-1, 0, 0), chances=(0.9, 0.5, 0.4))
    bench.apply(Offered(key(0), tree))
    bench.step()
    assert bench.answers[key(0)].finish is Finish.STOP
    assert (bench.worker.stats.num_branch_tokens, bench.worker.stats.num_branch_tokens_accepted) == (1, 0)
    [share] = bench.worker.engine.capabilities.calibration._shares.values()
    assert (share.accepted, share.verified) == (1, 1)


def test_ratio_mode_commits_drafts_and_returns_every_block(tiny: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=3)
    bench = Bench(tiny)
    bench.open(0, opening(PROMPTS[0], params=params, mode=VerificationMode.RATIO))

    def point_masses(sequence_id: int, tokens: Sequence[int]) -> list[DraftTree]:
        guess = (7, 8)
        q = tuple(DraftDistribution((token,), (65536,)) for token in guess)
        return [DraftTree(len(tokens), guess, q=q)]

    bench.run(point_masses)
    assert len(bench.answers[key(0)].text) == 24
    assert bench.worker.stats.num_draft_tokens > 0
    assert not bench.worker.stats.num_source_failures
    assert bench.engine.kv.num_free_blocks == bench.limits.num_blocks


@pytest.mark.parametrize("mode", [VerificationMode.COUPLED, VerificationMode.RATIO])
def test_no_more_is_judged_than_was_allowed_and_only_where_chance_decides(tiny: Path, mode: VerificationMode) -> None:
    params, bench = SamplingParams(temperature=0.8, seed=3), Bench(tiny)
    bench.open(0, opening(PROMPTS[0], params=params, mode=mode, speculation=Speculation(max_draft_tokens=1)))
    bench.step()
    q = (DraftDistribution((7,), (65536,)), DraftDistribution((8,), (65536,)))
    for _ in range(6):
        bench.apply(Offered(key(0), DraftTree(len(bench.tokens[key(0)]), (7, 8), q=q)))
        bench.step()
        assert bench.answers[key(0)].commits[-1].num_drafted <= 1


def test_a_takeover_goes_on_where_the_other_target_stopped(tiny: Path) -> None:
    what = [opening(PROMPTS[0], params=SAMPLED)]
    text = plain_texts(tiny, what)[0]
    output = text[len(PROMPTS[0]) :]
    bench = Bench(tiny)
    bench.open(0, opening(PROMPTS[0], params=SAMPLED, committed=output[:9]))
    bench.run()
    assert bench.answers[key(0)].text == output[9:]


def test_a_full_context_ends_the_text_exactly(tiny: Path) -> None:
    prompt = prompts(1, longest=1)[0] * 500
    what = opening(prompt, max_new_tokens=1000)
    text = plain_texts(tiny, [what])[0]
    assert len(text) == 512
    bench = Bench(tiny)
    bench.open(0, what)
    bench.run(Liar({0: text}, "oversized"))
    assert bench.tokens[key(0)] == text
    assert bench.answers[key(0)].finish is Finish.LENGTH


def test_a_tiny_kv_pool_costs_time_and_not_a_token(tiny: Path) -> None:
    what = [opening(prompt, max_new_tokens=40) for prompt in prompts(5, longest=30)]
    texts = plain_texts(tiny, what)
    bench = Bench(tiny, num_blocks=12, prefix_cache=False)
    assert bench.answer(what, Liar(texts, "random")) == texts
    assert bench.worker.stats.num_preemptions > 0
    assert not any(answer.errors for answer in bench.answers.values())
    assert bench.engine.kv.num_free_blocks == 12


def test_with_a_prefix_cache_a_tiny_kv_pool_gives_the_same_text(tiny: Path) -> None:
    shared = prompts(1, longest=60, seed=9)[0][:16]
    what = [opening([*shared, *prompt], max_new_tokens=30) for prompt in prompts(5, longest=20)]
    texts = plain_texts(tiny, what)
    bench = Bench(tiny, num_blocks=14)
    assert bench.answer(what, Liar(texts, "random")) == texts
    assert bench.engine.kv.num_free_blocks == 14


def test_a_cached_prefix_is_reported_in_the_first_commit_only(tiny: Path) -> None:
    prompt = prompts(1, longest=60, seed=5)[0] * 3
    bench = Bench(tiny)
    bench.open(0, opening(prompt, max_new_tokens=2))
    bench.run()
    bench.open(1, opening(prompt, max_new_tokens=2))
    bench.open(2, opening(prompt, max_new_tokens=2, salt=b"another tenant"))
    bench.run()
    cached = {k.sequence_id: [c.num_cached_tokens for c in answer.commits] for k, answer in bench.answers.items()}
    full_blocks = (len(prompt) - 1) // 8 * 8
    assert cached == {0: [0, 0], 1: [full_blocks, 0], 2: [0, 0]}


def test_rejected_drafts_never_reach_the_prefix_cache(tiny: Path) -> None:
    text = plain_texts(tiny, [opening(PROMPTS[1], max_new_tokens=40)])[0]
    bench = Bench(tiny)
    bench.open(0, opening(PROMPTS[1], max_new_tokens=40))
    bench.run(Liar({0: text}, "wrong"))
    bench.open(1, opening(text[:-3], max_new_tokens=3))
    bench.run()
    assert bench.answers[key(1)].commits[0].num_cached_tokens > 0
    assert bench.tokens[key(1)] == text


def test_a_close_frees_everything_before_the_next_step(tiny: Path) -> None:
    bench = Bench(tiny, prefix_cache=False)
    bench.open(0, opening(PROMPTS[0], max_new_tokens=100))
    bench.open(1, opening(PROMPTS[1], max_new_tokens=100))
    for _ in range(4):
        bench.step()
    bench.close(0)
    held = -(-len(bench.tokens[key(1)]) // 8)
    assert bench.engine.kv.num_free_blocks >= bench.limits.num_blocks - held
    bench.end_stream()
    assert bench.engine.kv.num_free_blocks == bench.limits.num_blocks
    assert bench.step() is None


def test_the_end_of_a_stream_closes_its_sequences_and_no_others(tiny: Path) -> None:
    bench = Bench(tiny)
    bench.open(0, opening(PROMPTS[0]))
    bench.tokens[key(0, stream=2)] = list(PROMPTS[1])
    bench.apply(Opened(key(0, stream=2), opening(PROMPTS[1]), bench.now_s))
    bench.step()
    bench.end_stream(1)
    bench.run()
    assert len(bench.answers[key(0, stream=2)].text) == 24


def test_messages_about_unknown_sequences_are_counted_and_ignored(tiny: Path) -> None:
    bench = Bench(tiny)
    bench.offer(77, 0, [1])
    bench.adjust(77, Speculation())
    bench.close(77)
    assert bench.worker.stats.num_unknown == 3
    assert not bench.answers


def test_an_id_opened_twice_ends_that_sequence_only(tiny: Path) -> None:
    bench = Bench(tiny)
    bench.open(0, opening(PROMPTS[0]))
    bench.open(1, opening(PROMPTS[1]))
    bench.apply(Opened(key(0), opening(PROMPTS[0]), bench.now_s))
    bench.run()
    assert [type(e) for e in bench.answers[key(0)].errors] == [InvalidRequest]
    assert len(bench.answers[key(1)].text) == 24


def test_no_more_sequences_than_the_limit_are_opened(tiny: Path) -> None:
    bench = Bench(tiny, max_sequences=2)
    for i in range(3):
        bench.open(i, opening(PROMPTS[i]))
    bench.run()
    assert [type(e) for e in bench.answers[key(2)].errors] == [Overloaded]
    assert all(len(bench.answers[key(i)].text) == 24 for i in (0, 1))


def test_a_draft_that_cannot_be_taken_is_counted_and_the_sequence_goes_on(tiny: Path) -> None:
    bench = Bench(tiny)
    bench.open(0, opening(PROMPTS[0], params=SAMPLED, mode=VerificationMode.RATIO))
    bench.apply(Offered(key(0), None))  # type: ignore[arg-type]
    bench.run()
    assert bench.worker.stats.num_source_failures == 1
    assert len(bench.answers[key(0)].text) == 24
    assert not bench.answers[key(0)].errors


def test_the_drain_lets_running_sequences_finish_and_opens_nothing(tiny: Path) -> None:
    bench = Bench(tiny)
    bench.open(0, opening(PROMPTS[0]))
    bench.step()
    bench.apply(DrainStarted())
    bench.open(1, opening(PROMPTS[1]))
    bench.run()
    assert len(bench.answers[key(0)].text) == 24
    assert [type(e) for e in bench.answers[key(1)].errors] == [Unavailable]
    assert bench.worker.load.draining


def test_when_the_drain_expires_the_rest_is_given_back(tiny: Path) -> None:
    bench = Bench(tiny)
    bench.open(0, opening(PROMPTS[0]))
    bench.step()
    bench.apply(DrainExpired())
    assert [type(e) for e in bench.answers[key(0)].errors] == [Unavailable]
    assert bench.worker.load.num_sequences == 0


def first_word(number: int) -> Offered:
    """A draft is there, and has nothing for the prompt's end. It is waited for from now on."""
    return Offered(key(number), DraftTree(len(PROMPTS[number])))


def test_a_waiting_sequence_is_stepped_when_its_bound_has_passed(tiny: Path) -> None:
    bench = Bench(tiny)
    bench.open(0, opening(PROMPTS[0], speculation=Speculation(max_draft_tokens=4, max_wait_us=5000)))
    bench.apply(first_word(0))
    bench.step()
    assert bench.step() == pytest.approx(bench.now_s + 0.005)
    bench.now_s += 0.006
    bench.step()
    commits = bench.answers[key(0)].commits
    assert len(commits) == 2
    assert commits[1].times.queue_s == pytest.approx(0.006)
    assert commits[1].times.wait_s == pytest.approx(0.005), "it was held back to its bound, and then only late"


def test_a_wait_ends_when_the_draft_comes_and_the_rest_is_queue(tiny: Path) -> None:
    bench = Bench(tiny)
    alone = Bench(tiny)
    for each in (bench, alone):
        each.open(0, opening(PROMPTS[0], speculation=Speculation(max_draft_tokens=4, max_wait_us=50_000)))
        each.apply(first_word(0))
        each.step()
    alone.now_s += 1
    while not alone.answers[key(0)].finish.value:
        alone.step()
        alone.now_s += 1
    truth = alone.answers[key(0)].text
    bench.step()
    base_len = len(PROMPTS[0]) + 1
    bench.now_s += 0.004
    wrong = (truth[2] + 1) % bench.limits.vocab_size
    bench.apply(Offered(key(0), DraftTree(base_len, (truth[1], wrong, 7), serial=3), bench.now_s))
    bench.now_s += 0.002
    bench.step()
    commit = bench.answers[key(0)].commits[1]
    assert (commit.num_drafted, commit.num_verified, commit.num_accepted) == (3, 2, 1)
    assert (commit.rejected, commit.draft.last_serial) == ([wrong, 7], 3)
    times = commit.times
    assert (times.queue_s, times.wait_s) == (pytest.approx(0.006), pytest.approx(0.004))
    assert times.prefill_s == 0


def test_a_long_prompt_is_charged_with_the_steps_before_the_one_that_decides(tiny: Path) -> None:
    bench = Bench(tiny, max_batch_tokens=16)
    forward = bench.engine.forward

    def slow(rows: Sequence[Row]) -> Tensor:
        bench.now_s += 0.25
        return forward(rows)

    bench.engine.forward = slow  # type: ignore[method-assign]
    bench.open(0, opening([5] * 40, max_new_tokens=3))
    bench.run()
    first, second, third = (commit.times for commit in bench.answers[key(0)].commits)
    assert first.prefill_s == pytest.approx(0.5), "two steps of 16 tokens; the third, with 8, decides"
    assert (second.prefill_s, third.prefill_s, first.queue_s) == (0, 0, 0)


def test_turning_speculation_off_ends_the_wait_and_drops_the_buffer(tiny: Path) -> None:
    bench = Bench(tiny)
    bench.open(0, opening(PROMPTS[0], speculation=Speculation(max_draft_tokens=4, max_wait_us=10**6)))
    bench.apply(first_word(0))
    bench.step()
    bench.offer(0, len(bench.tokens[key(0)]), [1, 2])
    bench.adjust(0, Speculation())
    bench.step()
    commit = bench.answers[key(0)].commits[1]
    assert (commit.num_drafted, commit.num_dropped) == (0, 2)


class Unlucky(Engine):
    """An engine that fails whenever a batch holds a token it cannot stand, before or after running the model."""

    POISON = 3

    @classmethod
    def around(cls, engine: Engine, *, nan: bool) -> Unlucky:
        engine.__class__ = cls
        assert isinstance(engine, Unlucky)
        engine.nan = nan
        return engine

    nan: bool

    def forward(self, rows: Sequence[Row]) -> Tensor:
        poisoned = any(self.POISON in [*row.sequence.tokens, *row.token_ids] for row in rows)
        if poisoned and not self.nan:
            raise RuntimeError("device-side assert")
        logits = super().forward(rows)
        return logits * float("nan") if poisoned else logits


@pytest.mark.parametrize("nan", [False, True], ids=["raises", "gives NaN"])
def test_a_fault_in_the_step_ends_the_guilty_sequence_and_no_other(tiny: Path, nan: bool) -> None:
    what = [opening([t if t != Unlucky.POISON else 4 for t in p]) for p in prompts(5, longest=20)]
    texts = plain_texts(tiny, what)
    assert not any(Unlucky.POISON in text for text in texts.values())
    bench = Bench(tiny, wrap=lambda engine: Unlucky.around(engine, nan=nan))
    for i, one in enumerate(what):
        bench.open(i, one)
    bench.open(9, opening([5, Unlucky.POISON, 6]))
    bench.run(lambda i, tokens: Liar(texts, "right")(i, tokens) if i != 9 else [])
    assert len(bench.answers[key(9)].errors) == 1
    assert not bench.answers[key(9)].commits
    assert {k.sequence_id: tokens for k, tokens in bench.tokens.items() if k.sequence_id != 9} == texts
    assert bench.engine.kv.num_free_blocks == bench.limits.num_blocks


class Dead(Engine):
    """An engine that fails whatever it is given, until it is mended."""

    error: Exception | None = None

    def forward(self, rows: Sequence[Row]) -> Tensor:
        if self.error:
            raise self.error
        return super().forward(rows)


@pytest.mark.parametrize(
    ("error", "raised"), [(RuntimeError("launch failed"), WholeStepFailed), (DeviceLost("cuda:0"), DeviceLost)]
)
def test_a_dead_engine_fails_no_sequence_and_one_that_is_mended_goes_on(
    tiny: Path, error: Exception, raised: type[Exception]
) -> None:
    what = [opening(prompt) for prompt in prompts(4)]
    texts = plain_texts(tiny, what)
    bench = Bench(tiny)
    bench.engine.__class__ = Dead
    for i, one in enumerate(what):
        bench.open(i, one)
    for _ in range(3):
        bench.step()
    bench.engine.error = error  # type: ignore[attr-defined]
    for _ in range(3):
        with pytest.raises(raised):
            bench.step()
    bench.engine.error = None  # type: ignore[attr-defined]
    bench.run(Liar(texts, "right"))
    assert not any(answer.errors for answer in bench.answers.values())
    assert bench.texts == texts
    assert bench.engine.kv.num_free_blocks == bench.limits.num_blocks


class TimedEngine:
    """Another engine, each of whose forwards takes as long as its tokens do."""

    def __init__(self, engine: Engine, spend: Callable[[float], None]) -> None:
        self._engine, self._spend = engine, spend

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        self._spend(0.01 + 0.001 * sum(len(row.token_ids) for row in rows))
        return self._engine.forward(rows)


@dataclass
class SlowSource(DraftSource):
    """Says what a text says next, one to four tokens in turn, and takes its time for each."""

    texts: dict[int, list[int]]
    spend: Callable[[float], None]
    token_s: float
    name: str = "slow"
    lengths: dict[SequenceKey, int] = field(default_factory=dict)
    turns: int = 0

    def open(self, key: SequenceKey, spec: SequenceSpec, tokens: Sequence[int]) -> None:
        self.lengths[key] = len(spec.prompt)

    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None:
        self.lengths[key] = base_len + len(tokens)

    def close(self, key: SequenceKey, reason: CloseReason) -> None:
        self.lengths.pop(key, None)

    def poll(self) -> Iterator[tuple[SequenceKey, DraftTree]]:
        for sequence, length in self.lengths.items():
            self.turns += 1
            guess = self.texts[sequence.sequence_id][length:][: 1 + self.turns % 4]
            self.spend(self.token_s * len(guess))
            yield sequence, DraftTree(length, tuple(guess), source=self.name)


def learnt_price(checkpoint: Path, texts: dict[int, list[int]], what: SequenceSpec, token_s: float) -> float:
    """Of a row, when a text is done whose drafted tokens each took so long to make."""

    def spend(seconds: float) -> None:
        bench.now_s += seconds

    bench = Bench(checkpoint, sources=[SlowSource(texts, spend, token_s)])
    bench.worker.engine._engine = TimedEngine(bench.engine, spend)  # type: ignore[attr-defined]
    bench.open(0, what)
    bench.run()
    assert bench.worker.stats.num_accepted_tokens > 20
    return bench.worker.engine.row_price


def test_a_row_costs_no_more_where_longer_drafts_take_longer_to_make(tiny: Path) -> None:
    what = opening(PROMPTS[0], max_new_tokens=60, speculation=Speculation(max_own_draft_tokens=4))
    texts = plain_texts(tiny, [what])
    quick, slow = (learnt_price(tiny, texts, what, token_s) for token_s in (0.0, 0.02))
    assert slow == pytest.approx(quick)


def test_what_sequences_took_of_the_steps_is_all_the_steps_time(tiny: Path) -> None:
    what = [opening(prompt) for prompt in PROMPTS]
    texts = plain_texts(tiny, what)
    bench = Bench(tiny, max_batch_tokens=24)

    def spend(seconds: float) -> None:
        bench.now_s += seconds

    bench.worker.engine._engine = TimedEngine(bench.engine, spend)  # type: ignore[attr-defined]
    began_s = bench.now_s
    for i, one in enumerate(what):
        bench.open(i, one)
    liar = Liar(texts, "random")
    for turn in range(2000):
        if turn == 5:
            # In the middle of its prompt, or after some tokens.
            bench.close(0)
            bench.close(3)
        for k, tokens in bench.tokens.items():
            for draft in liar(k.sequence_id, tokens):
                bench.apply(Offered(k, draft))
        bench.step()
        if not bench.worker.load.num_sequences:
            break
    committed = [commit for answer in bench.answers.values() for commit in answer.commits]
    told = [commit.times for commit in committed] + [times for r in bench.reports for _, times in r.removed]
    stats = bench.worker.stats
    assert sum(times.share_s for times in told) == pytest.approx(bench.now_s - began_s) == pytest.approx(stats.busy_s)
    assert sum(times.wasted_s for times in told) == pytest.approx(stats.wasted_s)
    assert sum(times.drafted_s for times in told) == pytest.approx(sum(one.row_s for one in stats.sources.values()))
    assert stats.busy_s > sum(one.row_s for one in stats.sources.values()) > stats.wasted_s
    assert all(0 <= times.wasted_s <= times.share_s for times in told)
    # The first steps waste nothing: what a row costs is not known yet.
    wasting = [commit for commit in committed if commit.times.wasted_s > 0]
    assert wasting
    assert all(commit.num_drafted > commit.num_accepted for commit in wasting)
