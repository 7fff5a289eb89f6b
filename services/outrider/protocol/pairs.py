"""Which targets and drafts can work together, and why not. Pure: what the workers say of themselves in, reasons out."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.protocol.identity import ProtocolRange
from outrider.rpc.v1 import worker_pb2


def compatibility_problem(target: worker_pb2.WorkerInfo, draft: worker_pb2.WorkerInfo) -> str | None:
    """Why the two cannot work together, with each field and both values; None when they can."""
    differing = []
    if target.tokenizer_fingerprint != draft.tokenizer_fingerprint:
        # With equal tokenizers the sizes may differ: rows of a model's head beyond its tokens are padding.
        names = ("tokenizer_fingerprint", "vocab_size")
        differing += [_differs(name, target, draft) for name in names if getattr(target, name) != getattr(draft, name)]
    if draft.features and target.features != draft.features:
        differing.append(_differs("features", target, draft))
    versions = ProtocolRange.of(target), ProtocolRange.of(draft)
    if versions[0].common(versions[1]) is None:
        differing.append(f"protocol_version is {versions[0]} on the target and {versions[1]} on the draft")
    if not differing:
        return None
    return f"draft {draft.worker_id} cannot serve target {target.worker_id}: {'; '.join(differing)}"


def unpaired(workers: Iterable[worker_pb2.WorkerInfo]) -> dict[str, str]:
    """Drafts that no target here can use, by worker id, with the reason at one of the targets."""
    listed = list(workers)
    targets = [info for info in listed if info.role == worker_pb2.WORKER_ROLE_TARGET]
    found = {}
    for draft in listed:
        if draft.role == worker_pb2.WORKER_ROLE_DRAFT and (reason := _why_none(targets, draft)):
            found[draft.worker_id] = reason
    return found


def _why_none(targets: Iterable[worker_pb2.WorkerInfo], draft: worker_pb2.WorkerInfo) -> str | None:
    first = None
    for target in targets:
        if (problem := compatibility_problem(target, draft)) is None:
            return None
        first = first or problem
    return first


def _differs(name: str, target: worker_pb2.WorkerInfo, draft: worker_pb2.WorkerInfo) -> str:
    return f"{name} is {getattr(target, name)!r} on the target and {getattr(draft, name)!r} on the draft"
