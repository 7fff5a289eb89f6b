"""Colours what was drafted and accepted in a text as it streams."""

from __future__ import annotations

from pathlib import Path

import click
from outrider.rpc.v1 import generation_pb2 as generation
from tokenizers import Tokenizer

_ACCEPTED = "green"


class Painter:
    """The text is the gateway's; the tokenizer only tells where in it the accepted tokens end."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._token_ids: list[int] = []
        self._accepted: list[tuple[int, int]] = []
        """Spans of characters."""
        self._length = 0

    def paint(self, chunk: generation.StreamGenerateResponse) -> str:
        """The chunk's text with escape codes around what was drafted."""
        before = self._chars(len(self._token_ids))
        self._token_ids.extend(chunk.token_ids)
        after = self._chars(len(self._token_ids) - len(chunk.token_ids) + chunk.num_accepted)
        if after > before:
            self._accepted.append((before, after))
        start, self._length = self._length, self._length + len(chunk.text)
        return self._styled(chunk.text, start)

    def _styled(self, text: str, start: int) -> str:
        """Runs of equal colour. A text held back by the gateway belongs to spans of earlier chunks, too."""
        self._accepted = [span for span in self._accepted if span[1] > start]
        runs: list[tuple[bool, str]] = []
        for position, character in enumerate(text, start):
            accepted = any(first <= position < last for first, last in self._accepted)
            if runs and runs[-1][0] == accepted:
                runs[-1] = (accepted, runs[-1][1] + character)
            else:
                runs.append((accepted, character))
        return "".join(click.style(run, fg=_ACCEPTED) if accepted else run for accepted, run in runs)

    def _chars(self, tokens: int) -> int:
        return len(self._tokenizer.decode(self._token_ids[:tokens]))
