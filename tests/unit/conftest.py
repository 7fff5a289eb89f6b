"""Triton's kernels on a machine without a GPU: its interpreter runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
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

    builder, unary_op = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.unary_op

    def dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        """Summed in float64: numpy sums float32 in an order that on some CPUs depends on the number of rows."""
        total = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    def unary(self: Any, argument: Any, op: Any) -> Any:
        """So do exp and log round, by where a number lies in its array."""
        if argument.data.dtype != np.float32:
            return unary_op(self, argument, op)
        return unary_op(self, argument, lambda x: op(x.astype(np.float64)).astype(np.float32))

    with (
        patch.object(builder, "create_dot", dot),
        patch.object(builder, "unary_op", unary),
        patch.object(interpreter.GridExecutor, "__call__", launch),
        patch.object(interpreter, "_patch_lang", patch_once),
    ):
        yield
