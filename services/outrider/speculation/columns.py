"""Columns of numbers that reach the device of the logits in one copy."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD = 8
"""Bytes to whose multiples each column begins."""


class Columns:
    """Named arrays of numpy, of any shape and type, and later tensors of the same."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[np.generic]] = {}

    def add(self, **arrays: NDArray[np.generic]) -> None:
        self._arrays |= arrays

    def send(self, device: torch.device) -> dict[str, Tensor]:
        """One copy, that kernels launched later on the same stream wait for; none if there are no columns."""
        if not self._arrays:
            return {}
        starts, total = {}, 0
        for name, array in self._arrays.items():
            starts[name] = total
            total += -(-array.nbytes // _WORD) * _WORD
        buffer = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
        flat = buffer.numpy()
        for name, array in self._arrays.items():
            flat[starts[name] : starts[name] + array.nbytes] = array.reshape(-1).view(np.uint8)
        sent = buffer.to(device, non_blocking=True)
        return {name: _column(sent[starts[name] :], array) for name, array in self._arrays.items()}


def _column(sent: Tensor, array: NDArray[np.generic]) -> Tensor:
    kind: torch.dtype = getattr(torch, array.dtype.name)
    return sent[: array.nbytes].view(kind).view(array.shape)
