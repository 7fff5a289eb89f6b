"""Drafts of a head in the target's own process: it reads the states of each step, and proposes before the next one.

A head keeps keys and values of its own beside the target's, and finds those of a prefix again. Where it has none at
positions of the target's prefix cache, it reads the states of the sequence that ran them. Where these are forgotten, it
drafts without: that costs acceptance, never a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outrider.drafting.source import CloseReason, DraftSource, Features, Seen
from outrider.heads.engine import HeadEngine, torch_engine
from outrider.heads.features import FeatureCache, FeatureWriter
from outrider.heads.interface import DraftHead
from outrider.heads.remote import features_of, written
from outrider.heads.runner import HeadRunner
from outrider.heads.text import HeadText
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.tree import DraftTree


class HeadDrafts(DraftSource):
    """Is also shown the target's states. Its name is the head's kind, such as mtp."""

    def __init__(self, head: DraftHead, max_tokens: int = 5, engine: HeadEngine | None = None) -> None:
        """`max_tokens`: of a proposal; each is one more pass of the head. `engine`: the head's; not given: torch."""
        self.name = head.kind
        self.taps = head.taps
        self._head = head
        # What a head says at once costs no further pass.
        self._max_tokens = max(max_tokens, head.lookahead)
        self._runner = HeadRunner(head, engine or torch_engine(head))
        self._cache = FeatureCache()
        self._writers: dict[SequenceKey, FeatureWriter] = {}
        self._texts: dict[SequenceKey, HeadText] = {}
        self._counts: dict[SequenceKey, int] = {}
        self._due: dict[SequenceKey, HeadText] = {}

    def open(self, key: SequenceKey, spec: SequenceSpec, tokens: Sequence[int]) -> None:
        self._texts[key] = self._runner.open(spec, tokens)
        self._writers[key] = FeatureWriter(self._cache, spec.salt)
        self._counts[key] = min(spec.speculation.max_draft_tokens, self._max_tokens)

    @torch.inference_mode()
    def see(self, step: Sequence[Seen]) -> Sequence[tuple[SequenceKey, Features]]:
        """Some positions may have been seen before."""
        shown = [one for one in step if one.key in self._texts]
        if not shown:
            return ()
        read = torch.split(features_of(self._head.features, shown), [len(one.states) for one in shown])
        for one, features in zip(shown, read, strict=True):
            key, text = one.key, self._texts[one.key]
            known = self._cache.find(text.tokens, text.spec.salt, one.start) if one.start > text.seen else None
            if known is not None:
                self._runner.see(text, text.seen, known[text.seen :])
            self._writers[key].add(text.tokens, one.start, features)
            # Until it may have drafts nothing reads them: a view would keep the whole step's.
            self._runner.see(text, one.start, features if self._counts[key] else features.clone())
            self._fall_due(key, text)
        return ()

    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None:
        if (text := self._texts.get(key)) is not None:
            self._fall_due(key, text)

    def _fall_due(self, key: SequenceKey, text: HeadText) -> None:
        """A sequence that may have no draft is read when it may again, all at once."""
        if self._counts[key]:
            self._due[key] = text

    def limit(self, key: SequenceKey, limits: Speculation) -> None:
        if key in self._counts:
            self._counts[key] = min(limits.max_draft_tokens, self._max_tokens)

    def erase(self, tenant: str) -> int:
        """They are no texts, and known by the hash of one alone."""
        self._cache.clear()
        return 0

    def close(self, key: SequenceKey, reason: CloseReason) -> None:
        if (text := self._texts.pop(key, None)) is not None:
            self._runner.close(text)
        for held in (self._writers, self._counts, self._due):
            held.pop(key, None)

    @torch.inference_mode()
    def feature_bytes(self, states: Tensor) -> int:
        """What the features of one position would take on their way, were the head on a draft worker; `states`: of one
        position."""
        [sent] = written(0, self._head.features(states[None])[0])
        return len(sent.rows)

    @torch.inference_mode()
    def poll(self) -> Iterator[tuple[SequenceKey, DraftTree]]:
        due, self._due = self._due, {}
        self._runner.read(list(due.values()))
        self._due |= {key: text for key, text in due.items() if text.num_unread}
        ready = {key: text for key, text in due.items() if text.ready and self._counts[key]}
        trees = self._runner.draft(list(ready.values()), [self._counts[key] for key in ready])
        yield from zip(ready, trees, strict=True)
