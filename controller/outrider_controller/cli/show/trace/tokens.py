"""Tokens on one line: what was drafted and kept, the target's own, what was rejected. Pure.

Text comes from a model and goes to a terminal: whatever is not printable is escaped.
"""

from __future__ import annotations

import codecs
import itertools
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
            return "tokens: [accepted] [looked up: accepted] own ~rejected~ ~~never verified~~"
        accepted = "accepted of " + " ".join(_accepted(source, source) for source in [*_COLOURS, "others"])
        kinds = (_own("the target's own"), _rejected("rejected"), _unverified("never verified"))
        return "tokens: " + ", ".join([accepted, *kinds])

    def paint(self, one: trace.RoundTrace) -> str:
        """Committed tokens, then the drafted ones that were not accepted."""
        texts = [self._text(token, self._decoder) for token in one.token_ids]
        # With a decoder of their own: what was rejected is not part of the text.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        refused = [self._text(token, decoder) for token in one.rejected_token_ids]
        num_rejected = one.num_verified - one.num_accepted
        kinds = (
            (texts[one.num_accepted :], _own, "{}"),
            (refused[:num_rejected], _rejected, "~{}~"),
            (refused[num_rejected:], _unverified, "~~{}~~"),
        )
        accepted = self._accepted(texts[: one.num_accepted], one)
        if self.colour:
            return accepted + "".join(style("".join(part)) for part, style, _ in kinds if part)
        return accepted + "".join(mark.format(text) for part, _, mark in kinds for text in part)

    def _accepted(self, texts: Sequence[str], one: trace.RoundTrace) -> str:
        pairs = list(zip(sources_of(one), texts, strict=False))
        if not self.colour:
            own = {printable(each.source) for each in one.sources if each.own}
            return "".join(f"[{source}:{text}]" if source in own else f"[{text}]" for source, text in pairs)
        runs = itertools.groupby(pairs, key=lambda pair: pair[0])
        return "".join(_accepted("".join(text for _, text in run), source) for source, run in runs)

    def _text(self, token: int, decoder: codecs.IncrementalDecoder) -> str:
        raw = self.table.get(token, b"")
        return printable(decoder.decode(raw)) if raw else f"<{token}>"


def token_ids(rounds: Sequence[trace.RoundTrace]) -> set[int]:
    """Everything there is to be looked up."""
    return {token for one in rounds for token in (*one.token_ids, *one.rejected_token_ids)}


def sources_of(one: trace.RoundTrace) -> list[str]:
    """The source of each accepted token, then of each rejected one; one that the round does not tell is empty."""
    names = [printable(each.source) for each in one.sources] or [printable(one.source)]
    count = max(one.num_drafted, one.num_accepted + len(one.rejected_token_ids))
    places = [*(one.token_sources or [0] * count), *[len(names)] * count]
    return [names[place] if place < len(names) else "" for place in places[:count]]


def printable(text: str) -> str:
    """One line, without anything a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_COLOURS = {"model": "green", "ngram": "cyan", "prediction": "blue", "suffix": "magenta"}


def _accepted(text: str, source: str) -> str:
    return click.style(text, fg=_COLOURS.get(source or "model", "yellow"))


def _own(text: str) -> str:
    return click.style(text, bold=True)


def _rejected(text: str) -> str:
    return click.style(text, fg="red", strikethrough=True)


def _unverified(text: str) -> str:
    return click.style(text, dim=True, strikethrough=True)
