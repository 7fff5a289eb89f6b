"""`outrider plan` reckons as the textbook does."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from outrider_controller.cli.drafts.plan import ForecastRound, best_round, plan_command, tokens_per_round


def planned(*arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(plan_command, [*arguments, "-o", "json"], standalone_mode=False)
    assert result.exception is None, result.exception
    found: dict[str, object] = json.loads(result.output)
    return found


def test_the_textbook_example() -> None:
    found = planned("--tokens-per-round", "3", "-k", "4", "--cost-ratio", "6", "--tokens", "12")
    assert (found["target_passes"], found["step_equivalents"]) == (4.0, 6.7)
    found = planned(
        *("--tokens-per-round", "3", "--cost-ratio", "6", "--target-b", "70", "--draft-b", "8", "--memory-gb", "80")
    )
    assert (found["weights_gb"], found["fits_on_one_device"]) == (156.0, False)


def test_it_plans_all_that_a_client_may_request() -> None:
    assert planned("--acceptance", "0.95", "--cost-ratio", "50", "-k", "64")["num_draft_tokens"] == 64


@pytest.mark.parametrize(("acceptance", "k", "tokens"), [(0.0, 4, 1.0), (1.0, 4, 5.0), (0.5, 2, 1.75)])
def test_tokens_of_a_round(acceptance: float, k: int, tokens: float) -> None:
    assert tokens_per_round(acceptance, k) == pytest.approx(tokens)


def test_the_best_k_is_none_where_drafting_never_pays_and_grows_with_acceptance() -> None:
    assert best_round(0.3, 2.0, 0.2, 16).num_draft_tokens == 0
    counts = [best_round(acceptance, 10.0, 0.0, 32).num_draft_tokens for acceptance in (0.3, 0.6, 0.9)]
    assert counts == sorted(set(counts))
    assert ForecastRound(0, 1.0, 2.0).speedup == 1.0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cost-ratio", "6"],
        ["--cost-ratio", "6", "--acceptance", "0.5", "--tokens-per-round", "2"],
        ["--cost-ratio", "6", "--tokens-per-round", "9", "-k", "4"],
        ["--cost-ratio", "0", "--acceptance", "0.5"],
        ["--acceptance", "0.5"],
    ],
)
def test_what_cannot_be_reckoned_is_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(plan_command, arguments).exit_code == 2
