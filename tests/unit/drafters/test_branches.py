"""What a draft model prepares while its guess is judged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from outrider.drafters import Drafted, Drafter, DraftSequence, ModelConfig, ModelDrafter, Opening
from outrider.engine import Engine
from outrider.speculation import SamplingParams, VerificationMode

Greedy = Callable[..., Opening]
MakeEngine = Callable[..., Engine]
Continue = Callable[[list[int], int], list[int]]

# 14 tokens in blocks of 16: guesses and their branches lie on both sides of a block's end.
PROMPT = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 10, 12]
ASKED = {"num_alternatives": 6, "run_ahead_tokens": 8, "max_draft_tokens": 4}


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture
def drafter(engine: Engine) -> ModelDrafter:
    return ModelDrafter(engine, ModelConfig(min_confidence=0.0))


def prepared(drafter: Drafter, sequence: DraftSequence) -> tuple[Drafted, ...]:
    """All that comes of it, however many forwards it takes."""
    drafter.draft([sequence])
    for _ in range(16):
        [paths] = drafter.prepare([sequence])
        if paths is not None:
            return paths
    raise AssertionError("not ready after 16 forwards")


def test_every_path_goes_on_as_the_model_would_after_it(
    drafter: ModelDrafter, greedy: Greedy, greedy_continuation: Continue
) -> None:
    sequence = drafter.open(greedy(PROMPT, **ASKED))
    guess, *others = prepared(drafter, sequence)
    assert others, "a tiny model is sure of little"
    assert guess.token_ids == greedy_continuation(PROMPT, len(guess.token_ids))
    for other in others:
        left = next(i for i, (a, b) in enumerate(zip(other.token_ids, guess.token_ids, strict=False)) if a != b)
        known, rest = other.token_ids[: left + 1], other.token_ids[left + 1 :]
        assert rest == greedy_continuation([*PROMPT, *known], len(rest))
        assert len(other.confidence) == len(other.token_ids)
    assert [tuple(other.token_ids) for other in sequence.alternatives] == [tuple(o.token_ids) for o in others]


def test_the_guess_grows_where_all_of_it_may_be_accepted(drafter: ModelDrafter, greedy: Greedy) -> None:
    sequence = drafter.open(greedy(PROMPT, **{**ASKED, "num_alternatives": 16}))
    drafted = drafter.draft([sequence])[0]
    assert drafted is not None
    guess = prepared(drafter, sequence)[0]
    assert guess.token_ids[: len(drafted.token_ids)] == drafted.token_ids
    assert sequence.guess == guess


def test_coupled_guesses_are_ranked_by_their_noise(drafter: ModelDrafter, greedy: Greedy) -> None:
    params = SamplingParams(temperature=0.8, seed=7)
    opening = greedy(PROMPT, params=params, mode=VerificationMode.COUPLED, **ASKED)
    sequence = drafter.open(opening)
    guess, *others = prepared(drafter, sequence)
    assert others
    # After any outcome that was prepared for, a fresh drafter says the same.
    fresh = ModelDrafter(drafter._engine, ModelConfig(min_confidence=0.0))
    left = next(i for i, (a, b) in enumerate(zip(others[0].token_ids, guess.token_ids, strict=False)) if a != b)
    known, rest = others[0].token_ids[: left + 1], others[0].token_ids[left + 1 :]
    again = fresh.open(greedy([*PROMPT, *known], params=params, mode=VerificationMode.COUPLED))
    drafted = fresh.draft([again])[0]
    assert drafted is not None and drafted.token_ids[: len(rest)] == rest


@pytest.mark.parametrize("forwards", [1, 2, 3])
@pytest.mark.parametrize("end", ["commit", "pause", "close"])
def test_whatever_interrupts_it_every_block_comes_back(
    drafter: ModelDrafter, engine: Engine, greedy: Greedy, forwards: int, end: str
) -> None:
    free = engine.num_free_blocks
    sequence = drafter.open(greedy(PROMPT, **ASKED))
    drafter.draft([sequence])
    for _ in range(forwards):
        assert drafter.prepare([sequence]) == [None]
    if end == "commit":
        drafter.commit(sequence, len(PROMPT), [sequence.guess.token_ids[0], 1])
        drafter.draft([sequence])
    elif end == "pause":
        drafter.set_limit(sequence, 0)
    drafter.close(sequence)
    assert engine.num_free_blocks == free


def test_a_commit_that_was_prepared_for_is_answered_without_a_forward(
    drafter: ModelDrafter, engine: Engine, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = drafter.open(greedy(PROMPT, **{**ASKED, "max_draft_tokens": 3}))
    guess, other, *_ = prepared(drafter, sequence)
    left = next(i for i, (a, b) in enumerate(zip(other.token_ids, guess.token_ids, strict=False)) if a != b)
    drafter.commit(sequence, len(PROMPT), other.token_ids[: left + 1])
    monkeypatch.setattr(engine, "forward", None)
    drafted = drafter.draft([sequence])[0]
    assert drafted is not None and drafted.token_ids == other.token_ids[left + 1 :]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_alternatives": 0},
        {"params": SamplingParams(temperature=1.0), "mode": VerificationMode.RATIO},
        {"max_new_tokens": 2},
    ],
)
def test_nothing_is_prepared_that_could_not_be_used(
    drafter: ModelDrafter, greedy: Greedy, changes: dict[str, object]
) -> None:
    sequence = drafter.open(greedy(PROMPT, **{**ASKED, **changes}))
    assert prepared(drafter, sequence) == ()


def test_without_free_blocks_nothing_is_prepared_and_the_sequence_goes_on(
    make_engine: MakeEngine, greedy: Greedy, greedy_continuation: Continue
) -> None:
    drafter = ModelDrafter(make_engine(num_blocks=3), ModelConfig(min_confidence=0.0))
    sequence = drafter.open(greedy(PROMPT, **ASKED))
    assert prepared(drafter, sequence) == ()
    assert sequence.guess.token_ids == greedy_continuation(PROMPT, 4)


def test_sequences_are_prepared_for_together(drafter: ModelDrafter, greedy: Greedy) -> None:
    alone = drafter.open(greedy(PROMPT, **ASKED))
    expected = prepared(drafter, alone)
    both = [drafter.open(greedy(prompt, **ASKED)) for prompt in (PROMPT, PROMPT[3:])]
    drafter.draft(both)
    found: dict[DraftSequence, tuple[Drafted, ...]] = {}
    for _ in range(16):
        waiting = [s for s in both if s not in found]
        outcomes = drafter.prepare(waiting) if waiting else []
        found.update({s: paths for s, paths in zip(waiting, outcomes, strict=True) if paths is not None})
    assert [p.token_ids for p in found[both[0]]] == [p.token_ids for p in expected]


def test_what_is_prepared_for_one_makes_room_for_what_another_is_to_say_now(
    make_engine: MakeEngine, greedy: Greedy, greedy_continuation: Continue
) -> None:
    engine = make_engine(num_blocks=6)
    drafter = ModelDrafter(engine, ModelConfig(min_confidence=0.0))
    first, second = drafter.open(greedy(PROMPT, **ASKED)), drafter.open(greedy(PROMPT * 3))
    drafter.draft([first])
    assert drafter.prepare([first]) == [None]
    assert engine.num_free_blocks < 3, "the test is about a pool that branches have filled"
    drafted = drafter.draft([second])[0]
    assert drafted is not None and drafted.token_ids == greedy_continuation(PROMPT * 3, 4)
    assert drafter.prepare([first]) is not None
