"""The one place where a draft worker's message becomes a DraftTree, or is refused. Raises InvalidRequest.

A draft that is merely late, repeated or empty passes: the buffer trims, drops and counts it.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import InvalidRequest
from outrider.limits import MAX_DRAFT_BYTES, MAX_SOURCE_BYTES, MAX_TREE_TOKENS, check_token_ids
from outrider.options.sampling import VerificationMode
from outrider.protocol.convert import distributions_from_proto, sampling_to_proto
from outrider.rpc.v1 import sequence_pb2
from outrider.sequence.spec import SequenceSpec
from outrider.tree import DraftTree


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    size: int
    max_context_len: int


@dataclass(slots=True)
class DraftValidator:
    """For one opening of one sequence at a draft. No draft may begin inside the prompt."""

    spec: SequenceSpec
    vocabulary: DraftVocabulary
    max_positions: int
    """Positions that one message may cover."""
    epoch: int = 0
    """The highest epoch received."""

    def allow(self, max_positions: int) -> None:
        """The draft was sent another limit. Messages made under the previous one may still come."""
        self.max_positions = max(self.max_positions, max_positions)

    def tree(self, draft: sequence_pb2.Draft) -> DraftTree:
        """The tree of a message. Raises if no correct draft worker would have sent it."""
        self._check_size(draft)
        self._check_place(draft)
        self._check_mode(draft)
        check_token_ids("token_ids", draft.token_ids[:], self.vocabulary.size)
        tree = DraftTree(
            draft.base_len,
            token_ids=tuple(draft.token_ids),
            parents=tuple(draft.parents),
            chances=tuple(draft.confidence),
            q=tuple(distributions_from_proto(draft.q)),
            source=draft.source,
            matched=draft.matched,
            epoch=draft.epoch,
            serial=draft.serial,
            seconds=draft.share_us * 1e-6,
        )
        if tree.depth > self.max_positions:
            raise InvalidRequest("token_ids", f"{tree.depth} where {self.max_positions} were allowed")
        for q in tree.q:
            check_token_ids("q", q.token_ids, self.vocabulary.size)
        self.epoch = draft.epoch
        return tree

    def _check_size(self, draft: sequence_pb2.Draft) -> None:
        if len(draft.source.encode()) > MAX_SOURCE_BYTES:
            raise InvalidRequest("source", f"must be at most {MAX_SOURCE_BYTES} bytes")
        if (size := draft.ByteSize()) > MAX_DRAFT_BYTES:
            raise InvalidRequest("draft", f"{size} bytes, must be at most {MAX_DRAFT_BYTES}")
        # Of a tree, how deep it is is known once it is made.
        most, count = MAX_TREE_TOKENS if draft.parents else self.max_positions, len(draft.token_ids)
        if count > most:
            raise InvalidRequest("token_ids", f"{count} where {most} were allowed")

    def _check_place(self, draft: sequence_pb2.Draft) -> None:
        if draft.epoch < self.epoch:
            raise InvalidRequest("epoch", f"went back from {self.epoch} to {draft.epoch}")
        if draft.base_len > self.vocabulary.max_context_len:
            raise InvalidRequest("base_len", f"must be at most {self.vocabulary.max_context_len}, got {draft.base_len}")
        if draft.base_len < len(self.spec.prompt):
            raise InvalidRequest("base_len", f"{draft.base_len} is inside the prompt")

    def _check_mode(self, draft: sequence_pb2.Draft) -> None:
        if self.spec.mode is not VerificationMode.RATIO:
            if draft.q:
                raise InvalidRequest("q", "given outside ratio mode")
            return
        if draft.token_ids and not draft.q:
            raise InvalidRequest("q", f"must be one per token, got 0 for {len(draft.token_ids)}")
        if draft.token_ids and draft.sampling != sampling_to_proto(self.spec.params):
            raise InvalidRequest("sampling", "q was computed under a sampling that is not the sequence's")
