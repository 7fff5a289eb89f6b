"""Tells a source of drafts of sequences, as a target does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.drafting.source import DraftSource
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec


class Told:
    """Has the tokens of each sequence."""

    def __init__(self, source: DraftSource) -> None:
        self.source = source
        self._tokens: dict[SequenceKey, list[int]] = {}

    def open(self, key: SequenceKey, spec: SequenceSpec) -> None:
        tokens = self._tokens[key] = spec.tokens
        self.source.open(key, spec, tokens)

    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None:
        self._tokens[key].extend(tokens)
        self.source.commit(key, base_len, tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)
