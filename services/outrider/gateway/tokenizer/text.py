"""From token ids to text, one token at a time. Pure; no text is decoded twice.

A token is a run of bytes, not of characters. So tokens are looked up as bytes, and one incremental UTF-8 decoder turns
them into text: it holds back exactly an incomplete character. An Aho-Corasick automaton (Aho and Corasick 1975) over
the characters finds stop strings; its state gives the length of the text that could still begin one.

The text after any number of tokens depends only on those tokens, not on how they were grouped. So an interrupted answer
can continue elsewhere: the tokens already delivered are fed again, and their text is dropped.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from outrider.token_bytes import TokenBytes


class Detokeniser:
    """The text of a growing sequence of tokens. Bytes that are not UTF-8 become U+FFFD."""

    __slots__ = ("_decoder", "_tokens")

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes."""
        return self._decoder.decode(self._tokens.of(token_id))

    def flush(self) -> str:
        """The text for an unfinished last character."""
        return self._decoder.decode(b"", final=True)


class StopAutomaton:
    """The stop strings that end, or could have begun, at each character. Built for each request, never shared."""

    __slots__ = ("_children", "_fail", "depth", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        """Characters at the end of the text that could begin a stop string, by state."""
        self.matched = [0]
        """Length of the longest stop string that ends here, by state; 0 when none does."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._children[state]:
                self._children[state][char] = len(self._children)
                self._children.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.matched.append(0)
            state = self._children[state][char]
        self.matched[state] = len(stop)

    def _link(self) -> None:
        waiting = deque(self._children[0].values())
        while waiting:
            state = waiting.popleft()
            for char, child in self._children[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                self.matched[child] = self.matched[child] or self.matched[self._fail[child]]
                waiting.append(child)

    def step(self, state: int, char: str) -> int:
        while state and char not in self._children[state]:
            state = self._fail[state]
        return self._children[state].get(char, 0)


class StopMatcher:
    """Passes text on up to the first complete stop string; of those that complete together, the longest counts."""

    __slots__ = ("_automaton", "_held", "_state", "stop")

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = StopAutomaton(stops) if stops else None
        self._state = 0
        self._held = ""
        self.stop = ""
        """The stop string that completed."""

    def push(self, text: str) -> str:
        """The text that now certainly lies before any stop string."""
        if self._automaton is None:
            return text
        if self.stop:
            return ""
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._automaton.step(self._state, char)
            if length := self._automaton.matched[self._state]:
                self.stop, self._held = pending[end - length : end], ""
                return pending[: end - length]
        certain = len(pending) - self._automaton.depth[self._state]
        self._held = pending[certain:]
        return pending[:certain]

    def flush(self) -> str:
        """At the end of the text: what was held back did not become a stop string."""
        held, self._held = self._held, ""
        return held
