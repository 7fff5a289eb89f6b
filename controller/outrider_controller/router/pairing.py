"""Which workers can work together, and what differs when they cannot. Pure."""

from __future__ import annotations

from outrider.protocol.identity import PROTOCOL_VERSION
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import worker_pb2 as worker

_MUST_AGREE = ("protocol_version", "tokenizer_fingerprint", "vocab_size")


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
