"""How much is ingested, and when a proposal ends."""

from __future__ import annotations

import pytest
from outrider.drafters import ModelConfig
from outrider.drafters.rounds import DraftChain, plan_ingestion
from outrider.speculation import DraftDistribution, Proposal
from outrider.tree import DraftTree

CONFIG = ModelConfig(max_batch_tokens=100, catch_up_tokens=40, ready_lag=10)


@pytest.mark.parametrize(
    ("lags", "counts"),
    [
        ([], []),
        ([3, 10, 1], [3, 10, 1]),
        ([500], [100]),
        ([60], [60]),
        ([60, 60], [60, 40]),
        ([500, 3, 500], [40, 3, 0]),
        ([30, 3, 30], [30, 3, 10]),
        ([10] * 11, [10] * 10 + [0]),
    ],
)
def test_ready_sequences_go_first_and_the_rest_is_bounded(lags: list[int], counts: list[int]) -> None:
    assert plan_ingestion(lags, CONFIG) == counts


def chain(**more: object) -> DraftChain:
    return DraftChain(**{"kept": DraftTree(3, source="model"), "wanted": 4, "min_confidence": 0.5, **more})  # type: ignore[arg-type]


def test_a_chain_ends_with_the_token_that_makes_it_unlikely() -> None:
    grown = chain()
    ended = []
    for token, confidence in [(1, 0.9), (2, 0.7), (3, 0.7)]:
        grown.add(Proposal(token, confidence, None))
        ended.append(grown.ended)
    assert (grown.token_ids, ended) == ([1, 2, 3], [False, False, True])


def test_a_chain_without_a_threshold_takes_all_it_may() -> None:
    grown = chain(min_confidence=0.0)
    for token in range(4):
        assert not grown.ended
        grown.add(Proposal(token, 1e-9, None))
    assert grown.ended


def test_a_chain_ends_after_a_stop_token() -> None:
    grown = chain(stop_token_ids=frozenset({7}))
    grown.add(Proposal(7, 1.0, None))
    assert (grown.token_ids, grown.ended) == ([7], True)


def test_a_chain_that_already_has_what_is_wanted_takes_no_more() -> None:
    assert chain(kept=DraftTree(3, (1, 2, 3, 4), chances=(1.0,) * 4)).ended
    assert chain(wanted=0).ended


@pytest.mark.parametrize("drawn", [0, 1])
def test_in_ratio_mode_what_was_drawn_decides_neither_what_is_shown_nor_what_follows(drawn: int) -> None:
    counts = (60000, 5536)
    grown = chain()
    for _ in range(4):
        grown.add(Proposal(drawn, counts[drawn] / 65536, DraftDistribution((0, 1), counts)))
    assert grown.token_ids == [drawn] * 4


FLAT = DraftDistribution((0, 1, 2, 7), (16384,) * 4)
SURE = DraftDistribution((0, 7), (60000, 5536))
ENDS = DraftDistribution((7, 0), (60000, 5536))


def test_in_ratio_mode_the_first_distribution_decides_how_much_is_drawn() -> None:
    lengths = []
    for first in (FLAT, DraftDistribution((0, 1), (50000, 15536)), SURE):
        grown = chain(wanted=6)
        while not grown.ended:
            grown.add(Proposal(0, 0.5, first if not len(grown) else SURE))
        lengths.append(len(grown))
    # 0.25; 0.76, 0.58, 0.44; 0.92 to the sixth is 0.59.
    assert lengths == [1, 3, 6]


@pytest.mark.parametrize("then", [FLAT, SURE], ids=["flat", "sure"])
@pytest.mark.parametrize("token", [0, 7])
def test_in_ratio_mode_what_was_drawn_does_not_decide_how_much_is_drawn_with_it(
    then: DraftDistribution, token: int
) -> None:
    grown = chain(stop_token_ids=frozenset({7}))
    grown.add(Proposal(0, 0.9, SURE))
    while not grown.ended:
        grown.add(Proposal(token, 0.25, then))
    assert len(grown) == 4


@pytest.mark.parametrize(("q", "stops"), [((FLAT,), set()), ((ENDS,), {7})], ids=["flat", "stop"])
def test_in_ratio_mode_nothing_follows_what_was_told_and_is_unlikely_or_the_end(
    q: tuple[DraftDistribution, ...], stops: set[int]
) -> None:
    assert chain(kept=DraftTree(3, (7,), chances=(0.5,), q=q), stop_token_ids=frozenset(stops)).ended


def test_a_first_token_is_told_however_doubtful_it_is() -> None:
    grown = chain()
    assert not grown.ended
    grown.add(Proposal(3, 0.01, None))
    assert (grown.token_ids, grown.ended) == ([3], True)


@pytest.mark.parametrize(
    "bad", [{"min_confidence": 1.0}, {"min_confidence": float("nan")}, {"max_batch_tokens": 0}, {"ready_lag": 0}]
)
def test_an_impossible_configuration_is_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        ModelConfig(**bad)  # type: ignore[arg-type]
