"""From token ids to text, one token at a time. Pure; no text is decoded twice.

A token is a run of bytes, not of characters. So tokens are looked up as bytes, and one incremental UTF-8 decoder turns
them into text: it holds back exactly an incomplete character. So does the matcher of stop strings with what could still
begin one. Tokens that a vocabulary of characters has for single bytes are held back until another token follows: one
wrong byte makes all of them U+FFFD.

The text after any number of tokens depends only on those tokens, not on how they were grouped. So an interrupted answer
can continue elsewhere: the tokens already delivered are fed again, and their text is dropped.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from outrider.token_bytes import TokenBytes


class Detokeniser:
    """The text of a growing sequence of tokens, as `tokenizers` decodes the whole of it. Bytes that are not UTF-8
    become U+FFFD."""

    __slots__ = ("_decoder", "_run", "_tokens")

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes."""
        data = self._tokens.of(token_id)
        if token_id in self._tokens.runs:
            self._run += data
            return ""
        if not data and (token_id in self._tokens.silent or token_id >= len(self._tokens.table)):
            return ""
        return self._end_run() + self._decoder.decode(data)

    def flush(self) -> str:
        """The text for an unfinished last character."""
        return self._end_run() + self._decoder.decode(b"", final=True)

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run = bytes(self._run)
        self._run.clear()
        return self._tokens.of_run(run)


class StopMatcher:
    """Passes text on up to the first complete stop string; of those that complete together, the longest counts."""

    __slots__ = ("_beginnings", "_held", "_longest", "_stops", "stop")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stop = ""
        """The stop string that completed."""

    def push(self, text: str) -> str:
        """The text that now certainly lies before any stop string."""
        if not self._stops:
            return text
        if self.stop:
            return ""
        pending = self._held + text
        ends = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if ends:
            end, _, self.stop = min(ends)
            self._held = ""
            return pending[: end - len(self.stop)]
        # What could begin a stop string is never longer than that.
        first = max(0, len(pending) - self._longest + 1)
        certain = next((at for at in range(first, len(pending)) if pending[at:] in self._beginnings), len(pending))
        self._held = pending[certain:]
        return pending[:certain]

    def flush(self) -> str:
        """At the end of the text: what was held back did not become a stop string."""
        held, self._held = self._held, ""
        return held
