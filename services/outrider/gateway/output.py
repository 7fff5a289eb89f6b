"""One growing answer: takes the tokens of each round, and returns the text and tokens that the client may see. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from outrider.gateway.tokenizer.text import TextStream, TokenBytes

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one round adds to the answer."""

    text: str
    token_ids: tuple[int, ...]
    """Shorter than the round if the answer ended within it."""
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Output:
    """Ends at the first of a stop token, a stop string and max_tokens, also within a round."""

    token_bytes: TokenBytes
    stop: Sequence[str]
    stop_token_ids: frozenset[int]
    max_tokens: int
    min_tokens: int = 0
    """No stop string ends the answer before this length. For stop tokens, the target ensures it."""
    token_ids: list[int] = field(default_factory=list)
    """All tokens after the prompt, with the resumed ones."""
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    """The stop token or stop string that ended it."""
    _stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self._stream = TextStream(self.token_bytes, self.stop)

    def resume(self, token_ids: Sequence[int]) -> Piece:
        """Adds tokens that the client already has, and drops their certain text. Text that was held back still is.

        The piece has text and a reason only if the answer had ended with these tokens.
        """
        for token_id in token_ids:
            _, reason = self._advance(token_id)
            if reason is not None:
                return Piece(self.end(reason), (), reason)
        return Piece("", ())

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Adds the tokens of one round, in order. Not to be called after the end of the answer."""
        text: list[str] = []
        for num_kept, token_id in enumerate(token_ids, start=1):
            certain, reason = self._advance(token_id)
            text.append(certain)
            if reason is not None:
                text.append(self.end(reason))
                return Piece("".join(text), tuple(token_ids[:num_kept]), reason)
        return Piece("".join(text), tuple(token_ids))

    def end(self, reason: FinishReason) -> str:
        """Ends the answer. Returns the text that was still held back."""
        self.finish_reason = reason
        return self._stream.finish()

    def _advance(self, token_id: int) -> tuple[str, FinishReason | None]:
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            # The answer's tokens include the stop token; its text is left out.
            self.matched_stop = token_id
            return "", "stop"
        text = self._stream.push(token_id, stops=len(self.token_ids) > self.min_tokens)
        if self._stream.stop:
            self.matched_stop = self._stream.stop
            return text, "stop"
        return text, "length" if len(self.token_ids) >= self.max_tokens else None
