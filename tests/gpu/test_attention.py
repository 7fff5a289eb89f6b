"""The compiled kernels say what the reference says on the same card, whatever the batch is."""

from __future__ import annotations

import pytest
import torch
from outrider.engine.attention import Shape
from outrider.engine.attention.paged import SMALL_SPAN

from tests.unit.engine.paged_problems import TOLERANCE, assert_equals_reference, assert_same_bits_alone, problem

LLAMA = Shape(32, 8, 128, 16)
ROWS = [(0, 5), (777, 1), (64, 8), (2000, 6), (1, 1)]
BLOCKS = 512


@pytest.mark.parametrize("trees", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("shape", [LLAMA, Shape(9, 3, 64, 16), Shape(14, 2, 96, 32), Shape(4, 4, 256, 8)], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_ragged_rows_equal_the_reference(dtype: torch.dtype, shape: Shape, trees: bool, gpu: torch.device) -> None:
    for seed in range(3):
        given = problem(ROWS, shape=shape, dtype=dtype, seed=seed, trees=trees, device=gpu, num_blocks=BLOCKS)
        assert_equals_reference(given)


@pytest.mark.parametrize("trees", [False, True], ids=["chain", "tree"])
def test_a_window_equals_the_reference(trees: bool, gpu: torch.device) -> None:
    rows = ROWS if trees else [*ROWS, (600, SMALL_SPAN + 300)]
    given = problem(rows, shape=LLAMA, trees=trees, device=gpu, num_blocks=BLOCKS, window=100)
    assert_equals_reference(given)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_prefill_chunk_beside_decoding_rows_equals_the_reference(dtype: torch.dtype, gpu: torch.device) -> None:
    rows = [(70, 1), (600, SMALL_SPAN + 300), (3, 4)]
    assert_equals_reference(problem(rows, shape=LLAMA, dtype=dtype, device=gpu, num_blocks=BLOCKS))


@pytest.mark.parametrize("trees", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_token_gets_the_same_bits_alone_in_any_batch_and_in_a_tree(
    dtype: torch.dtype, trees: bool, gpu: torch.device
) -> None:
    assert_same_bits_alone(problem(ROWS, shape=LLAMA, dtype=dtype, trees=trees, device=gpu, num_blocks=BLOCKS))
