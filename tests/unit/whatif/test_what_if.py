"""What `outrider plan --what-if` says, compared with Leviathan's formulas and with times that are known."""

from __future__ import annotations

import json
import random
import statistics
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from outrider.drafters import ModelConfig
from outrider_controller.cli.drafts.plan import plan_command
from outrider_controller.cli.drafts.what_if import question_of
from outrider_controller.router.config import PolicyConfig
from outrider_controller.whatif.forecast import Fleet, Prices, half_width
from outrider_controller.whatif.recorded import VOCAB_SIZE, Recording
from outrider_controller.whatif.stack import RunResult, Setup, Times, VirtualStack
from outrider_controller.whatif.texts import Text, Texts

STEP_S, ROW_S, FORWARD_S, WAY_S = 0.030, 0.001, 0.002, 0.001
CHANCE, PROMPT, LENGTH = 0.8, 12, 240
RIGHT, WRONG = 7, 8


def expected_tokens(cap: int) -> float:
    """Leviathan et al. 2023, equation 1."""
    return float((1 - CHANCE ** (cap + 1)) / (1 - CHANCE))


def times(one_way_s: float = WAY_S) -> Times:
    return Times(
        target=lambda sequences, rows, tokens: STEP_S + ROW_S * (rows - sequences),
        draft=lambda sequences, rows, tokens: FORWARD_S,
        one_way_s=one_way_s,
        between_s=0.0,
    )


def texts(count: int = 60) -> Texts:
    chance = random.Random(3)
    guess = {True: ((RIGHT, CHANCE),), False: ((WRONG, CHANCE),)}
    made = [
        Text([1] * PROMPT, [RIGHT] * LENGTH, [guess[chance.random() < CHANCE] for _ in range(LENGTH)])
        for _ in range(count)
    ]
    return Texts(made, VOCAB_SIZE)


def run(cap: int, *, mode: str = "on", one_way_s: float = WAY_S, streams: int = 1, seconds: float = 30.0) -> RunResult:
    setup = Setup(
        times(one_way_s),
        streams=streams,
        policy=PolicyConfig(max_draft_tokens=cap),
        drafting=ModelConfig(min_confidence=0.0, num_alternatives=0),
        mode=mode,
        priced=False,
    )
    return VirtualStack(texts(), setup).run(seconds, seconds / 10)


def test_a_plain_token_takes_a_step() -> None:
    assert run(4, mode="off").tokens_per_s == pytest.approx(1 / STEP_S, rel=0.01)
    # A request that begins misses a step of the others.
    assert run(4, mode="off", streams=3).tokens_per_s == pytest.approx(3 / STEP_S, rel=0.02)


@pytest.mark.parametrize("cap", [*(pytest.param(cap, marks=pytest.mark.slow) for cap in (1, 2)), 4])
def test_a_round_brings_and_takes_what_the_formulas_say(cap: int) -> None:
    ran = run(cap)
    assert ran.tokens / ran.rounds == pytest.approx(expected_tokens(cap), rel=0.05)
    round_s = STEP_S + cap * (ROW_S + FORWARD_S) + 2 * WAY_S
    assert ran.tokens_per_s == pytest.approx(expected_tokens(cap) / round_s, rel=0.07)


def test_a_longer_way_costs_time() -> None:
    assert run(4, one_way_s=0.01, seconds=8.0).tokens_per_s < 0.8 * run(4, seconds=8.0).tokens_per_s


def lines(cap: int = 4, count: int = 20) -> Iterator[dict[str, Any]]:
    """As `outrider trace export` writes them, of requests that were served by one stream."""
    chance = random.Random(9)
    for number in range(count):
        rounds, position, at_ms = [], PROMPT, 0.0
        while position < PROMPT + LENGTH:
            drafted = min(cap, PROMPT + LENGTH - position - 1) if position > PROMPT else 0
            accepted = next((n for n in range(drafted) if chance.random() >= CHANCE), drafted)
            step_ms = 1e3 * (STEP_S + ROW_S * drafted)
            wait_ms = 1e3 * (FORWARD_S * drafted + 2 * WAY_S)
            at_ms += step_ms + wait_ms
            rounds.append(
                {
                    "position": position,
                    "drafted": drafted,
                    "verified": min(drafted, accepted + 1),
                    "accepted": accepted,
                    "chances": [CHANCE] * drafted,
                    "token_sources": ["model"] * drafted,
                    "sources": [{"source": "model", "made_by": "draft"}] if drafted else [],
                    "verify_ms": step_ms,
                    "prefill_ms": 0.0,
                    "queue_ms": wait_ms,
                    "wait_ms": wait_ms,
                    "wire_ms": 2e3 * WAY_S,
                    "draft_ms": 1e3 * FORWARD_S * drafted,
                    "batch_sequences": 1,
                    "batch_tokens": 1 + drafted,
                    "at_ms": at_ms,
                }
            )
            position += accepted + 1
        yield {
            "schema": "outrider/rounds/v1",
            "tenant": "acme" if number % 2 else "other",
            "prompt_tokens": PROMPT,
            "cached_tokens": 0,
            "output_tokens": LENGTH,
            "events": [{"role": "draft", "event": "opened", "model": "small"}],
            "rounds": rounds,
        }


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    file = tmp_path / "rounds.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines()))
    return file


def test_times_are_read_off_the_rounds(recorded: Path) -> None:
    found = Recording.read(recorded).times()
    assert found.target(1, 1, 0) == pytest.approx(STEP_S, rel=0.02)
    assert found.target(1, 5, 0) == pytest.approx(STEP_S + 4 * ROW_S, rel=0.02)
    assert found.draft(1, 1, 0) == pytest.approx(FORWARD_S)
    assert found.one_way_s == pytest.approx(WAY_S)


@pytest.mark.parametrize("cap", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_cap_that_was_not_recorded_is_predicted(recorded: Path, cap: int) -> None:
    asked = {"max_draft_tokens": cap, "mode": "on", "row_price": False, "repeats": 1}
    drafted = question_of(Recording.read(recorded), asked).answer(Fleet(1)).drafted
    assert drafted.tokens_per_round == pytest.approx(expected_tokens(cap), rel=0.05)


def test_targets_and_prices_scale_it(recorded: Path) -> None:
    question = question_of(Recording.read(recorded), {"repeats": 1, "price_h100": 3.6, "seconds": 10.0})
    one, four = question.answer(Fleet(2, 1, 1)), question.answer(Fleet(8, 4, 4))
    assert four.plain.tokens_per_s == pytest.approx(4 * one.plain.tokens_per_s, rel=0.01)
    assert one.plain.per_million == pytest.approx(1e6 / one.plain.tokens_per_s * 0.001, rel=0.01)
    assert one.saving == pytest.approx(1 - one.drafted.per_million / one.plain.per_million, abs=0.01)
    assert Prices(2.5, 0.6).per_million(4, 4, 100.0) == pytest.approx(12.4 / 3600 * 1e4)


def test_streams_and_drafts_that_targets_cannot_share_evenly_count_as_many_as_they_are(recorded: Path) -> None:
    question = question_of(Recording.read(recorded), {"repeats": 1, "seconds": 4.0})
    one = question.answer(Fleet(1, 1, 1)).plain.tokens_per_s
    idle, uneven = question.answer(Fleet(1, 4, 4)).plain, question.answer(Fleet(5, 2, 2)).plain
    assert idle.tokens_per_s == pytest.approx(one) and idle.per_million == pytest.approx(4 / 3600 * 1e6 / one)
    assert uneven.tokens_per_s == pytest.approx(5 * one, rel=0.05)


def test_three_drafts_of_two_targets_are_less_than_four() -> None:
    times = Times(lambda n, rows, tokens: STEP_S, draft=lambda n, rows, tokens: n * FORWARD_S)
    seen = {d: Fleet(16, 2, d).setup(Setup(times)) for d in (1, 2, 3, 4)}
    forwards = {d: (setup.drafts, setup.times.draft(12, 12, 0) / FORWARD_S) for d, setup in seen.items()}
    assert forwards == {1: (1, 24), 2: (1, 12), 3: (2, 16), 4: (2, 12)}


def test_more_requests_than_one_run_can_number_are_drawn_from(recorded: Path) -> None:
    question = question_of(Recording.read(recorded), {"repeats": 1, "seconds": 1.0})
    many = replace(question, texts=[*question.texts] * (VOCAB_SIZE**2 // len(question.texts) + 1))
    assert many.answer(Fleet(1)).plain.tokens_per_s == pytest.approx(1 / STEP_S, rel=0.1)


@pytest.mark.parametrize(("count", "quantile"), [(2, 6.314), (10, 1.833), (11, 1.812), (16, 1.753), (31, 1.697)])
def test_the_interval_is_students(count: int, quantile: float) -> None:
    values = [float(number) for number in range(count)]
    wanted = quantile * statistics.stdev(values) / count**0.5
    assert half_width(values) == pytest.approx(wanted, rel=0.01)


def test_the_command_prints_figures_and_draws_the_saving(recorded: Path, tmp_path: Path) -> None:
    plot = tmp_path / "saving.svg"
    short = ("--seconds", "3", "--repeats", "2", "-o", "json", "--plot", str(plot), "--draft", "small")
    fleet = ("--streams", "2", "--targets", "1", "--rtt", "5ms", "--price-h100", "2.5", "--price-l4", "0.6")
    result = CliRunner().invoke(plan_command, ["--what-if", str(recorded), *fleet, *short], standalone_mode=False)
    assert result.exception is None, result.exception
    found = json.loads(result.stdout)
    assert found["schema"] == "outrider/what-if/v1"
    assert found["low"] <= found["saving"] <= found["high"]
    assert found["drafted"]["p50_ms"] <= found["drafted"]["p99_ms"]
    assert ET.fromstring(plot.read_text()).tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--rtt", "5"], "--rtt"),
        (["--mix", "acme"], "--mix"),
        (["--mix", "nobody=1"], "nobody"),
        (["--draft", "unknown"], "--draft unknown: it served no request of the file; ask for one of small"),
    ],
)
def test_what_cannot_be_answered_is_named(recorded: Path, arguments: list[str], names: str) -> None:
    result = CliRunner().invoke(plan_command, ["--what-if", str(recorded), *arguments])
    assert result.exit_code != 0
    assert names in (result.output + str(result.exception))


def test_a_file_of_something_else_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text(json.dumps(next(lines())) + '\n{"schema": "outrider/trace/v1"}\n')
    with pytest.raises(ValueError, match=r"odd\.jsonl:2: .*schema"):
        Recording.read(file)
