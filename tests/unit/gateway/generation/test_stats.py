"""Sums over a request, and what follows from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.gateway.generation.stats import RunningStats
from outrider.rpc.v1 import router_pb2


def round_of(drafted: int, verified: int, accepted: int) -> router_pb2.RouteResponse:
    return router_pb2.RouteResponse(
        token_ids=range(accepted + 1),
        num_drafted=drafted,
        num_verified=verified,
        num_accepted=accepted,
        timing=router_pb2.RoundTiming(round_us=9, draft_us=2, verify_us=5, queue_us=1),
    )


def test_acceptance_is_counted_over_steps_that_had_drafts() -> None:
    stats = RunningStats(started_s=0.0)
    for counts in [(0, 0, 0), (4, 4, 4), (4, 1, 0), (2, 2, 1)]:
        stats.add_round(round_of(*counts))
    sums = stats.sums
    assert (sums.num_steps, sums.num_spec_steps) == (4, 3)
    assert (sums.num_draft_tokens, sums.num_verified_tokens, sums.num_accepted_draft_tokens) == (10, 7, 5)
    assert sums.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert sums.draft_acceptance_rate == pytest.approx(0.5)
    assert sums.acceptance_histogram == {0: 1, 1: 1, 4: 1}
    assert sums.acceptance_histogram_by_draft_length == {2: {1: 1}, 4: {0: 1, 4: 1}}
    assert sums.num_spec_tokens == 4
    assert (sums.round_us, sums.draft_us, sums.verify_us, sums.queue_us) == (36, 8, 20, 4)


def test_without_speculation_the_rates_are_those_of_plain_decoding() -> None:
    stats = RunningStats(started_s=0.0)
    stats.add_round(round_of(0, 0, 0))
    sums = stats.sums
    assert (sums.mean_acceptance_length, sums.draft_acceptance_rate, sums.acceptance_histogram) == (1, 0, {})


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)).map(lambda pair: (max(pair), min(pair))), max_size=30))
def test_the_histograms_add_up_to_the_sums(rounds: list[tuple[int, int]]) -> None:
    stats = RunningStats(started_s=0.0)
    for drafted, accepted in rounds:
        stats.add_round(round_of(drafted, min(drafted, accepted + 1), accepted))
    sums = stats.sums
    assert sum(sums.acceptance_histogram.values()) == sums.num_spec_steps
    assert sum(n * steps for n, steps in sums.acceptance_histogram.items()) == sums.num_accepted_draft_tokens
    by_length = sums.acceptance_histogram_by_draft_length
    assert sum(n * sum(steps.values()) for n, steps in by_length.items()) == sums.num_draft_tokens


def test_times_are_from_arrival_to_first_token_and_between_tokens() -> None:
    stats = RunningStats(started_s=10.0)
    stats.add_tokens(1, 10.5)
    stats.add_tokens(4, 11.5)
    summary = stats.summary(12.0)
    assert summary.time_to_first_token_ms == pytest.approx(500)
    assert summary.generation_time_ms == pytest.approx(1000)
    assert summary.mean_itl_ms == pytest.approx(250)
    assert summary.tokens_per_second == pytest.approx(5 / 1.5)


def test_cached_tokens_are_those_of_the_prompt_not_of_a_resumed_answer() -> None:
    stats = RunningStats(started_s=0.0)
    first, last = round_of(0, 0, 0), round_of(0, 0, 0)
    first.num_cached_tokens = 16
    last.metrics.num_cached_tokens = 48
    stats.add_round(first)
    stats.num_router_failovers += 1
    stats.add_round(last)
    assert stats.sums.num_cached_tokens == 16


def test_the_queue_is_the_wait_for_a_target_and_there_for_the_first_step() -> None:
    stats = RunningStats(started_s=10.0, submitted_s=10.5)
    stats.opened(12.5)
    # The router was lost before a token came, and the next one found another target.
    stats.opened(13.5)
    stats.add_round(round_of(0, 0, 0))
    stats.opened(20.0)
    assert stats.summary(21.0).queue_time_ms == pytest.approx(3000 + 1e-3)
