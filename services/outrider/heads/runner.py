"""Runs a head over many sequences at once: it reads their committed positions, and drafts beyond them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine import EngineSequence, Row
from outrider.heads.engine import HeadEngine
from outrider.heads.interface import ChainMemory, DraftHead
from outrider.heads.recorded import OTHERS, DraftedText
from outrider.heads.text import GrowingDraft, HeadText, Place
from outrider.sequence.spec import SequenceSpec
from outrider.speculation import Proposal, propose
from outrider.tree import DraftTree

# Positions of a long text that are read at once; texts with fewer unread than _SHORT are read together.
_READ_AT_ONCE, _SHORT = 512, 16


class HeadRunner:
    """Keeps nothing of the sequences but their keys and values."""

    def __init__(self, head: DraftHead, engine: HeadEngine | None) -> None:
        """engine: the head's; None for one without layers."""
        self._head = head
        self._engine = engine

    def open(self, spec: SequenceSpec, tokens: Sequence[int]) -> HeadText:
        """`tokens`: prompt and committed output. Their owner extends them."""
        if self._engine is None:
            return HeadText(spec, tokens, EngineSequence())
        # Position 0 has the feature of the first token: texts that begin with another share nothing.
        salt = spec.salt + tokens[0].to_bytes(4, "little")
        kv = self._engine.kv.open(tokens[1:], salt)
        return HeadText(spec, tokens, kv, read=kv.cached_len)

    def see(self, text: HeadText, start: int, features: Tensor) -> None:
        """Of committed positions from `start` on; some may have been seen before. After a gap the text begins anew, and
        where it is given what came before its beginning."""
        if start > text.seen or start < text.begin:
            self._begin(text, start)
        if start + len(features) > text.seen:
            text.waiting.append(features[text.seen - start :])

    def close(self, text: HeadText) -> None:
        if self._engine is not None:
            self._engine.kv.close(text.kv)

    def _begin(self, text: HeadText, start: int) -> None:
        self.close(text)
        text.begin = text.read = start
        text.waiting, text.place = [], None

    def read(self, texts: Sequence[HeadText]) -> None:
        """Brings each nearer to its last token: a short way at once, a long one by a bounded step."""
        unread = [text for text in texts if text.num_unread]
        short = [text for text in unread if text.num_unread < _SHORT]
        for together in ([short] if short else []) + [[text] for text in unread if text.num_unread >= _SHORT]:
            self._read(self._with_room(together))

    def _with_room(self, texts: Sequence[HeadText]) -> list[HeadText]:
        """One for which the pool has no room forgets what it has read, and goes on from its next position."""
        admitted, free = [], self._num_free
        for text in texts:
            needed = self._blocks(text, min(text.num_unread, _READ_AT_ONCE))
            if needed <= free:
                free -= needed
                admitted.append(text)
            else:
                self._begin(text, text.seen)
                free = self._num_free - sum(self._blocks(each, each.num_unread) for each in admitted)
        return admitted

    @property
    def _num_free(self) -> int:
        return 0 if self._engine is None else self._engine.kv.num_free_blocks

    def _blocks(self, text: HeadText, count: int) -> int:
        return 0 if self._engine is None else self._engine.kv.blocks_needed(text.kv, count)

    def _read(self, texts: Sequence[HeadText]) -> None:
        if not texts:
            return
        ids, features, left = [], [], []
        for text in texts:
            count = min(text.num_unread, _READ_AT_ONCE)
            unread = torch.cat(text.waiting)
            ids.append(text.tokens[text.read + 1 : text.read + 1 + count])
            features.append(unread[:count])
            left.append([unread[count:]] if count < len(unread) else [])
        # Changed once all is read: after a fault each is read again, alone.
        for text, tokens, waiting, place in zip(texts, ids, left, self._forward(texts, ids, features), strict=True):
            text.place, text.waiting = place, waiting
            text.read += len(tokens)
            if self._engine is not None and not text.begin:
                self._engine.kv.publish(text.kv, text.read)
                # Nobody asks which prefixes a head has.
                self._engine.kv.take_prefix_changes()

    def draft(self, texts: Sequence[HeadText], counts: Sequence[int], leasts: Sequence[float] = ()) -> list[DraftTree]:
        """A proposal for each text, which is ready, of at most so many tokens. `leasts`: as GrowingDraft.of has it."""
        drafts = [GrowingDraft.of(*one) for one in zip(texts, leasts or [0.0] * len(texts), strict=True)]
        counts = self._affordable(texts, counts)
        try:
            if not self._draft_at_once(texts, drafts, counts):
                for number in range(max(counts, default=0)):
                    pairs = zip(texts, drafts, counts, strict=True)
                    self._grow([(t, draft) for t, draft, count in pairs if number < count and self._may_grow(draft)])
        finally:
            for text in texts:
                self._forget_draft(text)
        return [draft.tree(self._head.kind) for draft in drafts]

    def _draft_at_once(self, texts: Sequence[HeadText], drafts: Sequence[GrowingDraft], counts: Sequence[int]) -> bool:
        """On a GPU, which goes on after a draft has ended. Returns whether that could be."""
        if not texts:
            return False
        if self._engine is not None:
            found = self._engine.draft(
                [_drafted(text, draft) for text, draft in zip(texts, drafts, strict=True)],
                max(counts),
            )
        else:
            ahead = not self._head.recurrent and drafts[0].place.logits.is_cuda
            found = self._ahead(texts, drafts) if ahead else None
        if found is None:
            return False
        for draft, count, proposals in zip(drafts, counts, found, strict=True):
            for proposal in proposals[:count]:
                if self._may_grow(draft):
                    draft.add(proposal)
        return True

    def _ahead(self, texts: Sequence[HeadText], drafts: Sequence[GrowingDraft]) -> list[list[Proposal]]:
        """All that a head tells from where it is."""
        rows = [draft.place.logits for draft in drafts]
        of = [
            (text, draft, number) for text, draft in zip(texts, drafts, strict=True) for number in range(len(rows[0]))
        ]
        found = self._proposals(torch.cat(rows), [(text, draft.base_len + number) for text, draft, number in of])
        return [found[at : at + len(rows[0])] for at in range(0, len(found), len(rows[0]))]

    def _proposals(self, logits: Tensor, of: Sequence[tuple[HeadText, int]]) -> list[Proposal]:
        """of: each row's text, and the position of its token."""
        return propose(
            logits.float(),
            [text.spec.params for text, _ in of],
            [text.spec.mode for text, _ in of],
            [position for _, position in of],
            token_map=self._head.token_map,
            num_others=OTHERS,
        )

    def _affordable(self, texts: Sequence[HeadText], counts: Sequence[int]) -> list[int]:
        """A text for which the pool has no room drafts one token, which is not run. None is run beyond the context,
        where the tables of positions end."""
        found, free = [], self._num_free
        for text, count in zip(texts, counts, strict=True):
            if self._engine is not None:
                count = min(count, 1 + self._engine.info.max_context_len - text.kv.cached_len)
            needed = self._blocks(text, count - 1)
            found.append(count if needed <= free else 1)
            free -= needed if needed <= free else 0
        return found

    def _forget_draft(self, text: HeadText) -> None:
        """What the head read of its own draft is no part of the text."""
        if self._engine is not None:
            self._engine.kv.rewind(text.kv, text.read - text.begin)

    def _grow(self, growing: Sequence[tuple[HeadText, GrowingDraft]]) -> None:
        """One token more for each draft."""
        if not growing:
            return
        if self._head.recurrent and (further := [(text, draft) for text, draft in growing if draft.chain]):
            self._follow(further)
        at = (0 if self._head.recurrent else len(draft.chain) for _, draft in growing)
        rows = torch.stack([draft.place.logits[row] for row, (_, draft) in zip(at, growing, strict=True)])
        proposals = self._proposals(rows, [(text, draft.base_len + len(draft.chain)) for text, draft in growing])
        for (_, draft), proposal in zip(growing, proposals, strict=True):
            draft.add(proposal)

    def _may_grow(self, draft: GrowingDraft) -> bool:
        return not draft.ended and (self._head.recurrent or len(draft.chain) < self._head.lookahead)

    def _follow(self, growing: Sequence[tuple[HeadText, GrowingDraft]]) -> None:
        """Reads the last token of each draft, with the head's own state in the place of the target's."""
        texts, drafts = zip(*growing, strict=True)
        ids, features = [draft.chain[-1:] for draft in drafts], [draft.place.feature for draft in drafts]
        for draft, place in zip(drafts, self._forward(texts, ids, features), strict=True):
            draft.place = place

    def _forward(
        self, texts: Sequence[HeadText], ids: Sequence[Sequence[int]], features: Sequence[Tensor]
    ) -> list[Place]:
        """Reads tokens, each after the position of its feature. Returns where each text is after its last token."""
        if self._engine is None:
            return self._at_last_tokens([each[-1] for each in ids], torch.stack([each[-1:] for each in features]))
        rows = [Row(text.kv, tokens, 1, num_tapped=1) for text, tokens in zip(texts, ids, strict=True)]
        logits, following = self._engine.forward_head(rows, torch.cat(list(features)))
        return [Place(following[row : row + 1], logits[row : row + 1]) for row in range(len(rows))]

    def _at_last_tokens(self, ids: Sequence[int], features: Tensor) -> list[Place]:
        """Of a head without layers, for which nothing before matters. features [texts, 1, width]"""
        tokens = torch.tensor(ids, device=features.device)[:, None]
        out, hidden = self._head.forward(tokens, features, torch.zeros_like(tokens), ChainMemory())
        logits = self._head.logits(hidden)[None] if self._head.recurrent else self._head.logits(hidden)
        return [Place(out[row], logits[:, row, -1]) for row in range(len(ids))]


def _drafted(text: HeadText, draft: GrowingDraft) -> DraftedText:
    spec, place = text.spec, draft.place
    return DraftedText(
        text.kv, spec.params, spec.mode, draft.base_len, place.logits, place.feature, text.tokens[draft.base_len - 1]
    )
