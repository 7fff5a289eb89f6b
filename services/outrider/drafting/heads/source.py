"""Drafts of a head in the target's own process: it reads the states of each step, and proposes before the next one.

Torch code for one sequence at a time. A head keeps keys and values of its own beside the target's. At positions whose
keys came from the prefix cache it reads the states of the sequence that ran them. Where these are forgotten, it drafts
without: that costs acceptance, never a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.drafting.heads.features import FeatureCache, FeatureWriter
from outrider.drafting.heads.interface import ChainMemory, DraftHead
from outrider.drafting.source import CloseReason, DraftAssignment, DraftLimits, Opening
from outrider.drafting.tree import ROOT, DraftTree
from outrider.options.sampling import DraftDistribution
from outrider.protocol.sequence_key import SequenceKey
from outrider.speculation import Proposal, propose

# A proposal ends where the chance that all of it is right falls below this; an alternative needs as much.
_MIN_JOINT, _MIN_CHANCE = 0.25, 0.1
_OTHERS = 2
# Positions that a head reads between two steps of the target: a long prompt takes several.
_READ_AT_ONCE = 512


@dataclass(slots=True)
class _Text:
    """One sequence. The head has read the positions up to `read`; the states of `waiting` come after them."""

    opening: Opening
    tokens: list[int]
    count: int
    memory: ChainMemory = field(default_factory=ChainMemory)
    read: int = 0
    waiting: list[Tensor] = field(default_factory=list)
    feature: Tensor | None = None
    """What a draft goes on from: the head's output at the last position it read."""
    hidden: Tensor | None = None

    @property
    def seen(self) -> int:
        return self.read + sum(len(states) for states in self.waiting)

    def see(self, start: int, states: Tensor) -> None:
        if start > self.seen:
            self.memory, self.read, self.waiting = ChainMemory(), start, [states]
        elif start + len(states) > self.seen:
            self.waiting.append(states[self.seen - start :])


class HeadDrafts:
    """A DraftSource that is also shown the target's states. Its name is the head's kind: eagle3, medusa or mtp."""

    def __init__(self, head: DraftHead) -> None:
        self.name = head.kind
        self.taps = head.taps
        self._head = head
        self._cache = FeatureCache()
        self._writers: dict[SequenceKey, FeatureWriter] = {}
        self._texts: dict[SequenceKey, _Text] = {}
        self._due: dict[SequenceKey, _Text] = {}

    def open(self, key: SequenceKey, opening: Opening, assignment: DraftAssignment | None = None) -> None:
        tokens = [*opening.prompt, *opening.committed]
        self._texts[key] = _Text(opening, tokens, opening.limits.max_draft_tokens)
        self._writers[key] = FeatureWriter(self._cache, opening.salt)

    def see(self, key: SequenceKey, start: int, states: Tensor) -> None:
        """states [positions, taps · width] of committed positions from `start` on; some may have been seen before."""
        if (text := self._texts.get(key)) is not None:
            known = self._cache.find(text.tokens, text.opening.salt, start) if start > text.seen else None
            if known is not None:
                text.see(text.seen, known[text.seen :])
            self._writers[key].add(text.tokens, start, states)
            text.see(start, states)
            self._due[key] = text

    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None:
        if (text := self._texts.get(key)) is not None:
            text.tokens.extend(tokens)
            self._due[key] = text

    def limit(self, key: SequenceKey, limits: DraftLimits) -> None:
        if (text := self._texts.get(key)) is not None:
            text.count = limits.max_draft_tokens

    def close(self, key: SequenceKey, reason: CloseReason) -> None:
        for held in (self._texts, self._writers, self._due):
            held.pop(key, None)

    @torch.inference_mode()
    def poll(self) -> Iterator[tuple[SequenceKey, DraftTree]]:
        due, self._due = self._due, {}
        found = []
        for key, text in due.items():
            if not self._read(text):
                self._due[key] = text
            elif text.count and text.hidden is not None and text.read == len(text.tokens) - 1:
                found.append((key, self._draft(text)))
        yield from found

    def _read(self, text: _Text) -> bool:
        """Runs the head over committed positions whose next token is known; returns whether over all of them."""
        count = min(text.seen, len(text.tokens) - 1) - text.read
        if count <= 0:
            return True
        part = min(count, _READ_AT_ONCE)
        states = torch.cat(text.waiting)
        ids = text.tokens[text.read + 1 : text.read + 1 + part]
        text.waiting = [states[part:]] if part < len(states) else []
        features, hidden = self._run(text, ids, self._head.features(states[None, :part]))
        text.feature, text.hidden = features[:, -1:], hidden[:, -1:]
        text.read += part
        return part == count

    def _run(self, text: _Text, ids: Sequence[int], features: Tensor, ahead: int = 0) -> tuple[Tensor, Tensor]:
        device, start = features.device, text.read + ahead
        positions = torch.arange(start, start + len(ids), device=device)[None]
        return self._head.forward(torch.tensor([list(ids)], device=device), features, positions, text.memory)

    def _draft(self, text: _Text) -> DraftTree:
        known = text.memory.length
        growing = _Growing(text)
        for proposal in self._proposals(text):
            if not growing.add(proposal):
                break
        text.memory.cut(known)
        return growing.tree(self.name)

    def _proposals(self, text: _Text) -> Iterator[Proposal]:
        """Token by token; each is asked for when the one before was taken."""
        assert text.feature is not None and text.hidden is not None
        feature, logits = text.feature, self._head.logits(text.hidden)
        most = text.count if self._head.recurrent else min(text.count, self._head.lookahead)
        for ahead in range(most):
            row = logits[0, -1] if self._head.recurrent else logits[ahead, 0, -1]
            proposal = self._choose(text, row, len(text.tokens) + ahead)
            yield proposal
            if self._head.recurrent and ahead + 1 < most:
                feature, hidden = self._run(text, [proposal.token_id], feature, ahead)
                logits = self._head.logits(hidden)

    def _choose(self, text: _Text, logits: Tensor, position: int) -> Proposal:
        opening, token_map = text.opening, self._head.token_map
        [chosen] = propose(
            logits[None].float(),
            [opening.params],
            [opening.mode],
            [position],
            token_map=None if token_map is None else token_map.to(logits.device),
            num_others=_OTHERS,
        )
        return chosen


class _Growing:
    """A tree as it is drafted: a chain, with alternatives beside its tokens."""

    def __init__(self, text: _Text) -> None:
        self._text = text
        self._ids: list[int] = []
        self._parents: list[int] = []
        self._chances: list[float] = []
        self._q: list[DraftDistribution] = []
        self._last, self._joint = ROOT, 1.0

    def add(self, proposal: Proposal) -> bool:
        """Returns whether a token after it is worth drafting."""
        self._put(proposal.token_id, proposal.confidence)
        last = len(self._ids) - 1
        if proposal.q is not None:
            self._q.append(proposal.q)
        for token_id, chance in proposal.others:
            if self._joint * chance >= _MIN_CHANCE:
                self._put(token_id, chance)
        self._last, self._joint = last, self._joint * proposal.confidence
        return self._joint >= _MIN_JOINT and proposal.token_id not in self._text.opening.stop_token_ids

    def _put(self, token_id: int, chance: float) -> None:
        self._ids.append(token_id)
        self._parents.append(self._last)
        self._chances.append(chance)

    def tree(self, source: str) -> DraftTree:
        chain = self._parents == list(range(-1, len(self._ids) - 1))
        return DraftTree(
            len(self._text.tokens),
            tuple(self._ids),
            parents=() if chain else tuple(self._parents),
            chances=tuple(self._chances),
            q=tuple(self._q),
            source=source,
        )
