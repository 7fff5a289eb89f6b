"""Which workers can work together, and which of them a sequence goes to. Pure: candidates in, order out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.protocol.identity import PROTOCOL_VERSION
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import worker_pb2 as worker

# Of a worker's limit: loads that differ by less are about the same.
_SIMILAR_LOAD = 0.125
_MUST_AGREE = ("protocol_version", "tokenizer_fingerprint", "vocab_size")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One live worker that could serve the sequence."""

    worker_id: str
    matched_blocks: int
    """Leading blocks of the prompt found in its prefix cache."""
    num_sequences: int
    """The larger of what it last reported and what this router has open there."""
    max_sequences: int
    """0 means it named no limit."""
    num_waiting: int = 0
    num_together: int = 0
    """Sequences that it drafts for the target in question."""

    @property
    def full(self) -> bool:
        return 0 < self.max_sequences <= self.num_sequences

    @property
    def load(self) -> float:
        """Share of its limit in use; the bare number where it has none."""
        return self.num_sequences / self.max_sequences if self.max_sequences else float(self.num_sequences)


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those with room, best first: longest cached prefix, then least load. Equal ones keep their order.

    Of drafts that are about as busy as the least busy one, that which drafts most for the same target: what a step
    commits then goes to one draft in one message and comes back in one, as one batch.
    """
    with_room = [c for c in candidates if not c.full]
    busy = min((c.load for c in with_room), default=0.0) + _SIMILAR_LOAD

    def order(c: Candidate) -> tuple[bool, int, bool, int, float]:
        return c.num_waiting > 0, -c.matched_blocks, c.load > busy, -c.num_together, c.load

    return sorted(with_room, key=order)


def pairing_problem(target: worker.WorkerInfo, draft: worker.WorkerInfo) -> str | None:
    """What keeps the two from working together, naming each field and both values; None when nothing does."""
    differing = [
        f"{name} is {getattr(target, name)!r} on the target and {getattr(draft, name)!r} on the draft"
        for name in _MUST_AGREE
        if getattr(target, name) != getattr(draft, name)
    ]
    if not differing:
        return None
    return f"draft {draft.worker_id} cannot serve target {target.worker_id}: {'; '.join(differing)}"


def same_weights(revision: str, other: str) -> bool:
    """Whether two model revisions are of the same weights, whatever computes them."""
    return revision.partition("/")[0] == other.partition("/")[0]


def info_problem(info: worker.WorkerInfo, role: worker.WorkerRole.ValueType, worker_id: str) -> str | None:
    """What is wrong with what a worker says of itself; None when it can be used."""
    if info.worker_id != worker_id:
        return f"worker_id: the lease says {worker_id!r}, the worker {info.worker_id!r}"
    if info.role != role:
        return f"role: expected {worker.WorkerRole.Name(role)}, got {_role_name(info.role)}"
    if info.protocol_version != PROTOCOL_VERSION:
        return f"protocol_version: this router speaks {PROTOCOL_VERSION}, the worker {info.protocol_version}"
    if info.vocab_size == 0:
        return "vocab_size: must be above 0"
    if info.max_context_len == 0:
        return "max_context_len: must be above 0"
    return None


def _role_name(role: int) -> str:
    names: dict[int, str] = {value: name for name, value in worker.WorkerRole.items()}
    return names.get(role, str(role))


def verification_mode(
    *, temperature: float, seeded: bool, draft_kind: str | None
) -> sequence.VerificationMode.ValueType:
    """The rule for a new request. It stays for the request's life, over every failover.

    Ratio accepts most but needs to know q. A draft that joins later can always give one: a guess without
    probabilities is a point mass.
    """
    if temperature == 0:
        return sequence.VERIFICATION_MODE_GREEDY
    if seeded or draft_kind == "ngram":
        return sequence.VERIFICATION_MODE_COUPLED
    return sequence.VERIFICATION_MODE_RATIO


def common_draft_limit(requested: int, target: worker.WorkerInfo, draft: worker.WorkerInfo) -> int:
    """What the request may have, lowered to what both workers can do. A worker that names 0 names no limit."""
    limits = (requested, target.max_draft_tokens, draft.max_draft_tokens)
    return min(limit for limit in limits if limit)
