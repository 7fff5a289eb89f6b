"""Checks of openings and drafts, the same for every receiver. Raises InvalidRequest.

A draft that is merely late, repeated or empty passes: the target trims, drops and counts it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import InvalidRequest
from outrider.options.sampling import Q_TOTAL, Q_WIDTH, SamplingParams, VerificationMode
from outrider.protocol.limits import (
    MAX_DRAFT_BYTES,
    MAX_LABEL_CHARS,
    MAX_SALT_BYTES,
    MAX_SOURCE_BYTES,
    MAX_STOP_TOKENS,
    MAX_TREE_TOKENS,
    MIN_WEIGHT,
)
from outrider.rpc.v1 import sequence_pb2

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


@dataclass(slots=True)
class DraftValidator:
    """For one opening of one sequence on a draft. No draft may begin inside the prompt."""

    mode: sequence_pb2.VerificationMode.ValueType
    sampling: sequence_pb2.Sampling
    prompt_len: int
    vocab_size: int
    max_context_len: int
    max_draft_tokens: int
    """Positions that one message may cover: those of a proposal and the run-ahead beyond it."""
    epoch: int = 0
    """The highest epoch received."""

    def allow(self, max_draft_tokens: int) -> None:
        """The draft was sent another limit. Messages made under the previous one may still come."""
        self.max_draft_tokens = max(self.max_draft_tokens, max_draft_tokens)

    def check(self, draft: sequence_pb2.Draft) -> int:
        """How many positions the draft covers. Raises if no correct draft worker would have sent it."""
        if draft.epoch < self.epoch:
            raise InvalidRequest("epoch", f"went back from {self.epoch} to {draft.epoch}")
        num_positions = check_draft(draft, self.vocab_size, self.max_context_len, self.max_draft_tokens)
        if draft.base_len < self.prompt_len:
            raise InvalidRequest("base_len", f"{draft.base_len} is inside the prompt")
        self._check_mode(draft)
        self.epoch = draft.epoch
        return num_positions

    def _check_mode(self, draft: sequence_pb2.Draft) -> None:
        if self.mode != sequence_pb2.VERIFICATION_MODE_RATIO:
            if draft.q:
                raise InvalidRequest("q", "given outside ratio mode")
            return
        if draft.token_ids and not draft.q:
            raise InvalidRequest("q", f"must be one per token, got 0 for {len(draft.token_ids)}")
        if draft.token_ids and draft.sampling != self.sampling:
            raise InvalidRequest("sampling", "q was computed under a sampling that is not the sequence's")


def check_draft(draft: sequence_pb2.Draft, vocab_size: int, max_context_len: int, max_positions: int) -> int:
    """The checks of DraftValidator.check that need no sequence."""
    if len(draft.source.encode()) > MAX_SOURCE_BYTES:
        raise InvalidRequest("source", f"must be at most {MAX_SOURCE_BYTES} bytes")
    if draft.ByteSize() > MAX_DRAFT_BYTES:
        raise InvalidRequest("draft", f"{draft.ByteSize()} bytes, must be at most {MAX_DRAFT_BYTES}")
    token_ids = draft.token_ids[:]
    num_positions = len(token_ids)
    if parents := draft.parents[:]:
        num_positions = _depth(parents, num_positions)
    if num_positions > max_positions:
        raise InvalidRequest("token_ids", f"{num_positions} where {max_positions} were allowed")
    check_token_ids("token_ids", token_ids, vocab_size)
    if draft.base_len > max_context_len:
        raise InvalidRequest("base_len", f"must be at most {max_context_len}, got {draft.base_len}")
    if confidence := draft.confidence[:]:
        _check_confidence(confidence, len(token_ids))
    if draft.q:
        _check_q(draft, token_ids, vocab_size)
    return num_positions


def _depth(parents: Sequence[int], num_tokens: int) -> int:
    if len(parents) != num_tokens:
        raise InvalidRequest("parents", f"must be one per token, got {len(parents)} for {num_tokens}")
    if any(not -1 <= parent < child for child, parent in enumerate(parents)):
        raise InvalidRequest("parents", "a parent must come before its child")
    if num_tokens > MAX_TREE_TOKENS:
        raise InvalidRequest("token_ids", f"{num_tokens} in a tree, must be at most {MAX_TREE_TOKENS}")
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)


def _check_confidence(confidence: Sequence[float], num_tokens: int) -> None:
    if len(confidence) != num_tokens:
        raise InvalidRequest("confidence", f"must be one per token, got {len(confidence)} for {num_tokens}")
    # The sum, because NaN would pass the other checks.
    if not (min(confidence) >= 0 and max(confidence) <= 1.0001 and sum(confidence) >= 0):
        raise InvalidRequest("confidence", "not a probability")


def _check_q(draft: sequence_pb2.Draft, token_ids: Sequence[int], vocab_size: int) -> None:
    if draft.parents:
        raise InvalidRequest("parents", "trees are not verified in ratio mode")
    if len(draft.q) != len(token_ids):
        raise InvalidRequest("q", f"must be one per token, got {len(draft.q)} for {len(token_ids)}")
    for q, token_id in zip(draft.q, token_ids, strict=True):
        ids, counts = q.token_ids[:], q.counts[:]
        if not 0 < len(set(ids)) == len(ids) == len(counts) <= Q_WIDTH:
            raise InvalidRequest("q", "ids repeat, or ids and counts do not match")
        if sum(counts) != Q_TOTAL or min(counts) < 1:
            raise InvalidRequest("q", f"counts must be at least 1 and sum to {Q_TOTAL}")
        if token_id not in ids:
            raise InvalidRequest("q", "a drafted token could not have been drawn from it")
        check_token_ids("q", ids, vocab_size)
