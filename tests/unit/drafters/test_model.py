"""The model drafter on a real engine: what it proposes, what it runs, and what it holds."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from outrider.drafters import Drafter, DraftSequence, ModelConfig, ModelDrafter, load_drafter
from outrider.engine import Engine, EngineConfig, Row
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import SamplingParams, VerificationMode
from outrider.tree import DraftTree
from safetensors.torch import load_file, save_file
from torch import Tensor

Greedy = Callable[..., SequenceSpec]
MakeEngine = Callable[..., Engine]
Continue = Callable[[list[int], int], list[int]]

PROMPT = [5, 6, 7, 8, 9, 10, 11]
NEVER_CUT = ModelConfig(min_confidence=0.0)


class CountingEngine(Engine):
    """The real engine, and how many tokens each forward ran."""

    forwards: list[int]

    def forward(self, rows: Sequence[Row]) -> Tensor:
        self.forwards.append(sum(len(row.token_ids) for row in rows))
        return super().forward(rows)


@pytest.fixture
def engine(make_engine: MakeEngine) -> CountingEngine:
    engine = make_engine()
    engine.__class__ = CountingEngine
    assert isinstance(engine, CountingEngine)
    engine.forwards = []
    return engine


@pytest.fixture
def drafter(engine: CountingEngine) -> ModelDrafter:
    return ModelDrafter(engine, NEVER_CUT)


def tokens_of(drafted: DraftTree | None) -> list[int]:
    assert drafted is not None
    return drafted.guess()


def draft_one(drafter: Drafter, sequence: DraftSequence) -> list[int]:
    return tokens_of(drafter.draft([sequence])[0])


def test_it_proposes_what_the_model_itself_would_say(
    drafter: ModelDrafter, greedy: Greedy, greedy_continuation: Continue
) -> None:
    assert draft_one(drafter, drafter.open(greedy(PROMPT))) == greedy_continuation(PROMPT, 4)


def test_a_target_that_samples_padding_keeps_its_draft(
    drafter: ModelDrafter, engine: CountingEngine, greedy: Greedy, greedy_continuation: Continue
) -> None:
    """The target's head has more rows than this model: its vocabulary is the same but for padding."""
    beyond = engine.info.vocab_size
    sequence = drafter.open(greedy([*PROMPT, beyond + 3]))
    first = draft_one(drafter, sequence)
    assert first == greedy_continuation([*PROMPT, 0], 4)
    drafter.commit(sequence, len(PROMPT) + 1, [first[0], beyond])
    assert draft_one(drafter, sequence) == greedy_continuation([*PROMPT, 0, first[0], 0], 4)
    drafter.commit(sequence, len(PROMPT) + 3, [beyond + 99, 5])
    assert draft_one(drafter, sequence) == greedy_continuation([*PROMPT, 0, first[0], 0, 0, 5], 4)


def test_one_forward_ingests_and_yields_the_first_guess_then_one_per_token(
    drafter: ModelDrafter, engine: CountingEngine, greedy: Greedy
) -> None:
    sequence = drafter.open(greedy(PROMPT))
    draft_one(drafter, sequence)
    assert engine.forwards == [7, 1, 1, 1]
    engine.forwards.clear()
    drafter.commit(sequence, 7, [1, 2, 3])
    draft_one(drafter, sequence)
    assert engine.forwards == [3, 1, 1, 1]


def test_after_a_full_acceptance_only_the_last_guess_and_the_bonus_are_ingested(
    drafter: ModelDrafter, engine: CountingEngine, greedy: Greedy, greedy_continuation: Continue
) -> None:
    sequence = drafter.open(greedy(PROMPT))
    guess = draft_one(drafter, sequence)
    engine.forwards.clear()
    bonus = greedy_continuation([*PROMPT, *guess], 1)
    drafter.commit(sequence, 7, guess + bonus)
    assert draft_one(drafter, sequence) == greedy_continuation([*PROMPT, *guess, *bonus], 4)
    assert engine.forwards == [2, 1, 1, 1]
    assert sequence.epoch == 0


def test_what_stands_of_a_guess_is_repeated_and_only_its_end_is_run(
    drafter: ModelDrafter, engine: CountingEngine, greedy: Greedy, greedy_continuation: Continue
) -> None:
    sequence = drafter.open(greedy(PROMPT))
    guess = draft_one(drafter, sequence)
    engine.forwards.clear()
    drafter.commit(sequence, 7, guess[:1])
    assert draft_one(drafter, sequence) == greedy_continuation([*PROMPT, guess[0]], 4)
    assert engine.forwards == [1]
    assert sequence.epoch == 0


def test_a_diverging_commit_rewinds_to_the_common_prefix_and_raises_the_epoch(
    drafter: ModelDrafter, engine: CountingEngine, greedy: Greedy, greedy_continuation: Continue
) -> None:
    sequence = drafter.open(greedy(PROMPT))
    guess = draft_one(drafter, sequence)
    engine.forwards.clear()
    truth = [guess[0], guess[1], (guess[2] + 1) % 384]
    drafter.commit(sequence, 7, truth)
    assert sequence.epoch == 1
    assert draft_one(drafter, sequence) == greedy_continuation([*PROMPT, *truth], 4)
    assert engine.forwards == [1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_committed_the_proposals_are_those_of_a_fresh_model(
    seed: int, drafter: ModelDrafter, greedy: Greedy, greedy_continuation: Continue
) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(384) for _ in range(rng.randrange(1, 40))] for _ in range(3)]
    sequences = [drafter.open(greedy(prompt, salt=bytes([seed]))) for prompt in prompts]
    for _ in range(12):
        chosen = [s for s in sequences if rng.random() < 0.8] or sequences
        for sequence, drafted in zip(chosen, drafter.draft(chosen), strict=True):
            guess = tokens_of(drafted)
            assert guess == greedy_continuation(sequence.tokens, 4)
            kept = guess[: rng.randrange(5)]
            extra = [rng.randrange(384)] if rng.random() < 0.7 or not kept else []
            drafter.commit(sequence, sequence.committed_len, kept + extra)
        if rng.random() < 0.3:
            drafter.set_limits(sequences[0], Speculation(0))
            drafter.set_limits(sequences[0], Speculation(4))


def test_many_sequences_are_drafted_in_the_forwards_of_one(
    drafter: ModelDrafter, engine: CountingEngine, greedy: Greedy, greedy_continuation: Continue
) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(10, 20)]
    drafted = drafter.draft([drafter.open(greedy(prompt)) for prompt in prompts])
    assert [tokens_of(d) for d in drafted] == [greedy_continuation(prompt, 4) for prompt in prompts]
    assert engine.forwards == [30, 10, 10, 10]


def test_each_sequence_has_its_own_limit(drafter: ModelDrafter, greedy: Greedy) -> None:
    limits = [1, 4, 2, 0]
    sequences = [drafter.open(greedy(PROMPT, max_draft_tokens=limit)) for limit in limits]
    assert [len(tokens_of(drafted)) for drafted in drafter.draft(sequences)] == limits


def test_a_long_lag_is_ingested_in_bounded_steps_while_others_draft(
    engine: CountingEngine, greedy: Greedy, greedy_continuation: Continue
) -> None:
    config = ModelConfig(min_confidence=0.0, max_batch_tokens=64, catch_up_tokens=20, ready_lag=8)
    drafter = ModelDrafter(engine, config)
    long_prompt = [random.Random(3).randrange(384) for _ in range(70)]
    far, near = drafter.open(greedy(long_prompt)), drafter.open(greedy(PROMPT))
    for _ in range(3):
        behind, drafted = drafter.draft([far, near])
        assert behind is None
        truth = [*tokens_of(drafted), 1]
        drafter.commit(near, near.committed_len, truth)
    caught_up, _ = drafter.draft([far, near])
    assert tokens_of(caught_up) == greedy_continuation(long_prompt, 4)
    assert max(engine.forwards) <= 64


def test_alone_a_long_prompt_is_ingested_as_fast_as_the_batch_allows(engine: CountingEngine, greedy: Greedy) -> None:
    drafter = ModelDrafter(engine, ModelConfig(min_confidence=0.0, max_batch_tokens=64))
    sequence = drafter.open(greedy([1, 2, 3, 4, 5] * 30))
    assert drafter.draft([sequence]) == [None]
    assert drafter.draft([sequence]) == [None]
    assert len(draft_one(drafter, sequence)) == 4
    assert engine.forwards == [64, 64, 22, 1, 1, 1]


def test_a_paused_sequence_holds_no_blocks_and_catches_up_after_the_pause(
    drafter: ModelDrafter, engine: CountingEngine, greedy: Greedy, greedy_continuation: Continue
) -> None:
    free = engine.kv.num_free_blocks
    sequence = drafter.open(greedy(PROMPT))
    draft_one(drafter, sequence)
    assert engine.kv.num_free_blocks < free
    drafter.set_limits(sequence, Speculation(0))
    assert engine.kv.num_free_blocks == free
    missed = [random.Random(1).randrange(384) for _ in range(40)]
    for token in missed:
        drafter.commit(sequence, sequence.committed_len, [token])
    drafter.set_limits(sequence, Speculation(4))
    assert draft_one(drafter, sequence) == greedy_continuation([*PROMPT, *missed], 4)


def test_a_sequence_that_finds_no_blocks_does_not_draft_and_others_do(
    make_engine: MakeEngine, greedy: Greedy, greedy_continuation: Continue
) -> None:
    drafter = ModelDrafter(make_engine(num_blocks=3), NEVER_CUT)
    small, large = drafter.open(greedy(PROMPT)), drafter.open(greedy([1, 2, 3] * 20))
    drafted_small, drafted_large = drafter.draft([small, large])
    assert tokens_of(drafted_small) == greedy_continuation(PROMPT, 4)
    assert tokens_of(drafted_large) == []


def test_room_that_becomes_free_is_used_at_the_next_round(make_engine: MakeEngine, greedy: Greedy) -> None:
    drafter = ModelDrafter(make_engine(num_blocks=3), NEVER_CUT)
    first, second = drafter.open(greedy(list(range(40)))), drafter.open(greedy(list(range(100, 140))))
    assert [len(tokens_of(d)) for d in drafter.draft([first, second])] == [4, 0]
    drafter.close(first)
    drafter.commit(second, 40, [1])
    assert len(draft_one(drafter, second)) == 4


def test_every_block_comes_back(drafter: ModelDrafter, engine: CountingEngine, greedy: Greedy) -> None:
    free = engine.kv.num_free_blocks
    sequences = [drafter.open(greedy([i] * 20)) for i in range(1, 9)]
    for sequence, drafted in zip(sequences, drafter.draft(sequences), strict=True):
        drafter.commit(sequence, 20, [*tokens_of(drafted), 3])
    drafter.draft(sequences)
    for sequence in sequences:
        drafter.close(sequence)
    assert engine.kv.num_free_blocks == free


def test_only_committed_blocks_become_findable(drafter: ModelDrafter, greedy: Greedy) -> None:
    sequence = drafter.open(greedy([7] * 30))
    draft_one(drafter, sequence)
    assert len(drafter.take_prefix_changes()[0]) == 1
    drafter.commit(sequence, 30, [7, 7, 7])
    draft_one(drafter, sequence)
    assert len(drafter.take_prefix_changes()[0]) == 1


def test_a_second_sequence_with_the_same_prompt_ingests_only_what_is_not_cached(
    drafter: ModelDrafter, engine: CountingEngine, greedy: Greedy
) -> None:
    prompt = list(range(40))
    expected = draft_one(drafter, drafter.open(greedy(prompt)))
    engine.forwards.clear()
    assert draft_one(drafter, drafter.open(greedy(prompt))) == expected
    assert engine.forwards == [8, 1, 1, 1]
    engine.forwards.clear()
    draft_one(drafter, drafter.open(greedy(prompt, salt=b"another tenant")))
    assert engine.forwards == [40, 1, 1, 1]


def test_a_proposal_ends_where_the_model_is_unsure(engine: CountingEngine, greedy: Greedy) -> None:
    [whole] = ModelDrafter(engine, NEVER_CUT).draft([DraftSequence.start(greedy(PROMPT, max_draft_tokens=8))])
    assert whole is not None
    joint = [float(p) for p in torch.tensor(whole.chances).cumprod(0)]
    threshold = joint[1] * 1.001
    drafter = ModelDrafter(engine, ModelConfig(min_confidence=threshold))
    # The token that made it doubtful is still told: its forward is spent.
    expected = 1 + sum(1 for chance in joint if chance >= threshold)
    engine.forwards.clear()
    assert draft_one(drafter, drafter.open(greedy(PROMPT, max_draft_tokens=8))) == whole.guess()[:expected]
    assert len(engine.forwards) == expected < 8


@pytest.mark.parametrize("mode", [VerificationMode.COUPLED, VerificationMode.RATIO])
def test_sampled_proposals_are_a_function_of_seed_and_position(
    mode: VerificationMode, drafter: ModelDrafter, greedy: Greedy
) -> None:
    def proposals(seed: int) -> list[int]:
        params = SamplingParams(temperature=1.5, seed=seed)
        opening = greedy(PROMPT, mode=mode, params=params, max_draft_tokens=8, salt=bytes([seed]))
        return draft_one(drafter, drafter.open(opening))

    assert proposals(1) == proposals(1)
    assert proposals(1) != proposals(2)


def test_in_ratio_mode_each_token_comes_with_a_q_that_could_have_drawn_it(
    drafter: ModelDrafter, greedy: Greedy
) -> None:
    opening = greedy(PROMPT, mode=VerificationMode.RATIO, params=SamplingParams(temperature=1.0, seed=4))
    sequence = drafter.open(opening)
    [drafted] = drafter.draft([sequence])
    assert drafted is not None
    assert len(drafted.q) == len(drafted.guess()) == len(drafted.chances) == 4
    assert all(token in q.token_ids for token, q in zip(drafted.guess(), drafted.q, strict=True))


def test_a_full_context_is_not_exceeded(make_engine: MakeEngine, greedy: Greedy) -> None:
    drafter = ModelDrafter(make_engine(max_context_len=32), NEVER_CUT)
    sequence = drafter.open(greedy(list(range(30))))
    assert len(draft_one(drafter, sequence)) == 2
    drafter.commit(sequence, 30, [1, 2])
    assert draft_one(drafter, sequence) == []


def test_a_reduced_output_vocabulary_is_mapped_to_full_ids(
    make_engine: MakeEngine, greedy: Greedy, greedy_continuation: Continue
) -> None:
    engine = make_engine()
    engine.token_map = torch.arange(384) * 2
    drafter = ModelDrafter(engine, NEVER_CUT)
    [first] = greedy_continuation(PROMPT, 1)
    assert draft_one(drafter, drafter.open(greedy(PROMPT, max_draft_tokens=1))) == [2 * first]


def test_rows_of_the_head_beyond_the_tokens_are_never_drafted(tiny: Path, tmp_path: Path, greedy: Greedy) -> None:
    copy = Path(shutil.copytree(tiny, tmp_path / "padded"))
    tensors = load_file(copy / "model.safetensors")
    name = "model.embed_tokens.weight"
    # Loud ones: without a bound they are most of what is drafted.
    tensors[name] = torch.cat([tensors[name], torch.randn(64, tensors[name].shape[1])])
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": 448}))
    engine = EngineConfig(dtype="float32", num_blocks=64)
    drafter = load_drafter(copy, engine=engine, model=NEVER_CUT)
    assert drafter.info.vocab_size == 448
    proposed = [token for seed in range(20) for token in draft_one(drafter, drafter.open(greedy([seed + 5, 40])))]
    assert len(proposed) == 80 and max(proposed) < 384
