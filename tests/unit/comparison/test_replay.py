"""A replay is what the target itself would do: the same rounds, tokens and verdicts, without the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from outrider.comparison.compare import KnownTexts, ReplayEngine, Shares
from outrider.comparison.step_line import StepLine, measure_steps
from outrider.draft.worker import DraftWorker
from outrider.drafters import load_drafter
from outrider.drafting.source import DraftSource, make_sources
from outrider.engine import HEAD_INPUT, Engine, EngineConfig, Row
from outrider.engine.loading.loader import load_engine
from outrider.heads import HeadDrafts
from outrider.heads.interface import DraftHead
from outrider.sim.pair import Answered, DrafterSource, Pair
from outrider.testing.tiny import tiny_checkpoint
from outrider.training.head_student import HeadLearner
from outrider.training.student import StudentConfig
from torch import Tensor

CONFIG = EngineConfig(dtype="float32", num_blocks=256, prefix_cache=False)
# The second half of each repeats the first, so that lookups find something.
PROMPTS = [[40 + i, 41, 42, 43 + i % 3, 40 + i, 41, 42] for i in range(9)]
LINE = StepLine({1: ((1, 1.0), (2, 1.5)), 8: ((8, 2.0), (16, 4.0))}, prompt_s=0.5, prompt_token_s=0.1)


@pytest.fixture(scope="module")
def target(tiny: Path) -> Engine:
    return load_engine(tiny, CONFIG)


def model(tmp_path: Path, tiny: Path) -> list[DraftSource]:
    """Half of its guesses are right: the target, but for some noise."""
    other = tiny_checkpoint(tmp_path / "other")
    from safetensors.torch import load_file, save_file

    weights = load_file(other / "model.safetensors")
    torch.manual_seed(0)
    for name, value in weights.items():
        if "mlp" in name:
            weights[name] = value + 0.03 * torch.randn_like(value)
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    return [DrafterSource(DraftWorker(load_drafter(other, engine=CONFIG), 8))]


def head(tmp_path: Path, tiny: Path) -> list[DraftSource]:
    made: DraftHead = HeadLearner("mtp", tiny, StudentConfig(layers=(0, 1)), None, "cpu", None).module.eval()
    return [HeadDrafts(made)]


def lookups(tmp_path: Path, tiny: Path) -> list[DraftSource]:
    return make_sources(["ngram", "suffix"])


def answers(engine: Engine, sources: Sequence[DraftSource], streams: int, *, speculate: bool = True) -> list[Answered]:
    pair = Pair(engine, None, max_sequences=streams, lookups=(), sources=sources, row_price=lambda _: 0.0)
    return pair.answer(PROMPTS, 40, speculate=speculate)


def states_of(engine: Engine, text: list[int]) -> Tensor:
    sequence = engine.kv.open([])
    found = engine.forward_tapped([Row(sequence, text, 0, num_tapped=len(text))], (HEAD_INPUT,))[1].clone()
    engine.kv.close(sequence)
    return found


@pytest.fixture(scope="module")
def texts(target: Engine) -> list[list[int]]:
    plain = answers(target, [], 4, speculate=False)
    return [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, plain, strict=True)]


@pytest.fixture(scope="module")
def known(target: Engine, texts: list[list[int]]) -> KnownTexts:
    return KnownTexts(texts, [states_of(target, text) for text in texts])


@pytest.mark.parametrize(
    ("make", "streams"),
    [
        (model, 4),
        (head, 1),
        (lookups, 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((model, 1), (head, 4), (lookups, 1))),
    ],
)
def test_a_replay_commits_in_each_round_what_the_target_commits(
    target: Engine, known: KnownTexts, tiny: Path, tmp_path: Path, make: object, streams: int
) -> None:
    assert callable(make)
    real = answers(target, make(tmp_path / "real", tiny), streams)
    replayed = answers(ReplayEngine(target, known, LINE), make(tmp_path / "replayed", tiny), streams)

    def counts(found: list[Answered]) -> list[tuple[object, ...]]:
        return [(a.token_ids, a.num_steps, a.num_verified, a.num_accepted, a.num_hits) for a in found]

    assert counts(replayed) == counts(real)
    assert sum(a.num_accepted for a in real) > 0
    assert all(a.num_hits <= min(a.num_steps, a.num_accepted) for a in real)


class Counting(ReplayEngine):
    """Counts the drafted tokens of each row, those at the same depth of its tree once."""

    drafted = 0

    def forward_tapped(self, rows: Sequence[Row], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        for row in rows:
            depths: list[int] = []
            for parent in row.parents:
                depths.append(depths[parent] + 1 if parent >= 0 else 1)
            self.drafted += max(depths, default=0)
        return super().forward_tapped(rows, layers)


def test_shares_are_of_all_drafted_tokens_and_of_those_up_to_the_first_rejected(
    target: Engine, known: KnownTexts, tiny: Path, tmp_path: Path
) -> None:
    engine = Counting(target, known, LINE)
    replayed = answers(engine, lookups(tmp_path, tiny), 4)
    # Each round commits one token of the target's own.
    accepted = sum(len(each.token_ids) - each.num_steps for each in replayed)
    shares = Shares.of(replayed, 1.0, 1.0)
    assert shares.of_drafted == pytest.approx(accepted / engine.drafted, abs=1e-4)
    assert shares.of_drafted < shares.acceptance < 1


def test_a_replays_clock_runs_by_the_measured_steps_and_not_by_what_the_replay_takes(
    target: Engine, texts: list[list[int]]
) -> None:
    engine = ReplayEngine(target, KnownTexts(texts), LINE)
    pair = Pair(engine, None, max_sequences=1, lookups=(), clock=engine.clock)
    started_s = engine.clock()
    pair.answer(PROMPTS[:1], 40, speculate=False)
    # One step reads the prompt and gives the first token.
    steps_s = 0.5 + 0.1 * len(PROMPTS[0]) + 1.0 * (len(texts[0]) - len(PROMPTS[0]) - 1)
    assert steps_s <= engine.clock() - started_s < steps_s + 5.0


@pytest.mark.parametrize(
    ("sequences", "rows", "expected"), [(1, 1, 1.0), (1, 2, 1.5), (1, 4, 2.5), (8, 12, 3.0), (8, 8, 2.0), (8, 24, 6.0)]
)
def test_the_time_of_a_step_lies_on_the_line_through_what_was_measured(
    sequences: int, rows: int, expected: float
) -> None:
    assert LINE.seconds(sequences, rows, 0) == pytest.approx(expected)
    assert LINE.seconds(sequences, rows, 5) == pytest.approx(expected + 0.5)


@pytest.mark.parametrize(("streams", "context"), [(3, 20), (9, 500)])
def test_measuring_steps_takes_no_more_blocks_than_there_are_and_gives_back_all(
    target: Engine, streams: int, context: int
) -> None:
    line = measure_steps(target, (1, streams), context)
    assert sorted(line.decoding) == sorted({1, 2, streams} | {4, 8} & set(range(streams)))
    assert all(seconds > 0 for points in line.decoding.values() for _, seconds in points)
    assert target.kv.num_free_blocks == target.info.num_blocks
