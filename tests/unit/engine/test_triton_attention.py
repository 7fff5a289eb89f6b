"""The paged kernels, in Triton's interpreter, say what the reference says, and say it whatever the batch is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider.engine.attention import SdpaAttention, Shape, TritonMissing, make_attention
from outrider.engine.attention.paged import NUM_SPLITS, SMALL_SPAN, TritonAttention

from tests.unit.engine.paged_problems import CPU, TOLERANCE, assert_equals_reference, assert_same_bits_alone, problem

pytestmark = pytest.mark.usefixtures("interpreted")

shapes = st.builds(
    lambda kv_heads, share, head_dim, size: Shape(kv_heads * share, kv_heads, head_dim, size),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 3, 4, 7]),
    st.sampled_from([16, 24, 64]),
    st.sampled_from([8, 16]),
)
row = st.tuples(st.integers(0, 80), st.integers(1, 9))
# The interpreter takes up to a second for one. Each run draws others.
EXAMPLES = pytest.mark.parametrize("examples", [4, pytest.param(20, marks=pytest.mark.slow)])


@EXAMPLES
def test_any_ragged_batch_equals_the_reference(examples: int) -> None:
    @settings(max_examples=examples)
    @given(shape=shapes, rows=st.lists(row, min_size=1, max_size=4), seed=st.integers(0, 999))
    def check(shape: Shape, rows: list[tuple[int, int]], seed: int) -> None:
        assert_equals_reference(problem(rows, shape=shape, seed=seed))

    check()


@EXAMPLES
def test_any_forest_of_guesses_equals_the_reference(examples: int) -> None:
    @settings(max_examples=examples)
    @given(rows=st.lists(row, min_size=1, max_size=4), seed=st.integers(0, 999))
    def check(rows: list[tuple[int, int]], seed: int) -> None:
        assert_equals_reference(problem(rows, seed=seed, trees=True))

    check()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_every_dtype_equals_the_reference(dtype: torch.dtype) -> None:
    assert_equals_reference(problem([(0, 5), (77, 1), (64, 8)], dtype=dtype))


def test_a_prefill_chunk_beside_decoding_rows_equals_the_reference() -> None:
    assert_equals_reference(problem([(70, 1), (9, SMALL_SPAN + 7), (3, 4)]))


def test_a_tree_beside_a_long_text_or_after_one_takes_no_kernel_of_its_own() -> None:
    """Another would be compiled while requests wait, and none has been compiled ahead."""
    given = problem([(20, 3), (9, SMALL_SPAN + 7), (0, SMALL_SPAN + 9)], shape=Shape(2, 1, 16, 16), trees=True)
    given.rows[1].tree = ()
    given.rows[2].tree = [-1, 0, -1, 2, 2]
    attention, found = TritonAttention(given.shape, CPU), set()
    kernels = attention._kernels

    class Launcher:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(*arguments: Any, **constants: Any) -> None:
                found.add(constants["NUM_SPLITS"])
                kernels.attend_kernel[grid](*arguments, **constants)

            return launch

    attention._kernels = SimpleNamespace(**{**vars(kernels), "attend_kernel": Launcher()})  # type: ignore[assignment]
    assert_equals_reference(given, attention)
    assert found == {NUM_SPLITS, 1}


def test_a_context_longer_than_one_turn_of_the_splits_equals_the_reference() -> None:
    """Each of 16 splits takes 64 keys at a time: beyond 1,024 they take a second turn."""
    assert_equals_reference(problem([(1100, 3)], shape=Shape(4, 1, 16, 32)))


# Another one, and trees in it, in the quick tier: see below.
@pytest.mark.slow
@pytest.mark.parametrize("window", [64, 65, 100, 500])
def test_a_window_equals_the_reference(window: int) -> None:
    rows, shape = [(1100, 3), (62, 9), (0, 5)], Shape(2, 1, 16, 32)
    assert_equals_reference(problem([*rows, (9, SMALL_SPAN + 57)], shape=shape, window=window, num_blocks=80))
    assert_same_bits_alone(problem(rows[:2], shape=shape, window=window, num_blocks=80))


@EXAMPLES
def test_any_forest_of_guesses_within_a_window_equals_the_reference(examples: int) -> None:
    @settings(max_examples=examples)
    @given(rows=st.lists(row, min_size=1, max_size=4), seed=st.integers(0, 999), window=st.sampled_from([3, 16, 64]))
    def check(rows: list[tuple[int, int]], seed: int, window: int) -> None:
        assert_equals_reference(problem(rows, seed=seed, trees=True, window=window))

    check()


def test_what_lies_in_unused_slots_never_shows() -> None:
    given = problem([(13, 2), (64, 1)])
    want, _ = given.attend(TritonAttention(given.shape, CPU))
    used = {slot for row in given.rows for slot in row.slots[: row.kv_len]}
    unused = [slot for slot in range(given.keys.shape[1]) if slot not in used]
    given.keys[:, unused] = torch.nan
    given.values[:, unused] = torch.nan
    assert torch.equal(given.attend(TritonAttention(given.shape, CPU))[0], want)


@pytest.mark.parametrize(
    "trees", [pytest.param(False, id="chain"), pytest.param(True, id="tree", marks=pytest.mark.slow)]
)
def test_a_token_gets_the_same_bits_alone_in_any_batch_and_in_a_tree(trees: bool) -> None:
    rows, shape = [(126, 5), (3, 1), (60, 9)], Shape(4, 1, 16, 8)
    assert_same_bits_alone(problem(rows, dtype=torch.bfloat16, shape=shape, trees=trees))


@pytest.mark.parametrize(
    ("shape", "cached", "window"),
    # On both sides of the turn of the splits; several key heads, a padded width, and a window that ends in the tree.
    [(Shape(3, 1, 16, 8), 1020, None), (Shape(4, 2, 24, 16), 60, 7)],
)
def test_every_node_of_a_tree_gets_the_bits_of_a_chain(shape: Shape, cached: int, window: int | None) -> None:
    rows = [(5, 2), (cached, 6)]
    assert_same_bits_alone(problem(rows, shape=shape, trees=True, window=window, num_blocks=160))


@pytest.mark.slow
@settings(max_examples=20)
@given(
    shape=shapes,
    cached=st.one_of(st.integers(0, 130), st.integers(1020, 1090)),
    nodes=st.integers(2, 20),
    seed=st.integers(0, 999),
    window=st.sampled_from([None, 7, 64]),
)
def test_so_does_every_node_of_any_tree(shape: Shape, cached: int, nodes: int, seed: int, window: int | None) -> None:
    rows = [(5, 2), (cached, nodes)]
    assert_same_bits_alone(problem(rows, shape=shape, seed=seed, trees=True, window=window, num_blocks=160))


def test_asking_for_triton_where_it_cannot_run_names_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(8, 2, 16, 8)
    assert isinstance(make_attention("auto", shape, CPU), SdpaAttention)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(TritonMissing, match="attention: triton runs on CUDA devices, not on cpu"):
        make_attention("triton", shape, CPU)


def test_a_card_before_those_that_the_kernels_are_compiled_for_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, card = Shape(8, 2, 16, 8), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(TritonMissing, match=r"attention: triton needs compute capability 8\.0 .* cuda:1 has 7\.5"):
        make_attention("triton", shape, card)
    assert isinstance(make_attention("auto", shape, card), SdpaAttention)
