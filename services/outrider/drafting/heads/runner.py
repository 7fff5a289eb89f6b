"""Runs a head over many sequences at once: it reads their committed positions, and drafts beyond them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.drafting.heads.interface import ChainMemory, DraftHead
from outrider.drafting.heads.text import GrowingDraft, HeadText
from outrider.drafting.tree import DraftTree
from outrider.speculation import propose

_OTHERS = 2
# Positions of a long text that are read at once; texts with fewer unread than _SHORT are read together.
_READ_AT_ONCE, _SHORT = 512, 16


@dataclass(slots=True)
class BatchMemory:
    """Sequences side by side. Their tokens are padded at the end, where no token before attends to them."""

    memories: Sequence[ChainMemory]
    counts: Sequence[int]
    """Tokens of each that are no padding: only these are remembered."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        known = [int(m.keys[layer].shape[2]) if layer in m.keys else 0 for m in self.memories]
        keys = self._joined(layer, key, [memory.keys for memory in self.memories], known)
        values = self._joined(layer, value, [memory.values for memory in self.memories], known)
        tokens, longest = query.shape[2], max(known) + query.shape[2]
        at = torch.arange(longest, device=query.device)
        last = torch.tensor(known, device=query.device)[:, None] + torch.arange(tokens, device=query.device)
        mask = (at <= last[:, :, None])[:, None]
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)

    def _joined(self, layer: int, fresh: Tensor, kept: Sequence[dict[int, Tensor]], known: Sequence[int]) -> Tensor:
        """Each sequence's own and then its fresh ones, [batch, kv heads, longest, head_dim]."""
        found = []
        for row, (own, before, count) in enumerate(zip(kept, known, self.counts, strict=True)):
            joined = torch.cat([own[layer], fresh[row : row + 1]], 2) if before else fresh[row : row + 1]
            own[layer] = joined[:, :, : before + count]
            found.append(joined[0].transpose(0, 1))
        return pad_sequence(found, batch_first=True).transpose(1, 2)


class HeadRunner:
    """Keeps nothing of the sequences, which their owner holds."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head

    def read(self, texts: Sequence[HeadText]) -> None:
        """Brings each nearer to its last token: a short way at once, a long one by a bounded step."""
        unread = [text for text in texts if text.num_unread]
        short = [text for text in unread if text.num_unread < _SHORT]
        for together in ([short] if short else []) + [[text] for text in unread if text.num_unread >= _SHORT]:
            self._read(together)

    def _read(self, texts: Sequence[HeadText]) -> None:
        ids, features = [], []
        for text in texts:
            count = min(text.num_unread, _READ_AT_ONCE)
            waiting = torch.cat(text.waiting)
            ids.append(text.tokens[text.read + 1 : text.read + 1 + count])
            features.append(waiting[:count])
            text.waiting = [waiting[count:]] if count < len(waiting) else []
        found = self._forward(texts, ids, features, [text.read for text in texts])
        for text, tokens, (feature, hidden) in zip(texts, ids, found, strict=True):
            text.feature, text.hidden = feature, hidden
            text.read += len(tokens)

    def draft(self, texts: Sequence[HeadText], counts: Sequence[int]) -> list[DraftTree]:
        """A proposal for each text, which is ready, of at most so many tokens."""
        drafts = [GrowingDraft.of(text) for text in texts]
        try:
            for number in range(max(counts, default=0)):
                pairs = zip(texts, drafts, counts, strict=True)
                self._grow([(t, draft) for t, draft, count in pairs if number < count and self._may_grow(draft)])
        finally:
            for text in texts:
                text.forget_draft()
        return [draft.tree(self._head.kind) for draft in drafts]

    def _grow(self, growing: Sequence[tuple[HeadText, GrowingDraft]]) -> None:
        """One token more for each draft."""
        if not growing:
            return
        if self._head.recurrent and (further := [(text, draft) for text, draft in growing if draft.chain]):
            self._follow(further)
        logits = self._head.logits(torch.stack([draft.hidden for _, draft in growing]))
        if self._head.recurrent:
            rows = logits[:, -1]
        else:
            rows = torch.stack([logits[len(draft.chain), row, -1] for row, (_, draft) in enumerate(growing)])
        token_map = self._head.token_map
        proposals = propose(
            rows.float(),
            [text.opening.params for text, _ in growing],
            [text.opening.mode for text, _ in growing],
            [draft.base_len + len(draft.chain) for _, draft in growing],
            token_map=None if token_map is None else token_map.to(rows.device),
            num_others=_OTHERS,
        )
        for (_, draft), proposal in zip(growing, proposals, strict=True):
            draft.add(proposal)

    def _may_grow(self, draft: GrowingDraft) -> bool:
        return not draft.ended and (self._head.recurrent or len(draft.chain) < self._head.lookahead)

    def _follow(self, growing: Sequence[tuple[HeadText, GrowingDraft]]) -> None:
        """Reads the last token of each draft, with the head's own state in the place of the target's."""
        texts, drafts = zip(*growing, strict=True)
        starts = [text.read + len(draft.chain) - 1 for text, draft in growing]
        ids = [draft.chain[-1:] for draft in drafts]
        found = self._forward(texts, ids, [draft.feature for draft in drafts], starts)
        for draft, (feature, hidden) in zip(drafts, found, strict=True):
            draft.feature, draft.hidden = feature, hidden

    def _forward(
        self,
        texts: Sequence[HeadText],
        ids: Sequence[Sequence[int]],
        features: Sequence[Tensor],
        starts: Sequence[int],
    ) -> list[tuple[Tensor, Tensor]]:
        """Reads tokens, each after the position of its feature, of which the first is in `starts`. Returns for each
        text the feature of the next step, and the inputs of the logits, after its last token."""
        counts, device = [len(each) for each in ids], features[0].device
        padded = pad_sequence([torch.tensor(each, device=device) for each in ids], batch_first=True)
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(padded.shape[1], device=device)
        memory = BatchMemory([text.memory for text in texts], counts)
        out, hidden = self._head.forward(padded, pad_sequence(list(features), batch_first=True), positions, memory)
        return [(out[row, n - 1 : n], hidden[row, n - 1 : n]) for row, n in enumerate(counts)]
