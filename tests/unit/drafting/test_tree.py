"""A draft's tree: what is left of it, what two are together, and what it refuses to be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.errors import InvalidRequest
from outrider.options.sampling import DraftDistribution
from outrider.tree import DraftTree


@st.composite
def trees(draw: st.DrawFn, base_len: int = 10) -> DraftTree:
    count = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    # A source names each follower of a token once.
    used: dict[int, int] = {}
    tokens = []
    for parent in parents:
        used[parent] = used.get(parent, -1) + 1
        tokens.append(used[parent])
    return DraftTree(base_len, tuple(tokens), tuple(parents), (0.5,) * count, source=draw(st.sampled_from("abc")))


def texts(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tokens on the path to each node."""
    return {tuple(tree.token_ids[each] for each in tree.path(node)) for node in range(len(tree))}


@given(trees(), st.lists(st.integers(0, 3), max_size=4))
def test_what_is_left_is_what_began_with_the_committed_tokens(tree: DraftTree, committed: list[int]) -> None:
    left = tree.after(committed)
    count = len(committed)
    expected = {text[count:] for text in texts(tree) if text[:count] == tuple(committed) and len(text) > count}
    assert (texts(left) if left is not None else set()) == expected
    if left is not None:
        assert left.base_len == tree.base_len + count
    # It may also have ended before.
    ended = any(tuple(committed[: len(text)]) == text for text in {(), *texts(tree)} - {t[:-1] for t in texts(tree)})
    assert (left is not None) == (bool(expected) or ended or tuple(committed) in {(), *texts(tree)})


@given(trees(), trees())
def test_two_trees_are_one_with_the_texts_of_both(first: DraftTree, second: DraftTree) -> None:
    merged = first.merge(second)
    assert texts(merged) == texts(first) | texts(second)
    assert len(merged) == len(texts(merged)), "equal beginnings are one node"
    assert merged.token_ids[: len(first)] == first.token_ids
    assert {merged.origin(node).source for node in range(len(merged))} <= {first.source, second.source}


@given(trees(), st.data())
def test_a_part_is_closed_under_parents(tree: DraftTree, data: st.DataObject) -> None:
    nodes = sorted(data.draw(st.sets(st.integers(0, max(0, len(tree) - 1)))) & set(range(len(tree))))
    closed = all(tree.parent(node) in (-1, *nodes) for node in nodes)
    if not closed:
        with pytest.raises(ValueError, match="without its parent"):
            tree.take(nodes)
        return
    assert texts(tree.take(nodes)) == {text for n in nodes if (text := tuple(tree.token_ids[i] for i in tree.path(n)))}


def test_a_token_keeps_its_source_its_match_and_its_time_whatever_becomes_of_its_tree() -> None:
    found = DraftTree(4, (1, 2, 3), source="ngram", matched=5, seconds=0.3)
    left = found.merge(DraftTree(4, (1, 8), chances=(0.9, 0.1), source="model")).after([1])
    assert left is not None and left.token_ids == (2, 3, 8)
    assert [left.origin(node).source for node in range(3)] == ["ngram", "ngram", "model"]
    assert [left.matched_at(node, depth) for node, depth in zip(range(3), left.depths(), strict=True)] == [6, 7, 0]
    assert [left.seconds_of(node) for node in range(2)] == [pytest.approx(0.1)] * 2


def test_a_chain_in_ratio_mode_keeps_each_tokens_distribution() -> None:
    q = tuple(DraftDistribution((token,), (65536,)) for token in (1, 2, 3))
    left = DraftTree(4, (1, 2, 3), q=q).after([1])
    assert left is not None and left.q == q[1:] and left.parents == ()


@pytest.mark.parametrize(
    ("field", "made"),
    [
        ("parents", {"parents": (-1,)}),
        ("parents", {"parents": (-1, 1)}),
        ("parents", {"parents": (0, 0)}),
        ("parents", {"parents": (-2, 0)}),
        ("confidence", {"chances": (0.5,)}),
        ("confidence", {"chances": (0.5, math.nan)}),
        ("confidence", {"chances": (0.5, 1.1)}),
        ("confidence", {"chances": (-0.5, 1)}),
        ("q", {"q": (DraftDistribution((1,), (65536,)),)}),
        ("q", {"q": (DraftDistribution((1,), (65536,)), DraftDistribution((7,), (65536,)))}),
        ("parents", {"parents": (-1, -1), "q": (DraftDistribution((1,), (65536,)),) * 2}),
    ],
    ids=str,
)
def test_a_tree_that_is_none_is_never_born(field: str, made: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        DraftTree(4, (1, 2), **made)
    assert caught.value.field == field
