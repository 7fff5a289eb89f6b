"""One answer as it grows: tokens of a round in, what the client may see of them out. Pure."""

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
    """Shorter than the round when the answer ended inside it."""
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Output:
    """Ends at a stop token, a stop string or max_tokens, whichever comes first, also within a round."""

    token_bytes: TokenBytes
    stop: Sequence[str]
    stop_token_ids: frozenset[int]
    max_tokens: int
    min_tokens: int = 0
    """No stop string ends the answer before. The target sees to the stop tokens."""
    token_ids: list[int] = field(default_factory=list)
    """From the end of the prompt, those the client brought with it included."""
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    """The stop token or stop string that ended it."""
    _stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self._stream = TextStream(self.token_bytes, self.stop)

    def resume(self, token_ids: Sequence[int]) -> Piece:
        """Takes in tokens the client already has, with such text of theirs as was certain. What was held, still is.

        The piece carries text and a reason only when the answer turns out to have ended with these tokens.
        """
        for token_id in token_ids:
            _, reason = self._advance(token_id)
            if reason is not None:
                return Piece(self.end(reason), (), reason)
        return Piece("", ())

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Tokens of one round, in order. Nothing may be pushed after the answer has ended."""
        text: list[str] = []
        for num_kept, token_id in enumerate(token_ids, start=1):
            certain, reason = self._advance(token_id)
            text.append(certain)
            if reason is not None:
                text.append(self.end(reason))
                return Piece("".join(text), tuple(token_ids[:num_kept]), reason)
        return Piece("".join(text), tuple(token_ids))

    def end(self, reason: FinishReason) -> str:
        """No more tokens come. Returns the text that was still held back."""
        self.finish_reason = reason
        return self._stream.finish()

    def _advance(self, token_id: int) -> tuple[str, FinishReason | None]:
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            # The token is part of the answer's tokens; its text is not part of the text.
            self.matched_stop = token_id
            return "", "stop"
        text = self._stream.push(token_id, stops=len(self.token_ids) > self.min_tokens)
        if self._stream.stop:
            self.matched_stop = self._stream.stop
            return text, "stop"
        return text, "length" if len(self.token_ids) >= self.max_tokens else None
