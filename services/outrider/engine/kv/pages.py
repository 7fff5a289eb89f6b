"""Memory on 2 MB pages, if the system has them.

A step reads all weights once. On 4 kB pages a third of its time went into address translation, most of all in a virtual
machine, where each page walk goes through two tables. Torch's own switch, THP_MEM_ALLOC_ENABLE, is not used: it leaves
out matrices under 2 MB, and must be set before torch is imported.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_PAGE = 2 * 1024 * 1024


def zeros_in_large_pages(count: int, dtype: torch.dtype) -> Tensor:
    """[count] zeros of `dtype`, with all pages taken now: memory taken at the first write could run out in the middle
    of a request. Uses ordinary memory if there are no large pages, or it would hardly fill one.
    """
    size = count * dtype.itemsize
    if size < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(count, dtype=dtype)
    # Private: for shared anonymous memory, large pages have a setting of their own, which is off nearly everywhere.
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # A kernel without large pages.
        return torch.zeros(count, dtype=dtype)
    # The tensor keeps the mapping alive.
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _PAGE
    return whole[start : start + size].view(dtype).zero_()
