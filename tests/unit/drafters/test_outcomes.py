"""Which outcomes are prepared for, and how their paths travel."""

from __future__ import annotations

from outrider.drafters.outcomes import likely_outcomes, merge
from outrider.drafters.sequence import Beside, Drafted
from outrider.speculation import Proposal

GUESS = [5, 6]
RANKED = [
    [Proposal(5, 0.6), Proposal(7, 0.3), Proposal(8, 0.02)],
    [Proposal(6, 0.5), Proposal(9, 0.4)],
    [Proposal(4, 0.9), Proposal(3, 0.05)],
]


def chosen(count: int, guess: list[int] = GUESS, *, own: bool = True) -> list[tuple[int, int]]:
    return [(o.num_accepted, o.token_id) for o in likely_outcomes(guess, RANKED, count, own=own)]


def test_the_likeliest_outcomes_come_first_and_none_is_the_guess_itself() -> None:
    # 0.3 that 7 comes at once; 0.6 * 0.5 * 0.9 that all is accepted and 4 follows; 0.6 * 0.4 that 9 follows 5.
    assert chosen(8) == [(0, 7), (2, 4), (1, 9)]
    assert [round(o.chance, 3) for o in likely_outcomes(GUESS, RANKED, 8, own=True)] == [0.3, 0.27, 0.24]


def test_no_more_than_asked_for() -> None:
    assert chosen(1) == [(0, 7)]
    assert chosen(0) == []


def test_a_guess_of_another_source_is_believed_although_the_model_would_not_have_made_it() -> None:
    assert chosen(8, [1, 2], own=True) == [(0, 5), (0, 7)]
    assert chosen(8, [1, 2], own=False)[:2] == [(0, 5), (2, 4)]


def test_what_the_guess_goes_on_with_beyond_the_positions_judged_is_no_alternative() -> None:
    assert (2, 4) not in chosen(8, [5, 6, 4])


def test_paths_share_what_they_begin_with() -> None:
    tree = merge([Drafted("", [5, 6, 7]), Drafted("", [5, 9, 1], [0.9, 0.3, 0.5]), Drafted("", [8], [0.2])])
    assert tree.token_ids == [5, 6, 7, 9, 1, 8]
    assert tree.parents == [-1, 0, 1, 0, 3, -1]
    assert tree.confidence == [1.0, 1.0, 1.0, 0.3, 0.5, 0.2]
    assert merge([Drafted()]).token_ids == []


def test_what_stands_beside_a_path_comes_after_all_paths() -> None:
    first = Drafted("", [5, 6], [0.5, 0.6], siblings=[Beside(1, 9, 0.3), Beside(0, 8, 0.4)])
    second = Drafted("", [8, 2], [0.4, 0.7], siblings=[Beside(1, 3, 0.1)])
    tree = merge([first, second])
    assert list(zip(tree.token_ids, tree.parents, tree.confidence, strict=True)) == [
        (5, -1, 0.5),
        (6, 0, 0.6),
        (8, -1, 0.4),
        (2, 2, 0.7),
        (9, 0, 0.3),
        (3, 2, 0.1),
    ]
