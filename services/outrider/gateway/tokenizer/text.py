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
import re
from collections import deque
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
    """Passes text on up to the first complete stop string; of those that complete together, the longest counts.

    The automaton of Aho and Corasick (1975), which looks at each character once or twice, however many stop strings
    there are. A state is a beginning of one: the longest that the text ends with.
    """

    __slots__ = ("_depths", "_ends", "_fallbacks", "_first", "_held", "_next", "_state", "stop")

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depths, self._ends, self._fallbacks = [0], [""], [0]
        for stop in filter(None, stops):
            self._add(stop)
        self._link()
        self._first = re.compile(f"[{re.escape(''.join(self._next[0]))}]") if self._next[0] else None
        self._state = 0
        self._held = ""
        self.stop = ""
        """The stop string that completed."""

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depths.append(self._depths[state] + 1)
                self._ends.append("")
                self._fallbacks.append(0)
            state = self._next[state][char]
        self._ends[state] = stop

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for char, child in self._next[state].items():
                self._fallbacks[child] = self._after(self._fallbacks[state], char)
                self._ends[child] = self._ends[child] or self._ends[self._fallbacks[child]]
                waiting.append(child)

    def _after(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fallbacks[state]
        return self._next[state].get(char, 0)

    def push(self, text: str) -> str:
        """The text that now certainly lies before any stop string."""
        if self._first is None or self.stop:
            return "" if self.stop else text
        state, at = self._state, 0
        while at < len(text):
            if not state:
                # Nearly all text begins no stop string.
                found = self._first.search(text, at)
                if found is None:
                    break
                at = found.start()
            state = self._after(state, text[at])
            at += 1
            if self._ends[state]:
                self.stop = self._ends[state]
                return self._passed(text[:at], len(self.stop), "")
        self._state = state
        pending = self._held + text
        return self._passed(text, self._depths[state], pending[len(pending) - self._depths[state] :])

    def _passed(self, text: str, num_kept: int, held: str) -> str:
        pending, self._held = self._held + text, held
        return pending[: len(pending) - num_kept]

    def flush(self) -> str:
        """At the end of the text: what was held back did not become a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
