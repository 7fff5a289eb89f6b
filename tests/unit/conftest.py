"""Triton's kernels on a machine without a GPU: its interpreter runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch


@pytest.fixture(scope="session")
def interpreted() -> Iterator[None]:
    """Skips without Triton, or where a GPU is, whose kernels an interpreter in the same process would replace."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: tests/gpu runs the kernels themselves")
    from triton.runtime import interpreter

    call, patch_lang, patched = interpreter.GridExecutor.__call__, interpreter._patch_lang, set[str]()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        call(self, *args, **kwargs)

    def patch_once(fn: Any) -> Any:
        """Once a launch and module. Before each call of a function it takes a hundred times as long as the function."""
        if patched and fn.__module__ in patched:
            return None
        patched.add(fn.__module__)
        return patch_lang(fn)

    with (
        patch.object(interpreter.GridExecutor, "__call__", launch),
        patch.object(interpreter, "_patch_lang", patch_once),
    ):
        yield
