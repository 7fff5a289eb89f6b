"""Which of the native kernels a test of the quick tier runs, and what cannot run here."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from outrider.engine.backends.cpu import runnable_variants


def slow_but_the_best(sizes: tuple[int, ...] = ()) -> list[Any]:
    """Parameters: the best variant that runs here, and the others as slow: each is compiled before it can be tested.

    With `sizes`, each variant with each of them, as "avx2 16".
    """
    found = runnable_variants()
    marks = {name: [] if name == found[0] else [pytest.mark.slow] for name in found}
    names = [(name, f"{name} {size}") for name in found for size in sizes] or [(name, name) for name in found]
    return [pytest.param(whole, marks=marks[name]) for name, whole in names]


def skip_what_cannot_run(execution: str) -> None:
    if execution == "fused" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("which shapes sum alike in torch is known of AVX-512 only")
    if execution != "fused" and shutil.which("cc") is None:
        pytest.skip("no compiler")
