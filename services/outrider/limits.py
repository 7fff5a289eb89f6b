"""The bounds of messages that depend on no model and no setting, with checks that every receiver makes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from outrider.errors import InvalidRequest

MAX_MODEL_CHARS = 256
MAX_REVISION_CHARS = 256
MAX_LABEL_CHARS = 128
"""Bound of a request's id and of its tenant."""
MAX_ERROR_NAME_CHARS = 100
"""Bound of an error's reason and field, which may come from a peer. For its message: errors.MAX_MESSAGE_CHARS."""

MAX_SALT_BYTES = 64
MAX_CLIENT_STOP_TOKENS = 64
MAX_STOP_TOKENS = 256
"""The client's stop tokens and the model's own together."""

MAX_DRAFT_TOKENS = 64
"""Most tokens of one proposal that a client may request."""
MAX_WAIT_US = 10_000_000
"""Longest that a target may hold a sequence back for a draft."""
MAX_TREE_TOKENS = 256
"""A draft of 64 tokens and five alternatives make 69. Older versions also send 16 branches of four tokens with five
alternatives each: 245."""
MAX_DRAFT_BYTES = 64 << 10
"""Bound of one Draft, with fields unknown to this version: 64 distributions of 64 tokens make 21,000 bytes. It may be
passed on in one message with those of other sequences."""
MAX_SOURCES = 16
"""Kinds of drafters in one step."""
MAX_SOURCE_BYTES = 32
"""Bound of a drafter's name for one of its parts, which is sent with every commit."""

MAX_WEIGHT = 16.0
"""Greatest value of a request's saved token, relative to another request's."""
MAX_TENANT_WEIGHT = 100.0
"""Greatest share of a full fleet, relative to another tenant's."""
MIN_WEIGHT = 0.01
"""The least that an operator may give of either."""
MAX_TENANTS_AT_ONCE = 10_000
"""Most tenants that one call changes."""

MAX_FUNCTION_NAME_CHARS = 256
"""Bound of a tool's name."""
MAX_UINT32 = 2**32 - 1

MAX_DURATION_US = 3_600_000_000
"""Bound of any duration in a message: one hour. Sums of such durations still fit a message."""
MAX_DROPPED_TOKENS = 1 << 14
"""Per round: those of some sixty drafts. Even in every round of the longest request, the sum fits a message."""


def to_us(seconds: float) -> int:
    """A duration as messages have it."""
    return clamp_us(round(seconds * 1e6))


def clamp_us(value_us: int) -> int:
    """Clamps a duration to the range that messages allow."""
    return value_us if 0 <= value_us <= MAX_DURATION_US else max(0, min(value_us, MAX_DURATION_US))


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
