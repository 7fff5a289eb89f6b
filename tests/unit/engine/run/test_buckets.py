"""Which recorded step runs which batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.engine.run.buckets import DRAFT_TIERS, Bucket, choose, make_buckets

BUCKETS = make_buckets(64, 512)


def test_every_tier_of_every_row_count_has_a_bucket_of_its_own_size() -> None:
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for tier in DRAFT_TIERS:
            tokens = rows * (tier + 1)
            found = choose(BUCKETS, rows, tokens)
            assert found == Bucket(-(-tokens // 16) * 16, rows)


def test_one_sequence_decodes_and_verifies_in_the_same_bucket() -> None:
    assert {choose(BUCKETS, 1, tokens) for tokens in range(1, 17)} == {Bucket(16, 1)}


@given(rows=st.integers(1, 80), more=st.integers(0, 600))
def test_the_choice_holds_the_step_and_nothing_smaller_does(rows: int, more: int) -> None:
    tokens = rows + more
    found = choose(BUCKETS, rows, tokens)
    fitting = [bucket for bucket in BUCKETS if bucket.rows >= rows and bucket.tokens >= tokens]
    assert found == min(fitting, default=None)


@given(max_rows=st.integers(1, 70), max_tokens=st.integers(1, 300), least=st.sampled_from([1, 8, 16]))
def test_no_bucket_is_larger_than_a_step_may_be_and_each_fills_its_tiles(
    max_rows: int, max_tokens: int, least: int
) -> None:
    for bucket in make_buckets(max_rows, max_tokens, least):
        assert bucket.tokens <= max_tokens
        assert bucket.tokens % least == 0 or bucket.tokens == max_tokens
        assert bucket.rows <= min(max(max_rows, max_tokens), bucket.tokens * least)


def test_more_rows_than_are_recorded_finely_run_in_a_recorded_step_of_at_most_twice_the_size() -> None:
    for rows, tokens in ((65, 65), (65, 260), (130, 130), (300, 300), (512, 512)):
        found = choose(BUCKETS, rows, tokens)
        assert found is not None and found.rows < 2 * rows and found.tokens < 2 * tokens
    assert len([bucket for bucket in BUCKETS if bucket.rows > 64]) == 6


def test_the_most_rows_have_a_bucket_even_where_they_are_no_power_of_two() -> None:
    assert choose(make_buckets(12, 512), 12, 12) == Bucket(16, 12)


def test_no_rows_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="max_rows"):
        make_buckets(0, 512)
