"""Which of the native kernels a test of the quick tier runs."""

from __future__ import annotations

from typing import Any

import pytest
from outrider.engine.backends.cpu import runnable_variants


def slow_between(sizes: tuple[int, ...] = ()) -> list[Any]:
    """Parameters: the best variant that runs here and the one that any machine of today has; those between are slow.

    With `sizes`, each variant with each of them, as "avx2 16".
    """
    found, quick = runnable_variants(), {*runnable_variants()[:1], "avx2"}
    marks = {name: [] if name in quick else [pytest.mark.slow] for name in found}
    names = [(name, f"{name} {size}") for name in found for size in sizes] or [(name, name) for name in found]
    return [pytest.param(whole, marks=marks[name]) for name, whole in names]
