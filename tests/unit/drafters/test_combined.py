"""N-grams where there is a long match, the model elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from outrider.drafters import CombinedDrafter, DrafterKind, ModelConfig, ModelDrafter, NgramDrafter, load_drafter
from outrider.drafting.lookup.ngram import NgramConfig
from outrider.drafting.source import Opening
from outrider.drafting.tree import DraftTree
from outrider.engine import CheckpointError, Engine, EngineConfig

Greedy = Callable[..., Opening]
MakeEngine = Callable[..., Engine]
Continue = Callable[[list[int], int], list[int]]

REPEATING = [20, 21, 22, 23, 24, 20, 21, 22]
PLAIN = [5, 6, 7, 8, 9]


@pytest.fixture
def drafter(make_engine: MakeEngine) -> CombinedDrafter:
    model = ModelDrafter(make_engine(), ModelConfig(min_confidence=0.0))
    return CombinedDrafter(NgramDrafter(384, 512, NgramConfig(min_match=3)), model)


def said(drafted: DraftTree | None) -> tuple[str, list[int]]:
    assert drafted is not None
    return drafted.source, drafted.guess()


def test_each_sequence_of_one_round_gets_the_source_that_suits_it(
    drafter: CombinedDrafter, greedy: Greedy, greedy_continuation: Continue
) -> None:
    drafted = drafter.draft([drafter.open(greedy(REPEATING)), drafter.open(greedy(PLAIN))])
    assert said(drafted[0]) == ("ngram", [23, 24, 20, 21])
    assert said(drafted[1]) == ("model", greedy_continuation(PLAIN, 4))


def test_a_match_shorter_than_the_minimum_is_left_to_the_model(drafter: CombinedDrafter, greedy: Greedy) -> None:
    [drafted] = drafter.draft([drafter.open(greedy([20, 21, 22, 23, 20, 21]))])
    assert said(drafted)[0] == "model"


def test_the_model_catches_up_when_the_matches_end(
    drafter: CombinedDrafter, greedy: Greedy, greedy_continuation: Continue
) -> None:
    sequence = drafter.open(greedy(REPEATING))
    free = drafter.num_free_blocks
    drafter.draft([sequence])
    assert drafter.num_free_blocks == free
    drafter.commit(sequence, 8, [23, 24, 90])
    [drafted] = drafter.draft([sequence])
    assert said(drafted) == ("model", greedy_continuation([*REPEATING, 23, 24, 90], 4))
    assert sequence.epoch == 1


def test_closing_gives_back_everything(drafter: CombinedDrafter, greedy: Greedy) -> None:
    free = drafter.num_free_blocks
    sequences = [drafter.open(greedy(REPEATING)), drafter.open(greedy(PLAIN))]
    drafter.draft(sequences)
    for sequence in sequences:
        drafter.close(sequence)
    assert drafter.num_free_blocks == free


@pytest.mark.parametrize("kind", list(DrafterKind))
def test_every_kind_loads_from_a_checkpoint_and_says_what_it_is(kind: DrafterKind, tiny: Path, greedy: Greedy) -> None:
    drafter = load_drafter(kind, tiny, engine=EngineConfig(dtype="float32", num_blocks=16))
    assert drafter.info.kind is kind
    assert (drafter.info.vocab_size, drafter.info.max_context_len) == (384, 512)
    [drafted] = drafter.draft([drafter.open(greedy(REPEATING))])
    assert drafted is not None


def test_a_config_without_a_vocabulary_is_refused_by_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_drafter(DrafterKind.NGRAM, tmp_path)


def test_only_the_models_guesses_are_run_ahead_of(make_engine: MakeEngine, greedy: Greedy) -> None:
    model = ModelDrafter(make_engine(), ModelConfig(min_confidence=0.0))
    drafter = CombinedDrafter(NgramDrafter(384, 512, NgramConfig(min_match=3)), model)
    sequences = [drafter.open(greedy(prompt, run_ahead_tokens=1)) for prompt in (REPEATING, PLAIN)]
    drafter.draft(sequences)
    assert [len(drafted.guess()) for drafted in drafter.run_ahead(sequences)] == [0, 1]
