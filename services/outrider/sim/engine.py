"""An engine without a model: a step says what a text has there, and takes as long as it is told to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from outrider.engine import Engine, ModelInfo, Row
from outrider.engine.kv.kv_cache_manager import KVCacheManager
from outrider.sim.worker import Processor

Guess = Sequence[tuple[int, float]]
"""The likeliest next tokens, each with its chance; nothing: none is known."""
Says = Callable[[Row], Iterable[Guess]]
"""A guess for each position of the row whose logits are wanted."""
StepSeconds = Callable[[int, int, int], float]
"""(sequences that decode or verify, their rows, prompt tokens) → seconds."""

_LEAST = 1e-6


class KnownEngine(Engine):
    """Its processor's clock runs on by the time of each step, whatever looking it up takes."""

    def __init__(
        self,
        info: ModelInfo,
        says: Says,
        seconds: StepSeconds,
        processor: Processor,
        *,
        num_free: Callable[[int, int], int] = lambda rows, tokens: 0,
        states: Callable[[Sequence[Row]], Tensor] = lambda rows: torch.empty(0),
    ) -> None:
        """`num_free`: as Engine.num_free_tokens. `states`: of the rows' last num_tapped tokens."""
        self.info = info
        self.kv = KVCacheManager(info.num_blocks, info.block_size, prefix_cache=False)
        self.token_map = None
        self.num_steps, self.steps_s = 0, 0.0
        """All its steps, and what they took."""
        self._says, self._seconds, self._processor = says, seconds, processor
        self._num_free, self._states = num_free, states

    def num_free_tokens(self, num_rows: int, num_tokens: int) -> int:
        return self._num_free(num_rows, num_tokens)

    def forward_tapped(self, rows: Sequence[Row], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        started_s = self._processor.clock()
        self.kv.allocate(rows)
        self.kv.take_unclean(), self.kv.take_moves()
        logits = self._logits([guess for row in rows if row.num_logits for guess in self._says(row)])
        states = self._states(rows) if layers else torch.empty(0)
        step_s = self._step_s(rows)
        self._advance(rows)
        self.num_steps += 1
        self.steps_s += step_s
        self._processor.spend(step_s - (self._processor.clock() - started_s))
        return logits, states

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
        return self._seconds(len(deciding), num_rows, sum(len(row.token_ids) for row in rows) - num_rows)
