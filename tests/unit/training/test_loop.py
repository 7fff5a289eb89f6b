"""The schedule of a training, seen from what it trains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from outrider.training import loop
from outrider.training.loop import Learner, LoopConfig, Training
from outrider.training.shards import Corpus, Sample
from outrider.training.student import Scores
from torch import nn

TOKENS = 64
SAMPLES = [Sample(torch.zeros(TOKENS + 1), torch.zeros(TOKENS, 2), torch.ones(TOKENS, dtype=torch.bool), None)] * 4


class Slope(Learner):
    """One weight with a constant gradient: Adam moves it by the rate of each step."""

    def __init__(self) -> None:
        self.kind, self.module = "slope", nn.Linear(1, 1, bias=False)
        self.learnable = list(self.module.parameters())
        self.seen: list[float] = []

    def score(self, samples: Sequence[Sample]) -> Scores:
        self.seen.append(self.learnable[0].item())
        self.learnable[0].grad = torch.ones(1, 1)
        return Scores(1.0, 1.0)

    def save(self, out: Path, base: str, recipe: dict[str, Any]) -> None: ...


class Few:
    def passes(self, rng: object) -> Any:
        while True:
            yield SAMPLES


@pytest.mark.parametrize("steps", [4, 20, 400])
def test_a_training_of_any_length_learns_at_its_rate(tmp_path: Path, steps: int) -> None:
    config = LoopConfig(train_tokens=steps * TOKENS, batch_tokens=TOKENS, learning_rate=1e-2)
    learner = Slope()
    Training(learner, config, tmp_path / "kept", "").run(cast(Corpus, Few()), lambda *_: None)
    moved = [before - after for before, after in zip(learner.seen, learner.seen[1:], strict=False)]
    assert len(learner.seen) == steps
    assert 0.7 * config.learning_rate < max(moved) < 1.1 * config.learning_rate
    assert math.isclose(min(moved), min(moved[0], moved[-1])), "it begins and ends slowly"


def test_a_training_that_has_a_time_ends_with_it_as_slowly_as_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = itertools.count(step=0.25)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    config = LoopConfig(train_tokens=10**9, batch_tokens=TOKENS, learning_rate=1e-2, seconds=100, warmup_steps=4)
    learner = Slope()
    Training(learner, config, tmp_path / "kept", "").run(cast(Corpus, Few()), lambda *_: None)
    moved = [before - after for before, after in zip(learner.seen, learner.seen[1:], strict=False)]
    assert 100 < len(learner.seen) < 400
    assert moved[-1] < 0.06 * config.learning_rate < 0.9 * config.learning_rate < max(moved)


def test_a_training_that_has_ended_begins_again_where_there_is_more_to_learn_from(tmp_path: Path) -> None:
    config = LoopConfig(train_tokens=4 * TOKENS, batch_tokens=TOKENS)

    def steps(corpus_tokens: int) -> int:
        learner = Slope()
        training = Training(learner, config, tmp_path / "kept", "", corpus_tokens)
        training.run(cast(Corpus, Few()), lambda *_: None)
        assert training.learned == config.train_tokens
        return len(learner.seen)

    assert [steps(corpus_tokens) for corpus_tokens in (100, 100, 200, 200)] == [4, 0, 4, 0]
