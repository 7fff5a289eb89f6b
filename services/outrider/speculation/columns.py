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
        lengths = [-(-array.nbytes // _WORD) for array in self._arrays.values()]
        buffer = torch.empty(sum(lengths), dtype=torch.int64, pin_memory=device.type == "cuda")
        flat, start = buffer.numpy().view(np.uint8), 0
        for array, length in zip(self._arrays.values(), lengths, strict=True):
            flat[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
            start += length * _WORD
        sent = torch.split(buffer.to(device, non_blocking=True), lengths)
        return {name: _column(words, each) for words, (name, each) in zip(sent, self._arrays.items(), strict=True)}


def _column(words: Tensor, array: NDArray[np.generic]) -> Tensor:
    if array.dtype != np.int64:
        words = words.view(getattr(torch, array.dtype.name))[: array.size]
    return words if array.ndim == 1 else words.view(array.shape)
