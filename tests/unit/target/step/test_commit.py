"""From verdict to commit: ends are exact, also inside an accepted block."""

from __future__ import annotations

from outrider.protocol.sequence_key import Finish
from outrider.speculation import Verdict
from outrider.target.requests.commit import Outcome, apply_stop_conditions

# Three drafts accepted of four, the fourth rejected, then the target's own token.
VERDICT = Verdict(token_ids=[5, 6, 7, 8], num_accepted=3, num_verified=4, path=[1, 2, 3])


def test_without_an_end_everything_is_committed() -> None:
    outcome = apply_stop_conditions(VERDICT, 4, stop_token_ids=set(), remaining=10)
    assert outcome == Outcome([5, 6, 7, 8], num_drafted=4, num_verified=4, num_accepted=3, finish=Finish.NONE)


def test_a_stop_token_inside_the_accepted_block_is_the_last_one_committed() -> None:
    outcome = apply_stop_conditions(VERDICT, 4, stop_token_ids={6}, remaining=10)
    assert outcome == Outcome([5, 6], num_drafted=4, num_verified=2, num_accepted=2, finish=Finish.STOP)


def test_the_targets_own_token_may_stop_it() -> None:
    outcome = apply_stop_conditions(VERDICT, 4, stop_token_ids={8}, remaining=10)
    assert outcome == Outcome([5, 6, 7, 8], num_drafted=4, num_verified=4, num_accepted=3, finish=Finish.STOP)


def test_the_length_is_exact_inside_an_accepted_block() -> None:
    outcome = apply_stop_conditions(VERDICT, 4, stop_token_ids=set(), remaining=3)
    assert outcome == Outcome([5, 6, 7], num_drafted=4, num_verified=3, num_accepted=3, finish=Finish.LENGTH)


def test_reaching_the_length_with_the_last_token_finishes_too() -> None:
    assert apply_stop_conditions(VERDICT, 4, stop_token_ids=set(), remaining=4).finish is Finish.LENGTH


def test_a_stop_token_at_the_very_length_counts_as_a_stop() -> None:
    assert apply_stop_conditions(VERDICT, 4, stop_token_ids={7}, remaining=3).finish is Finish.STOP


def test_a_stop_after_the_length_does_not_count() -> None:
    outcome = apply_stop_conditions(VERDICT, 4, stop_token_ids={8}, remaining=2)
    assert (outcome.token_ids, outcome.finish) == ([5, 6], Finish.LENGTH)
