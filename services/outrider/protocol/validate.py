"""Checks of openings, the same for every receiver. Raises InvalidRequest."""

from __future__ import annotations

import re
from collections.abc import Sequence

from outrider.errors import InvalidRequest
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.protocol.limits import (
    MAX_LABEL_CHARS,
    MAX_SALT_BYTES,
    MAX_STOP_TOKENS,
    MIN_WEIGHT,
)

_LABEL = re.compile(rf"[!-~]{{0,{MAX_LABEL_CHARS}}}")


def check_opening(
    *,
    prompt: Sequence[int],
    committed: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    params: SamplingParams,
    mode: VerificationMode,
    salt: bytes,
    vocab_size: int,
    max_context_len: int,
) -> None:
    """The checks that every worker makes, before those of its own limits."""
    if not prompt:
        raise InvalidRequest("prompt_token_ids", "must have at least one token")
    check_token_ids("prompt_token_ids", prompt, vocab_size)
    check_token_ids("committed_token_ids", committed, vocab_size)
    check_stopping(max_new_tokens, stop_token_ids, vocab_size)
    if len(committed) >= max_new_tokens:
        raise InvalidRequest("committed_token_ids", "already as many as stopping.max_new_tokens")
    if (length := len(prompt) + len(committed)) >= max_context_len:
        name = "committed_token_ids" if len(prompt) < max_context_len else "prompt_token_ids"
        raise InvalidRequest(name, f"{length} tokens leave no room in a context of {max_context_len}")
    if params.greedy != (mode is VerificationMode.GREEDY):
        raise InvalidRequest("mode", f"{mode.name} does not go with temperature {params.temperature:g}")
    if len(salt) > MAX_SALT_BYTES:
        raise InvalidRequest("cache_salt", f"must be at most {MAX_SALT_BYTES} bytes, got {len(salt)}")


def check_prediction(token_ids: Sequence[int], vocab_size: int, max_context_len: int) -> None:
    """Raises InvalidRequest."""
    if len(token_ids) > max_context_len:
        raise InvalidRequest("predicted_token_ids", f"{len(token_ids)} tokens; at most {max_context_len} are allowed")
    check_token_ids("predicted_token_ids", token_ids, vocab_size)


def check_label(field: str, value: str) -> None:
    """Checks a string that goes into logs: raises InvalidRequest if it could be mistaken there for something else."""
    if not _LABEL.fullmatch(value):
        raise InvalidRequest(field, f"must be at most {MAX_LABEL_CHARS} printable ASCII characters without spaces")


def check_weight(field: str, weight: float, most: float) -> None:
    # Rounded, because the 32-bit float nearest to 0.01 is less than 0.01. NaN fails too.
    if not MIN_WEIGHT <= round(weight, 6) <= most:
        raise InvalidRequest(field, f"{weight:g} is not from {MIN_WEIGHT:g} to {most:g}")


def check_stopping(max_new_tokens: int, stop_token_ids: Sequence[int], vocab_size: int) -> None:
    if max_new_tokens < 1:
        raise InvalidRequest("stopping.max_new_tokens", "must be at least 1")
    if len(stop_token_ids) > MAX_STOP_TOKENS:
        message = f"must be at most {MAX_STOP_TOKENS}, got {len(stop_token_ids)}"
        raise InvalidRequest("stopping.stop_token_ids", message)
    check_token_ids("stopping.stop_token_ids", stop_token_ids, vocab_size)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first id outside the vocabulary, as `field[3]`. The id itself is not
    repeated."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        index = next(index for index, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"{field}[{index}]", f"is outside the vocabulary of {vocab_size}")
