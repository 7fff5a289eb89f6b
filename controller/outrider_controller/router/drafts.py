"""What a draft may say. Pure. A Draft that breaks a rule is dropped here and never reaches a target."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.rpc.v1 import sequence_pb2 as sequence

from outrider_controller.router.session import BadReply, Session

Q_TOTAL = 65536
MAX_Q_TOKENS = 64
# A draft's longest guess, 64 tokens and 32 beyond them, 16 paths of four tokens that leave it, and five tokens beside
# each, make 245.
MAX_TREE_TOKENS = 256


@dataclass(slots=True)
class DraftRules:
    """The rules for one opening of one sequence on a draft."""

    max_draft_tokens: int
    max_context_len: int
    epoch: int = 0

    def check(self, draft: sequence.Draft, session: Session) -> tuple[int, int]:
        """Where it begins and how many positions it covers.

        Raises BadReply naming the field when no correct draft would have sent it. A draft that is merely late passes:
        the target trims, drops and counts it. So does an empty one, which says "nothing this time" and saves the
        target from waiting.
        """
        token_ids, base_len, epoch = draft.token_ids[:], draft.base_len, draft.epoch
        num_tokens = len(token_ids)
        if epoch < self.epoch:
            raise BadReply(f"draft.epoch: went back from {self.epoch} to {epoch}")
        parents = draft.parents[:]
        if parents:
            num_tokens = _check_tree(parents, num_tokens, session.mode)
        if num_tokens > self.max_draft_tokens:
            raise BadReply(f"draft.token_ids: {num_tokens} where {self.max_draft_tokens} were allowed")
        if not session.prompt_len <= base_len <= self.max_context_len:
            raise BadReply(f"draft.base_len: {base_len} is outside the output")
        if token_ids and max(token_ids) >= session.vocab_size:
            raise BadReply(f"draft.token_ids: an id is outside the vocabulary of {session.vocab_size}")
        if confidence := draft.confidence[:]:
            _check_confidence(confidence, len(token_ids))
        if session.mode == sequence.VERIFICATION_MODE_RATIO:
            _check_q(draft, session)
        elif draft.q:
            raise BadReply("draft.q: given outside ratio mode")
        self.epoch = epoch
        return base_len, num_tokens


def _check_tree(parents: list[int], num_tokens: int, mode: sequence.VerificationMode.ValueType) -> int:
    """Its depth."""
    if mode == sequence.VERIFICATION_MODE_RATIO:
        raise BadReply("draft.parents: trees are not verified in ratio mode")
    if len(parents) != num_tokens:
        raise BadReply("draft.parents: not as many as token_ids")
    if any(not -1 <= parent < i for i, parent in enumerate(parents)):
        raise BadReply("draft.parents: a parent does not come before its child")
    if num_tokens > MAX_TREE_TOKENS:
        raise BadReply(f"draft.token_ids: {num_tokens} in a tree, where {MAX_TREE_TOKENS} are allowed")
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)


def _check_confidence(confidence: list[float], num_tokens: int) -> None:
    if len(confidence) != num_tokens:
        raise BadReply("draft.confidence: not as many as token_ids")
    # The sum, because NaN would slip past the others.
    if not (min(confidence) >= 0 and max(confidence) <= 1.0001 and sum(confidence) >= 0):
        raise BadReply("draft.confidence: not a probability")


def _check_q(draft: sequence.Draft, session: Session) -> None:
    if len(draft.q) != len(draft.token_ids):
        raise BadReply("draft.q: not as many as token_ids")
    if draft.token_ids and draft.sampling != session.request.sampling:
        raise BadReply("draft.sampling: differs from the sequence's")
    for q, token in zip(draft.q, draft.token_ids, strict=True):
        _check_distribution(q, token, session.vocab_size)


def _check_distribution(q: sequence.DraftDistribution, token: int, vocab_size: int) -> None:
    ids = set(q.token_ids)
    if not len(ids) == len(q.token_ids) == len(q.counts) <= MAX_Q_TOKENS:
        raise BadReply("draft.q: ids repeat, or ids and counts do not match")
    if sum(q.counts) != Q_TOTAL or min(q.counts) < 1:
        raise BadReply(f"draft.q: counts must be at least 1 and sum to {Q_TOTAL}")
    if token not in ids:
        raise BadReply("draft.q: the drafted token could not have been drawn from it")
    if max(ids) >= vocab_size:
        raise BadReply(f"draft.q: an id is outside the vocabulary of {vocab_size}")
