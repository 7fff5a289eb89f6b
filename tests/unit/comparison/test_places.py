"""Where a draft should run: reckoned by hand, and by the workers that ship in virtual time."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from outrider.comparison.places import DraftPlace, Link, MeasuredDrafts, Placeable, Rounds, places
from outrider.comparison.step_line import StepLine
from outrider.drafters import ModelConfig
from outrider_controller.cli.drafts.plan import plan_command
from outrider_controller.router.config import PolicyConfig
from outrider_controller.whatif.stack import Setup, Times, VirtualStack

from tests.unit.whatif.test_what_if import texts

# A step takes 9 ms, and 1 ms for each row.
LINE = StepLine({1: ((1, 0.010), (2, 0.011)), 8: ((8, 0.017), (16, 0.025))}, prompt_s=0.0, prompt_token_s=0.0)
HEAD = Placeable("head", 8192, (Rounds(1, 2.5, 2.0, 0.003), Rounds(8, 2.0, 1.0, 0.010)))
MODEL = Placeable("model", 0, (Rounds(1, 2.0, 1.0, 0.004), Rounds(8, 2.0, 1.0, 0.011)))
MEASURED = MeasuredDrafts(LINE, {1: 0.001, 8: 0.001}, (HEAD, MODEL))
FAST, SLOW = Link(0.001, 1.024e9), Link(0.005, 1.024e6, slower=2.0)
EXPECTED = {
    # Tokens per second of each link, and time of the target's device for a token.
    ("", False, 1): (1 / 0.011, 1 / 0.011, 0.011),
    # Three rows, 1 ms between steps, 3 ms of the head.
    ("head", False, 1): (2.5 / 0.016, 2.5 / 0.016, 0.016 / 2.5),
    # 1 and 5 ms of network; 20 us and 20 ms for the features of 2.5 tokens; the head once and twice.
    ("head", True, 1): (2.5 / (0.013 + 0.00402), 2.5 / (0.013 + 0.031), 0.013 / 2.5),
    ("model", True, 1): (2.0 / (0.012 + 0.005), 2.0 / (0.012 + 0.013), 0.012 / 2.0),
    ("", False, 8): (8 / 0.018, 8 / 0.018, 0.018 / 8),
    ("head", False, 8): (16 / 0.036, 16 / 0.036, 0.036 / 16),
    # 16 rows; 1 and 5 ms of network; 128 us and 128 ms for the features of 16 tokens.
    ("head", True, 8): (16 / (0.026 + 0.011128), 16 / (0.026 + 0.153), 0.026 / 16),
    ("model", True, 8): (16 / (0.026 + 0.012), 16 / (0.026 + 0.027), 0.026 / 16),
}


def found(measured: MeasuredDrafts, link: Link) -> dict[tuple[str, bool, int], DraftPlace]:
    return {(place.name, place.on_worker, place.streams): place for place in places(measured, link)}


def test_tokens_and_freed_time_are_those_reckoned_by_hand() -> None:
    fast, slow = found(MEASURED, FAST), found(MEASURED, SLOW)
    assert fast.keys() == slow.keys() == EXPECTED.keys()
    for key, (with_fast, with_slow, card_s) in EXPECTED.items():
        assert (fast[key].tokens_per_s, slow[key].tokens_per_s) == pytest.approx((with_fast, with_slow)), key
        assert fast[key].card_s == slow[key].card_s == pytest.approx(card_s)
        assert fast[key].freed == pytest.approx(1 - card_s / EXPECTED["", False, key[2]][2])


def test_none_is_best_where_another_brings_more() -> None:
    for link, best in ((FAST, ("head", False, 1)), (Link(0.0, 1e12, 0.1), ("head", True, 1))):
        assert [key for key, place in found(MEASURED, link).items() if place.best and key[2] == 1] == [best]
    useless = Placeable("model", 0, (Rounds(1, 1.1, 4.0, 0.001),))
    places_of = found(MeasuredDrafts(LINE, {1: 0.0}, (useless,)), FAST)
    assert [key for key, place in places_of.items() if place.best] == [("", False, 1)]


@pytest.mark.parametrize(
    ("streams", "one_way_s"),
    [(1, 0.001), (8, 0.015), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0.010), (8, 0.001)))],
)
def test_what_is_reckoned_of_a_draft_worker_the_workers_do_in_virtual_time(streams: int, one_way_s: float) -> None:
    """By scheduler, waits and drafting that ship: with several streams more, because no step waits for all."""
    step_s, row_s, forward_s, drafted = 0.030, 0.001, 0.002, 4
    times = Times(
        target=lambda sequences, rows, tokens: step_s + row_s * rows,
        draft=lambda sequences, rows, tokens: forward_s,
        one_way_s=one_way_s,
        between_s=0.0,
    )
    drafting = ModelConfig(min_confidence=0.0, num_alternatives=0)
    policy = PolicyConfig(max_draft_tokens=drafted)
    alone = Setup(times, 1, policy=policy, drafting=drafting, mode="on", priced=False)
    ran = {n: VirtualStack(texts(), replace(alone, streams=n), 1).run(10.0, 3.0) for n in {1, streams}}
    line = StepLine({n: ((n, step_s + row_s * n), (n + 1, step_s + row_s * (n + 1))) for n in (1, 8)}, 0.0, 0.0)
    rounds = tuple(Rounds(n, ran[1].tokens / ran[1].rounds, drafted, drafted * forward_s) for n in (1, 8))
    measured = MeasuredDrafts(line, {streams: 0.0}, (Placeable("model", 0, rounds),))
    expected = found(measured, Link(2 * one_way_s))["model", True, streams].tokens_per_s
    assert 0.94 < ran[streams].tokens_per_s / expected < (1.06 if streams == 1 else 1.5)


def test_plan_reckons_again_what_was_measured_for_another_network(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"measured": asdict(MEASURED)}))

    def planned(*options: str) -> list[str]:
        result = CliRunner().invoke(plan_command, ["--measured", str(file), *options], standalone_mode=False)
        assert result.exception is None, result.exception
        return result.output.splitlines()

    assert "most tokens with 1 stream: head in the target" in planned()
    near = planned("--round-trip", "0us", "--gbit", "1000", "--slower", "0.1")
    assert "most tokens with 1 stream: head on a draft worker" in near
    [row] = (line.split() for line in near if line.startswith("head") and "worker" in line)
    assert row[-4:-2] == [f"{2.5 / (0.013 + 0.0003):.1f}", f"{1 - 0.013 / 2.5 / 0.011:.0%}"]
    file.write_text("{}")
    result = CliRunner().invoke(plan_command, ["--measured", str(file)])
    assert result.exit_code and "no output of outrider compare drafts" in str(result.exception)
