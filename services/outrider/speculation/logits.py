"""A request's penalties, biases and masks, for the logits of each verified position. Pure.

The result at a position depends only on the committed tokens and the drafted ones before it, as if those were
committed. So a draft decides how many positions a step verifies, never their logits, and a target that takes over a
sequence has the same state again. The draft need not know the options: in ratio mode any q is exact, and in the other
modes only the target's choice counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidRequest, OutriderError
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

    def allowed(self, prefix: Sequence[int]) -> bytes | None:
        """The tokens allowed after the committed tokens and `prefix`: a bit for each, the lowest of a byte first. All
        masks of a model have one length. None when the prefix itself is not allowed. Raises InvalidRequest when the
        mask costs more than a step may spend on it, Overloaded when others hold the memory for it, MaskLate when it is
        not made yet. After drafted tokens it may raise the first where it would not if they were committed."""

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens the grammar allows in sequence."""


class RowRefused(Exception):
    """A grammar has no mask for this row, and later rows were not looked at."""

    def __init__(self, row: int, error: OutriderError) -> None:
        super().__init__(row)
        self.row = row
        self.error = error


Bias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Tokens, and what is added to their logits."""
Seen = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]
"""Tokens, how often the output has each, and whether the prompt has it."""


class SeenTokens:
    """How often the output has each token, and which tokens the prompt has, where that is penalised."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.at: dict[int, int] = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt))}
        """The place of each token in these arrays."""
        self.ids = np.array(list(self.at), dtype=np.int64)
        self._counts = np.zeros(len(self.ids), dtype=np.float32)
        self._prompted = np.ones(len(self.ids), dtype=bool)
        self.add(output)

    def add(self, token_ids: Sequence[int]) -> None:
        new = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in self.at]
        if new:
            self.at |= {token_id: place for place, token_id in enumerate(new, start=len(self.ids))}
            self.ids, self._counts, self._prompted = self.with_new(new)
        for token_id in token_ids:
            self._counts[self.at[token_id]] += 1

    def with_new(self, new: Sequence[int]) -> Seen:
        """With those of `new`, not seen so far."""
        if not new:
            return self.ids, self._counts, self._prompted
        return (
            np.append(self.ids, new),
            np.append(self._counts, np.zeros(len(new), dtype=np.float32)),
            np.append(self._prompted, np.zeros(len(new), dtype=bool)),
        )


class LogitsProcessor:
    """For one sequence. Its state depends on the committed tokens, and only `advance` changes it. `changes.py` applies
    what it says."""

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
        self._stops = sorted(stop_token_ids)
        self._output: list[int] = list(output)
        self._grammar = grammar
        self.penalties = options.repetition_penalty, options.frequency_penalty, options.presence_penalty
        self.seen: SeenTokens | None = None
        """None where nothing is penalised."""
        if options.penalises:
            self.seen = SeenTokens(prompt if options.repetition_penalty != 1.0 else (), output)
        self.bias: Bias | None = None
        if options.logit_bias:
            ids, values = zip(*options.logit_bias, strict=True)
            self.bias = np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)
        self._allowed = _bits(options.allowed_token_ids) if options.allowed_token_ids else None
        self._always_banned = [word[0] for word in options.bad_words if len(word) == 1]
        self._runs = _by_token_before_last(options.bad_words)
        bans = self._always_banned or self._runs or (self._stops and options.min_tokens)
        self.restricts = grammar is not None or self._allowed is not None or bool(bans)
        """Whether `mask` or `banned` may find anything."""

    def advance(self, token_ids: Sequence[int]) -> None:
        self._output.extend(token_ids)
        if self._grammar is not None:
            self._grammar.advance(token_ids)
        if self.seen is not None:
            self.seen.add(token_ids)

    @property
    def has_grammar(self) -> bool:
        return self._grammar is not None

    @property
    def awaits_mask(self) -> bool:
        return self._grammar is not None and self._grammar.awaited

    def num_possible(self, token_ids: Sequence[int]) -> int:
        """How many drafted tokens the grammar could accept."""
        return len(token_ids) if self._grammar is None else self._grammar.num_allowed(token_ids)

    def mask(self, prefix: Sequence[int]) -> bytes | None:
        """What is allowed after the committed tokens and `prefix`, as Grammar.allowed; None: all. Raises as that
        does."""
        return self._allowed if self._grammar is None else self._grammar.allowed(prefix)

    def banned(self, prefix: Sequence[int]) -> list[int]:
        """Tokens that may not come next, given the tokens before."""
        stops = self._stops if len(self._output) + len(prefix) < self._options.min_tokens else []
        return [*self._always_banned, *stops, *self._last_of_runs(prefix)]

    def _last_of_runs(self, prefix: Sequence[int]) -> list[int]:
        if not self._runs or not (prefix or self._output):
            return []
        runs = self._runs.get(prefix[-1] if prefix else self._output[-1], ())
        if not runs:
            return []
        tail = (*self._output[-MAX_BAD_WORD_TOKENS:], *prefix)
        return [last for before, last in runs if tail[-len(before) :] == before]


def _bits(token_ids: Sequence[int]) -> bytes:
    """A mask that allows these."""
    allowed = np.zeros(max(token_ids) + 1, np.uint8)
    allowed[list(token_ids)] = 1
    return np.packbits(allowed, bitorder="little").tobytes()


def _by_token_before_last(words: Sequence[tuple[int, ...]]) -> dict[int, list[tuple[tuple[int, ...], int]]]:
    """The words of two tokens or more, each as (all but the last, the last), by their second-to-last token: a row looks
    at few of them."""
    found: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for word in words:
        if len(word) > 1:
            found.setdefault(word[-2], []).append((word[:-1], word[-1]))
    return found
