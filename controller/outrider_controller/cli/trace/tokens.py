"""Tokens on one line: what was drafted and kept, the target's own, what was rejected. Pure.

Text comes from a model and goes to a terminal: whatever is not printable is escaped.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import click
from outrider.rpc.v1 import trace_pb2 as trace

TokenBytes = Mapping[int, bytes]
"""By id. A token that is missing or has no bytes is shown by its id."""


@dataclass(slots=True)
class TokenPainter:
    """Draws the tokens of one answer's rounds in their order: a character may be spread over several tokens."""

    table: TokenBytes
    colour: bool
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    @property
    def legend(self) -> str:
        if not self.colour:
            return "tokens: [accepted] own ~rejected~ ~~never verified~~"
        kinds = (_accepted("accepted"), _own("the target's own"), _rejected("rejected"), _unverified("never verified"))
        return "tokens: " + ", ".join(kinds)

    def paint(self, one: trace.RoundTrace) -> str:
        """Committed tokens, then the drafted ones that were not accepted."""
        texts = [self._text(token, self._decoder) for token in one.token_ids]
        # With a decoder of their own: what was rejected is not part of the text.
        aside = codecs.getincrementaldecoder("utf-8")(errors="replace")
        refused = [self._text(token, aside) for token in one.rejected_token_ids]
        num_rejected = one.num_verified - one.num_accepted
        kinds = (
            (texts[: one.num_accepted], _accepted, "[{}]"),
            (texts[one.num_accepted :], _own, "{}"),
            (refused[:num_rejected], _rejected, "~{}~"),
            (refused[num_rejected:], _unverified, "~~{}~~"),
        )
        if self.colour:
            return "".join(style("".join(part)) for part, style, _ in kinds if part)
        return "".join(mark.format(text) for part, _, mark in kinds for text in part)

    def _text(self, token: int, decoder: codecs.IncrementalDecoder) -> str:
        raw = self.table.get(token, b"")
        return printable(decoder.decode(raw)) if raw else f"<{token}>"


def token_ids(rounds: Sequence[trace.RoundTrace]) -> set[int]:
    """Everything there is to be looked up."""
    return {token for one in rounds for token in (*one.token_ids, *one.rejected_token_ids)}


def printable(text: str) -> str:
    """One line, without anything a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _accepted(text: str) -> str:
    return click.style(text, fg="green")


def _own(text: str) -> str:
    return click.style(text, bold=True)


def _rejected(text: str) -> str:
    return click.style(text, fg="red", strikethrough=True)


def _unverified(text: str) -> str:
    return click.style(text, dim=True, strikethrough=True)
