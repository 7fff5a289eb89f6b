"""Which recorded step vLLM's own dispatcher takes: without drafts that of vLLM without speculation, with drafts a whole
one."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from outrider.vllm.graphs import DraftGraphs
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

pytestmark = pytest.mark.slow

NUM_DRAFTED, MOST = 4, 64
SIZES = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
PIECES = CUDAGraphMode.FULL_AND_PIECEWISE


def graphs(kind: type[Any], mode: CUDAGraphMode, length: int, *, varlen: bool = False) -> Any:
    """As after recording, without a GPU."""
    made = object.__new__(kind)
    made.__dict__.update(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=SIZES[-1]),
        vllm_config=SimpleNamespace(
            speculative_config=None,
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            num_speculative_tokens=length - 1,
        ),
        max_num_reqs=MOST,
        cudagraph_mode=mode,
        decode_query_len=length,
        varlen_decode=varlen,
        lora_capture_cases=[0],
        ubatch_runner=None,
        _candidates={},
        _capture_descs={},
        _graphs_captured=True,
        _lora_dispatch_map={},
        _max_lora_case=0,
    )
    made._init_candidates()
    return made


def taken(manager: Any, counts: Sequence[int], *, prompts: bool = False) -> Any:
    """For a step of requests with so many tokens."""
    total, longest = sum(counts), max(counts)
    uniform = longest if total == longest * len(counts) and not prompts else None
    return manager.dispatch(len(counts), total, uniform, 0, max_query_len=None if prompts else longest)


@pytest.mark.parametrize("mode", [PIECES, CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.PIECEWISE])
@pytest.mark.parametrize("varlen", [True, False])
def test_a_step_without_drafts_has_the_graph_that_it_has_without_speculation(mode: CUDAGraphMode, varlen: bool) -> None:
    alone = graphs(ModelCudaGraphManager, mode, 1)
    ours = graphs(DraftGraphs, mode, 1 + NUM_DRAFTED, varlen=varlen and mode.separate_routine())
    for count in range(1, MOST + 1):
        assert taken(ours, [1] * count) == taken(alone, [1] * count)
    for counts in ([1, 1, 30], [500], [7, 1], [1] * 60 + [5]):
        assert taken(ours, counts, prompts=True) == taken(alone, counts, prompts=True)


DRAFTED = {
    "all": [5] * 8,
    "some": [5] * 3 + [1] * 5,
    "odd": [5, 3, 2, 1, 1, 4, 1, 2],
    "half": [3] * 8,
    "one": [5] + [1] * 31,
}


@pytest.mark.parametrize("name", DRAFTED)
def test_a_step_with_drafts_is_recorded_whole_where_the_attention_can(name: str) -> None:
    ours = graphs(DraftGraphs, PIECES, 1 + NUM_DRAFTED, varlen=True)
    found = taken(ours, DRAFTED[name])
    assert found.cg_mode == CUDAGraphMode.FULL and found.max_query_len == 1 + NUM_DRAFTED
    # The next larger one that vLLM records.
    assert found.num_tokens == next(size for size in SIZES if size >= sum(DRAFTED[name]))


@pytest.mark.parametrize("name", DRAFTED)
def test_elsewhere_it_is_recorded_whole_where_all_have_all_drafts(name: str) -> None:
    ours = graphs(DraftGraphs, PIECES, 1 + NUM_DRAFTED)
    assert taken(ours, DRAFTED[name]).cg_mode == (CUDAGraphMode.FULL if name == "all" else CUDAGraphMode.PIECEWISE)


def test_each_graph_is_recorded_once_and_the_largest_first() -> None:
    ours = graphs(DraftGraphs, PIECES, 1 + NUM_DRAFTED, varlen=True)
    alone = graphs(ModelCudaGraphManager, PIECES, 1)
    for mode, found in ours._capture_descs.items():
        sizes = [one.num_tokens for one in found]
        assert sizes == sorted(sizes, reverse=True) and len(set(found)) == len(found)
        assert set(alone._capture_descs[mode]) <= set(found)
