"""Statistics over all answers to one request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from outrider.gateway.generation.answers import Choices, Chunk
from outrider.gateway.generation.stats import AnswerFinish, Usage
from outrider.gateway.http.openai import bodies


@dataclass(slots=True)
class ChoiceStats:
    """A prompt counts once for all its answers. Tokens of answers that are not shown count too."""

    choices: Choices
    _finishes: dict[int, AnswerFinish] = field(default_factory=dict)
    _tokens: Counter[int] = field(default_factory=Counter)

    def add(self, number: int, chunk: Chunk) -> None:
        self._tokens[number] += len(chunk.token_ids)
        if chunk.finish is not None:
            self._finishes[number] = chunk.finish

    def so_far(self, number: int) -> Usage:
        """The usage of one answer that may still run."""
        return Usage(len(self.choices.answers[number].prompt_token_ids), self._tokens[number], 0)

    @property
    def usage(self) -> Usage:
        """To be read at the end."""
        firsts = [finish.usage for number, finish in self._finishes.items() if not number % self.choices.per_prompt]
        shown = [
            finish.usage.completion_tokens
            for number, finish in self._finishes.items()
            if not self.choices.answers[number].options.prompt_only
        ]
        every = [finish.usage for finish in self._finishes.values()]
        return Usage(
            sum(usage.prompt_tokens for usage in firsts),
            sum(shown),
            sum(usage.cached_tokens for usage in firsts),
            sum(usage.accepted_prediction_tokens for usage in every),
            sum(usage.rejected_prediction_tokens for usage in every),
        )

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of a single answer that has ended. None for several, as in vLLM, because their times overlap."""
        if not self.choices.answers[0].options.include_metrics or not self._finishes:
            return {}
        if len(self.choices.answers) > 1:
            return {"metrics": None}
        return {"metrics": bodies.metrics(self._finishes[0].summary)}
