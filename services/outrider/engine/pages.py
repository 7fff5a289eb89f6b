"""Memory on pages of two megabytes, where the system has them.

A step reads all weights once. On pages of four kilobytes a third of its time went into finding where they lie, most of
all in a virtual machine, where each look-up is a walk through two tables. Not torch's own switch for this,
THP_MEM_ALLOC_ENABLE: it leaves out matrices under two megabytes, and must be set before torch is imported.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_PAGE = 2 * 1024 * 1024


def zeros_in_large_pages(count: int, dtype: torch.dtype) -> Tensor:
    """[count] zeros of `dtype`, all of it taken now: memory that is taken when it is first written would be missing in
    the middle of a request. Ordinary memory where there are no large pages, or hardly one would be filled.
    """
    size = count * dtype.itemsize
    if size < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(count, dtype=dtype)
    # Private: shared anonymous memory has a setting of its own, which is off nearly everywhere.
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # A kernel without them.
        return torch.zeros(count, dtype=dtype)
    # The tensor keeps the mapping.
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _PAGE
    return whole[start : start + size].view(dtype).zero_()
