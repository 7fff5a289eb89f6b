"""The comparison of families: which bars a shape misses, and that the shapes are those of the models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.peers import shapes
from benchmarks.peers.families import Figures

MEASURED = {
    "limit": {"step": [[60.0, 50.0], [55.0, 58.0]], "read": [[44.0, 41.0], [40.0, 45.0]]},
    "verify 5": {"one": [[50.0]], "many": [[57.0]]},
    "decode 1": {"ours": [[52.0]], "peer": [[65.0]]},
}


def test_figures_are_of_the_fastest() -> None:
    found = Figures.of(MEASURED, None, 1000)
    assert (found.step, found.reading, found.of_peer, found.misses) == (50.0, 40.0, 0.8, [])


def test_each_bar_is_missed_by_its_name() -> None:
    found = Figures.of(MEASURED, None, 1000)
    assert replace(found, reading=38.0).misses == ["reading"]
    assert replace(found, several=58.0).misses == ["verify"]
    assert replace(found, peer=54.0).misses == ["peer"]


def test_where_arithmetic_binds_five_tokens_are_held_against_it() -> None:
    """200,000 parameters are 2 million operations for 5 tokens: 62.5 ms at 32 million a second."""
    bound = Figures.of(MEASURED, 32e6, 200_000)
    assert bound.arithmetic == 62.5
    assert replace(bound, several=78.0).misses == []
    assert replace(bound, several=79.0).misses == ["verify"]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen2.5-0.5B", 0.494e9),
        ("Qwen3-0.6B", 0.596e9),
        ("Llama-3.2-1B", 1.236e9),
        ("Mistral-7B-v0.1", 7.242e9),
        ("Gemma-3-270M", 0.268e9),
        ("Phi-3-mini", 3.821e9),
    ],
)
def test_a_shape_has_as_many_parameters_as_the_model_that_it_is_named_after(name: str, published: float) -> None:
    shape = shapes.SHAPES[name]
    assert shapes.empty_model(shape, shape.layers).num_parameters() == pytest.approx(published, rel=1e-3)
