"""Random numbers that are functions of (seed, position, purpose, token), and not of the order of draws.

A sequence that moves to another worker, or is drafted and verified on different ones, gets the same noise. The
generator is SplitMix64's finalizer over a keyed counter (Steele et al. 2014), with torch integers or, with the same
results, Python's.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class Purpose(enum.IntEnum):
    """Separate streams: noise used for one decision is never used for another."""

    GUMBEL = 1
    DRAFT = 2
    ACCEPT = 3
    RECOVER = 4
    BONUS = 5


Bits = Any
"""64 bits: an int, or numpy's, many at once."""


def _mix(value: Bits) -> Bits:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _key(seed: Bits, position: Bits, purpose: Bits) -> Bits:
    key = _mix((seed + _GOLDEN) & _MASK)
    key = _mix((key + position * _GOLDEN) & _MASK)
    return _mix((key + ((purpose * _GOLDEN) & _MASK)) & _MASK)


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """One number in [0, 1)."""
    return float((_mix(_key(seed, position, purpose)) >> 11) * 2.0**-53)


def gumbel(seed: int, position: int, token_ids: Tensor, purpose: Purpose = Purpose.GUMBEL) -> Tensor:
    """Standard Gumbel noise, float64, one per token id [n] int64. A token's noise does not depend on the other ids."""
    return gumbel_of(gumbel_key(seed, position, purpose), token_ids)


def gumbel_key(seed: int, position: int, purpose: Purpose = Purpose.GUMBEL) -> int:
    """The key of a position for `gumbel_of`: a signed 64-bit number."""
    return _signed(_mix(_key(seed, position, purpose)))


def gumbel_keys(*columns: NDArray[np.uint64]) -> NDArray[np.int64]:
    """As gumbel_key, for many: seeds, positions, purposes."""
    keys: NDArray[np.uint64] = _mix(_key(*columns))
    return keys.view(np.int64)


def gumbel_of(key: int | Tensor, token_ids: Tensor) -> Tensor:
    """As gumbel, for a key or keys [rows, 1]. Only the logarithms use floats, so every device has the same noise."""
    value = token_ids * _signed(_GOLDEN) + key
    value = (value ^ _shift(value, 30)) * _signed(_MIX_1)
    value = (value ^ _shift(value, 27)) * _signed(_MIX_2)
    value = value ^ _shift(value, 31)
    # Half a step off zero, which avoids log(0).
    u = (_shift(value, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(u))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical shift right: torch's is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
