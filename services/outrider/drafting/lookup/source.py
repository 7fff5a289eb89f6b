"""Drafts that are looked up in what a sequence has said so far, in the process that verifies them.

A lookup answers before the next step is planned, so it is never waited for. It must be quick: it runs between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.drafting.source import CloseReason, DraftSource
from outrider.options.sampling import Q_TOTAL, DraftDistribution, VerificationMode
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.tree import DraftTree

REACH = 4
"""Most tokens that are proposed for each matched one (SuffixDecoding's alpha). More are seldom right. How many of these
are verified, the price of a row decides."""

Found = tuple[Sequence[int], int]
"""Tokens, and the length of the match before them. No tokens: nothing was found."""


class Lookup(Protocol):
    """Of one sequence."""

    def find(self, count: int) -> Found | None:
        """At most `count` next tokens, and how many tokens before them matched. None: ask again, it has done a bounded
        part of what is left to do before the first lookup."""
        ...


@dataclass(slots=True)
class _Text:
    lookup: Lookup
    tokens: Sequence[int]
    count: int
    stop_token_ids: frozenset[int]
    ratio: bool


@dataclass(slots=True)
class LookupDrafts(DraftSource):
    """One lookup for each sequence."""

    name: str
    make: Callable[[SequenceSpec, Sequence[int]], Lookup | None]
    """Of a sequence and its tokens, which grow. None: there is nothing to look up for it."""
    _texts: dict[SequenceKey, _Text] = field(default_factory=dict)
    _due: dict[SequenceKey, _Text] = field(default_factory=dict)
    """Those whose text or limits have changed since they were last looked up."""

    def open(self, key: SequenceKey, spec: SequenceSpec, tokens: Sequence[int]) -> None:
        if (lookup := self.make(spec, tokens)) is None:
            return
        count, ratio = spec.speculation.max_draft_tokens, spec.mode is VerificationMode.RATIO
        self._texts[key] = self._due[key] = _Text(lookup, tokens, count, spec.stop_token_ids, ratio)

    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None:
        if (text := self._texts.get(key)) is not None:
            self._due[key] = text

    def limit(self, key: SequenceKey, limits: Speculation) -> None:
        if (text := self._texts.get(key)) is not None:
            text.count = limits.max_draft_tokens
            self._due[key] = text

    def close(self, key: SequenceKey, reason: CloseReason) -> None:
        self._texts.pop(key, None)
        self._due.pop(key, None)

    def poll(self) -> Iterator[tuple[SequenceKey, DraftTree]]:
        due, self._due = self._due, {}
        for key, text in due.items():
            found = text.lookup.find(text.count) if text.count else ((), 0)
            if found is None:
                self._due[key] = text
            elif found[0]:
                yield key, self._tree(text, *found)

    def _tree(self, text: _Text, tokens: Sequence[int], matched: int) -> DraftTree:
        found = tuple(_until_stop(tokens, text.stop_token_ids))
        # The token is not drawn, so in ratio mode q gives it probability 1.
        q = tuple(DraftDistribution((token,), (Q_TOTAL,)) for token in found) if text.ratio else ()
        return DraftTree(len(text.tokens), found, q=q, source=self.name, matched=matched)


def _until_stop(tokens: Sequence[int], stop_token_ids: frozenset[int]) -> Sequence[int]:
    """The tokens up to and including the first stop token."""
    if stop_token_ids.isdisjoint(tokens):
        return tokens
    for position, token in enumerate(tokens):
        if token in stop_token_ids:
            return tokens[: position + 1]
    return tokens
