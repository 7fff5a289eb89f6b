"""How a guess travels with what may come in the place of its tokens."""

from __future__ import annotations

from outrider.drafters.outcomes import merge
from outrider.drafters.sequence import Beside, Drafted


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
