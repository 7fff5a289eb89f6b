"""What rank 0 says of a step is what the followers understand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.engine.attention import RowSpan
from outrider.engine.parallel.plan import decode, encode
from outrider.engine.step import Step

ids = st.integers(0, 2**31)


@st.composite
def spans(draw: st.DrawFn) -> RowSpan:
    num_tokens = draw(st.integers(1, 63))
    size = draw(st.integers(1, 32))
    kv_len = num_tokens + draw(st.integers(0, 500))
    blocks = draw(st.lists(ids, min_size=-(-kv_len // size), max_size=-(-kv_len // size)))
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, num_tokens)))]
    return RowSpan(draw(ids), num_tokens, kv_len, blocks, size, parents)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    tokens = draw(st.lists(st.tuples(ids, ids), max_size=64))
    return Step(
        [t for t, _ in tokens],
        [p for _, p in tokens],
        draw(st.lists(ids)),
        draw(st.lists(spans(), max_size=5)),
        draw(st.lists(ids)),
        draw(st.lists(st.tuples(ids, ids))),
    )


@given(steps())
def test_a_step_survives_the_way(step: Step) -> None:
    assert decode(encode(step)) == step


@given(steps(), st.data())
def test_a_part_of_a_plan_is_refused(step: Step, data: st.DataObject) -> None:
    plan = encode(step)
    with pytest.raises(ValueError, match="plan"):
        decode(plan[: data.draw(st.integers(0, len(plan) - 1))])


def test_what_is_left_over_is_refused() -> None:
    with pytest.raises(ValueError, match="left over"):
        decode(encode(Step()) + bytes(8))
