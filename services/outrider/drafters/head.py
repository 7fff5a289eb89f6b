"""A draft head on a draft worker. The target sends what the head reads of its hidden states, with each commit.

Features do not come for positions before the draft was opened, nor for the beginning of a long prefix that the target
has cached. Of a prefix that it has read for another sequence the head still has keys and values; without them it drafts
worse. A gap among the features that came ends the draft of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from outrider.drafters.interface import Drafter
from outrider.drafters.sequence import CommitMismatch, DraftSequence
from outrider.drafting.source import Features
from outrider.engine import CheckpointError, EngineConfig, ModelInfo
from outrider.engine.loading.loader import stated_context
from outrider.errors import InvalidRequest
from outrider.heads.engine import HeadEngine, head_engine, torch_engine
from outrider.heads.interface import DraftHead, HeadError
from outrider.heads.loading import load_head_of
from outrider.heads.remote import read
from outrider.heads.runner import HeadRunner
from outrider.heads.text import HeadText
from outrider.limits import MAX_TREE_TOKENS, check_token_ids
from outrider.tree import DraftTree


class HeadDrafter(Drafter):
    """All sequences are read and drafted together, whichever target they come from."""

    def __init__(
        self,
        head: DraftHead,
        vocab_size: int,
        max_context_len: int,
        state_width: int,
        device: str,
        engine: HeadEngine | None = None,
    ) -> None:
        """`state_width`: of the target's hidden states. `engine`: the head's; not given: torch."""
        self.info = ModelInfo(vocab_size, max_context_len, device=device)
        states = torch.zeros(1, 1, state_width * max(1, len(head.taps)), device=device)
        with torch.inference_mode():
            found = head.features(states)
        self._width, self._dtype, self._device = found.shape[-1], found.dtype, device
        self._kind = head.kind
        self._runner = HeadRunner(head, engine or torch_engine(head))
        self._texts: dict[DraftSequence, HeadText] = {}

    @classmethod
    def load(cls, head: Path, model: Path, config: EngineConfig) -> HeadDrafter:
        """`model`: the head's target, which another engine may run: of it embedding and vocabulary head are read.

        Raises CheckpointError."""
        try:
            loaded, parts = load_head_of(model, head, config.device)
        except HeadError as error:
            raise CheckpointError("head", str(error)) from None
        context = stated_context(model)
        engine = head_engine(loaded, config, context)
        return cls(loaded, len(parts.embedding), context, parts.width, config.device, engine)

    def on_open(self, sequence: DraftSequence) -> None:
        check_token_ids("prompt_token_ids", sequence.tokens, self.info.vocab_size)
        self._texts[sequence] = self._runner.open(sequence.spec, sequence.tokens)

    @torch.inference_mode()
    def see(self, sequence: DraftSequence, features: Features) -> bool:
        text = self._texts[sequence]
        try:
            rows = read(features, self._width)
        except ValueError as error:
            raise InvalidRequest("features", str(error)) from None
        if features.start > text.seen and text.has_seen:
            raise CommitMismatch(f"features from {features.start} on, but {text.seen} is the next position")
        self._runner.see(text, features.start, rows.to(self._device, self._dtype))
        return text.seen == len(sequence.tokens) - 1

    def on_commit(self, sequence: DraftSequence, known_len: int) -> None:
        # Its embedding is the target's, so it has all ids of the target, and reads no others.
        check_token_ids("token_ids", sequence.tokens[known_len:], self.info.vocab_size)
        if (count := len(sequence.tokens)) > self.info.max_context_len:
            raise InvalidRequest(
                "base_len", f"{count} tokens with the commit, in a context of {self.info.max_context_len}"
            )
        text = self._texts[sequence]
        # Features come ahead of the tokens after them.
        most = MAX_TREE_TOKENS if len(sequence.tokens) == known_len else -1
        if text.seen > len(sequence.tokens) + most:
            raise CommitMismatch(f"features of {text.seen} positions, but {len(sequence.tokens)} tokens are held")

    def release(self, sequence: DraftSequence) -> None:
        """Keeps the head's memory: the features that made it do not come again."""

    def on_close(self, sequence: DraftSequence) -> None:
        self._runner.close(self._texts.pop(sequence))

    @torch.inference_mode()
    def propose(self, sequences: Sequence[DraftSequence]) -> list[DraftTree | None]:
        """Empty for a sequence whose features have not come."""
        self._runner.read([self._texts[sequence] for sequence in sequences])
        ready = [s for s in sequences if self._texts[s].ready and s.room]
        texts, rooms = [self._texts[s] for s in ready], [s.room for s in ready]
        trees = self._runner.draft(texts, rooms, [s.limits.min_chance for s in ready])
        found: dict[DraftSequence, DraftTree | None] = dict(zip(ready, trees, strict=True))
        found |= {s: None for s in sequences if self._texts[s].num_unread}
        return [found.get(s, DraftTree(s.committed_len, source=self._kind)) for s in sequences]
