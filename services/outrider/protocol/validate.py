"""Checks of openings, the same for every receiver. Raises InvalidRequest."""

from __future__ import annotations

import re
from collections.abc import Sequence

from outrider.errors import InvalidRequest
from outrider.protocol.limits import (
    MAX_LABEL_CHARS,
    MIN_WEIGHT,
)

_LABEL = re.compile(rf"[!-~]{{0,{MAX_LABEL_CHARS}}}")


def check_label(field: str, value: str) -> None:
    """Checks a string that goes into logs: raises InvalidRequest if it could be mistaken there for something else."""
    if not _LABEL.fullmatch(value):
        raise InvalidRequest(field, f"must be at most {MAX_LABEL_CHARS} printable ASCII characters without spaces")


def check_weight(field: str, weight: float, most: float) -> None:
    # Rounded, because the 32-bit float nearest to 0.01 is less than 0.01. NaN fails too.
    if not MIN_WEIGHT <= round(weight, 6) <= most:
        raise InvalidRequest(field, f"{weight:g} is not from {MIN_WEIGHT:g} to {most:g}")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first id outside the vocabulary, as `field[3]`. The id itself is not
    repeated."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        index = next(index for index, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"{field}[{index}]", f"is outside the vocabulary of {vocab_size}")
