"""Why a sequence, and the request that it serves, has ended."""

from __future__ import annotations

from enum import IntEnum


class Finish(IntEnum):
    """Values are those of outrider.rpc.v1.FinishReason."""

    NONE = 0
    STOP = 1
    LENGTH = 2
