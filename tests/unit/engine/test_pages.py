"""Memory on large pages: zeroed, aligned, as long-lived as its tensor."""

from __future__ import annotations

import gc
import mmap

import psutil
import pytest
import torch
from outrider.engine.attention.interface import zeros_in_large_pages

LARGE = 3 * 1024 * 1024


@pytest.mark.parametrize("count", [0, 5, LARGE])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_as_many_zeros_as_were_asked_for(count: int, dtype: torch.dtype) -> None:
    found = zeros_in_large_pages(count, dtype)
    assert found.shape == (count,) and found.dtype == dtype
    assert not found.any()
    found.fill_(1)
    assert int(found.sum(dtype=torch.float64)) == count


def test_all_of_it_is_taken_at_once() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    held = zeros_in_large_pages(256 << 20, torch.uint8)
    assert process.memory_info().rss - before > 0.9 * len(held)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages on this system")
def test_it_begins_with_a_page() -> None:
    assert zeros_in_large_pages(LARGE, torch.uint8).data_ptr() % (2 * 1024 * 1024) == 0


def test_a_view_keeps_the_memory_and_the_last_one_gives_it_back() -> None:
    view = zeros_in_large_pages(LARGE, torch.uint8)[5:]
    gc.collect()
    others = [zeros_in_large_pages(LARGE, torch.uint8).fill_(7) for _ in range(3)]
    assert not view.any() and all(bool((other == 7).all()) for other in others)


def test_a_system_without_them_gives_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not zeros_in_large_pages(LARGE, torch.uint8).any()
