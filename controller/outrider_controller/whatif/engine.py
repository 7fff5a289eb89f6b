"""Engines without a model: a step says what the text has there, and takes as long as it is told to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from outrider.engine import Engine, ModelInfo, Row
from outrider.engine.attention.tree import depths
from outrider.engine.kv.kv_cache_manager import KVCacheManager
from torch import Tensor

from outrider_controller.whatif.texts import Guess, Text, Texts

_BLOCK_SIZE, _NUM_BLOCKS, _MAX_CONTEXT = 16, 1 << 17, 1 << 15
_SURE, _LEAST = 1 - 1e-6, 1e-6

StepSeconds = Callable[[int, int, int], float]
"""(sequences, rows that decode or verify, prompt tokens) → seconds."""


@dataclass(slots=True)
class Clock:
    """Virtual seconds of one worker."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class KnownEngine(Engine):
    """`says`: (text, place in its answer) → the likeliest tokens there. Its clock runs on by the time of each step."""

    def __init__(
        self,
        texts: Texts,
        says: Callable[[Text, int], Guess],
        seconds: StepSeconds,
        clock: Clock,
        num_free: Callable[[int, int], int] = lambda rows, tokens: 0,
    ) -> None:
        self.info = ModelInfo(texts.vocab_size, _MAX_CONTEXT, _BLOCK_SIZE, _NUM_BLOCKS, "none", "cpu", "known", ())
        self.kv = KVCacheManager(_NUM_BLOCKS, _BLOCK_SIZE, prefix_cache=False)
        self.token_map = None
        self.num_free = num_free
        self._texts, self._says, self._seconds, self._clock = texts, says, seconds, clock

    def num_free_tokens(self, num_rows: int, num_tokens: int) -> int:
        return self.num_free(num_rows, num_tokens)

    def forward_tapped(self, rows: Sequence[Row], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        self.kv.allocate(rows)
        self.kv.take_unclean(), self.kv.take_moves()
        logits = self._logits([guess for row in rows for guess in self._guesses(row)])
        self._clock.now_s += self._step_s(rows)
        self._advance(rows)
        return logits, torch.empty(0)

    def _guesses(self, row: Row) -> Iterator[Guess]:
        if not row.num_logits:
            return
        start, chain = row.sequence.cached_len, row.num_chain_tokens
        text = self._texts.of([*row.sequence.tokens[:2], *row.token_ids[:2]])
        below = [chain + depth for depth in depths(row.parents)]
        for offset in [*range(chain), *below][len(row.token_ids) - row.num_logits :]:
            yield self._says(text, self._texts.place(text, start + offset + 1))

    def _logits(self, guesses: Sequence[Guess]) -> Tensor:
        """[guesses, vocabulary], of which the softmax is each guess."""
        vocab_size = self.info.vocab_size
        # What a guess leaves is spread evenly over the other tokens, so that its chance stays what it is.
        left = [max(1 - sum(chance for _, chance in guess), _LEAST) / vocab_size for guess in guesses]
        found = torch.tensor(left).log()[:, None].repeat(1, vocab_size)
        at = [(row, token, math.log(chance)) for row, guess in enumerate(guesses) for token, chance in guess]
        if at:
            rows, tokens, values = zip(*at, strict=True)
            found[list(rows), list(tokens)] = torch.tensor(values)
        return found

    def _step_s(self, rows: Sequence[Row]) -> float:
        deciding = [row for row in rows if row.num_logits == len(row.token_ids)]
        num_rows = sum(row.num_logits for row in deciding)
        prompt_tokens = sum(len(row.token_ids) for row in rows) - num_rows
        return self._seconds(len(rows), num_rows, prompt_tokens)


def target_says(text: Text, place: int) -> Guess:
    """Its answer, without a doubt."""
    return ((text.answer[place], _SURE),) if 0 <= place < len(text.answer) else ()


def draft_says(text: Text, place: int) -> Guess:
    return text.guesses[place] if 0 <= place < len(text.guesses) else ()
