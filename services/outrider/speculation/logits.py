"""Applies a request's penalties, biases and masks to the logits of each verified position. Pure.

The result at a position depends only on the committed tokens and the drafted ones before it, as if those were
committed. So a draft decides how many positions a step verifies, never their logits, and a target that takes over a
sequence has the same state again. The draft need not know the options: in ratio mode any q is exact, and in the other
modes only the target's choice counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.errors import InvalidRequest
from outrider.options.logits import MAX_BAD_WORD_TOKENS, LogitsOptions


class MaskLate(InvalidRequest):
    """A mask is not made yet. A later step may ask again."""


class Grammar(Protocol):
    """Which tokens may follow. Its state depends on the committed tokens, and only `advance` changes it."""

    @property
    def awaited(self) -> bool:
        """Whether a step should not ask for a mask now, as it would wait in vain."""
        return False

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were committed."""

    def allowed(self, prefix: Sequence[int]) -> Tensor | None:
        """bool [vocab]: the tokens allowed after the committed tokens and `prefix`. None when the prefix itself is not
        allowed. Raises InvalidRequest when the mask costs more than a step may spend on it, MaskLate when it is not
        made yet."""

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens the grammar allows in sequence."""


class RowRefused(Exception):
    """A grammar has no mask for this row, and later rows were not looked at."""

    def __init__(self, row: int, error: InvalidRequest) -> None:
        super().__init__(row)
        self.row = row
        self.error = error


class LogitsProcessor:
    """For one sequence. Its state depends on the committed tokens, and only `advance` changes it."""

    def __init__(
        self,
        options: LogitsOptions,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        stop_token_ids: Collection[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """`grammar`: already advanced by the output."""
        self._options = options
        self._prompt = prompt
        self._stops = sorted(stop_token_ids)
        self._output: list[int] = list(output)
        self._grammar = grammar
        # Tensors on the device of the logits, made at the first use. [vocab]
        self._counts: Tensor | None = None
        """float32: how often the output has each token."""
        self._in_prompt: Tensor | None = None
        """bool"""
        self._forbidden: Tensor | None = None
        """bool: tokens outside allowed_token_ids."""
        self._bias: tuple[Tensor, Tensor] | None = None
        self._always_banned: Tensor | None = None
        """int64: bad words of one token."""
        self._runs = _by_token_before_last(options.bad_words)

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were committed."""
        self._output.extend(token_ids)
        if self._grammar is not None:
            self._grammar.advance(token_ids)
        if self._counts is not None:
            self._counts = _counted(self._counts, token_ids)

    @property
    def awaits_mask(self) -> bool:
        return self._grammar is not None and self._grammar.awaited

    def num_possible(self, token_ids: Sequence[int]) -> int:
        """How many drafted tokens the grammar could accept."""
        return len(token_ids) if self._grammar is None else self._grammar.num_allowed(token_ids)

    def apply(self, logits: Tensor, prefixes: Sequence[Sequence[int]]) -> None:
        """Changes logits [rows, vocab] in place. Row i follows the committed tokens and then `prefixes[i]`. Raises
        RowRefused."""
        for number, (row, prefix) in enumerate(zip(logits, prefixes, strict=True)):
            try:
                self._apply(row, prefix)
            except InvalidRequest as error:
                raise RowRefused(number, error) from error

    def _apply(self, row: Tensor, prefix: Sequence[int]) -> None:
        options = self._options
        if options.logit_bias:
            row.index_add_(0, *self._biases(row))
        if options.penalises:
            self._penalise(row, prefix)
        if options.allowed_token_ids:
            row.masked_fill_(self._forbidden_tokens(row), -torch.inf)
        if self._grammar is not None and (allowed := self._grammar.allowed(prefix)) is not None:
            row.masked_fill_(~allowed.to(row.device), -torch.inf)
        banned = self._banned(row, prefix)
        if len(banned):
            _ban(row, banned)

    def _penalise(self, row: Tensor, prefix: Sequence[int]) -> None:
        options = self._options
        if self._counts is None:
            self._counts = _counted(torch.zeros_like(row), self._output)
        # Committed and drafted occurrences are counted together: two subtractions would round differently.
        counts = _counted(self._counts, prefix) if prefix else self._counts
        seen = counts > 0
        if options.repetition_penalty != 1.0:
            if self._in_prompt is None:
                self._in_prompt = _counted(torch.zeros_like(row), self._prompt) > 0
            penalty = options.repetition_penalty
            repeated = torch.where(row > 0, row / penalty, row * penalty)
            row.copy_(torch.where(seen | self._in_prompt, repeated, row))
        if options.frequency_penalty or options.presence_penalty:
            row -= counts * options.frequency_penalty + seen * options.presence_penalty

    def _banned(self, row: Tensor, prefix: Sequence[int]) -> Tensor:
        """int64: tokens that may not come next, given the tokens before."""
        if self._always_banned is None:
            alone = [word[0] for word in self._options.bad_words if len(word) == 1]
            self._always_banned = torch.tensor(alone, dtype=torch.int64, device=row.device)
        banned = list(self._stops) if len(self._output) + len(prefix) < self._options.min_tokens else []
        banned += self._last_of_runs(prefix)
        if not banned:
            return self._always_banned
        return torch.cat([self._always_banned, torch.tensor(banned, dtype=torch.int64, device=row.device)])

    def _last_of_runs(self, prefix: Sequence[int]) -> list[int]:
        if not self._runs or not (prefix or self._output):
            return []
        runs = self._runs.get(prefix[-1] if prefix else self._output[-1], ())
        if not runs:
            return []
        tail = (*self._output[-MAX_BAD_WORD_TOKENS:], *prefix)
        return [last for before, last in runs if tail[-len(before) :] == before]

    def _biases(self, row: Tensor) -> tuple[Tensor, Tensor]:
        if self._bias is None:
            ids = torch.tensor([token_id for token_id, _ in self._options.logit_bias], device=row.device)
            values = torch.tensor([bias for _, bias in self._options.logit_bias], dtype=row.dtype, device=row.device)
            self._bias = ids, values
        return self._bias

    def _forbidden_tokens(self, row: Tensor) -> Tensor:
        if self._forbidden is None:
            forbidden = torch.ones(row.shape, dtype=torch.bool)
            forbidden[list(self._options.allowed_token_ids)] = False
            self._forbidden = forbidden.to(row.device)
        return self._forbidden


def _counted(counts: Tensor, token_ids: Sequence[int]) -> Tensor:
    """A copy of `counts` with these tokens added."""
    ids = torch.tensor(token_ids, dtype=torch.int64, device=counts.device)
    return counts.index_add(0, ids, torch.ones(len(token_ids), dtype=counts.dtype, device=counts.device))


def _by_token_before_last(words: Sequence[tuple[int, ...]]) -> dict[int, list[tuple[tuple[int, ...], int]]]:
    """The words of two tokens or more, each as (all but the last, the last), by their second-to-last token: a row looks
    at few of them."""
    found: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for word in words:
        if len(word) > 1:
            found.setdefault(word[-2], []).append((word[:-1], word[-1]))
    return found


def _ban(row: Tensor, ids: Tensor) -> None:
    """Bans these tokens, unless none would be left: masks then take precedence over bans, and a token can still be
    chosen."""
    held = row[ids]
    row[ids] = -torch.inf
    if bool(row.max() == -torch.inf):
        row[ids] = held
