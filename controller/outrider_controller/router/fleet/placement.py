"""Which workers can work together, and which of them a sequence goes to. Pure: candidates in, order out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.limits import MAX_DRAFT_TOKENS
from outrider.metadata.keys import role_name
from outrider.metadata.workers.lease_check import worker_problem
from outrider.protocol.identity import protocol_problem
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.tuning import BUSY

MAX_ASKED = 8
"""Most workers whose prefix caches are looked up for one prompt."""


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """One live worker that could serve the sequence."""

    worker_id: str
    num_sequences: int
    """The larger of its last report and of this router's open sequences there."""
    max_sequences: int
    """0: no limit."""
    uncached_tokens: int = 0
    """Prompt tokens that are not in its prefix cache."""
    prefill_token_ns: int = 0
    """Time that a prompt token adds to its step; 0 is unknown."""
    row_ns: int = 0
    """The same of a sequence's row."""
    num_waiting: int = 0
    """Those of `num_sequences` that wait on the worker."""
    num_together: int = 0
    """Sequences that it already drafts for the same target."""

    @property
    def full(self) -> bool:
        return 0 < self.max_sequences <= self.num_sequences

    def cost_us(self, usual_row_ns: int, expected_tokens: int) -> float:
        """Time that the sequence would take there, in µs: prefill, and the rows of the running sequences in its steps.

        An unknown row takes `usual_row_ns`, and an unknown prompt token as long as a row.

        A cached prefix counts as the time that it saves, so it outweighs some load and no more. Sequences that wait get
        their places first. With any number running, one ends in the time that the rows of one answer take; so a waiting
        sequence costs twice as much as a running one.
        """
        row_ns = self.row_ns or usual_row_ns
        rows_us = (self.num_sequences + self.num_waiting) * row_ns * expected_tokens / 1e3
        return rows_us + self.uncached_tokens * (self.prefill_token_ns or row_ns) / 1e3


def rank(candidates: Sequence[PlacementCandidate], expected_tokens: int) -> list[PlacementCandidate]:
    """Candidates with room, by cost. Equal ones keep their order. `expected_tokens`: of the answer.

    Among drafts that cost about as little as the cheapest, the one that drafts most for the same target is first: the
    commits of a step then go to one draft in one message, and its proposals return in one, as one batch.
    """
    with_room = [c for c in candidates if not c.full]
    measured = [c.row_ns for c in with_room if c.row_ns]
    # Without any, costs are counts of rows and tokens: they are only compared.
    usual_row_ns = sum(measured) // len(measured) if measured else 1
    costs = {c.worker_id: c.cost_us(usual_row_ns, expected_tokens) for c in with_room}
    least = min(costs.values(), default=0.0)

    def order(c: PlacementCandidate) -> tuple[bool, int, float]:
        row_us = (c.row_ns or usual_row_ns) * expected_tokens / 1e3
        similar = costs[c.worker_id] <= least + (1 - BUSY) * c.max_sequences * row_us
        return not similar, -c.num_together, costs[c.worker_id]

    return sorted(with_room, key=order)


def asked(first_block: bytes, candidates: Sequence[PlacementCandidate], expected_tokens: int) -> list[str]:
    """The workers whose prefix caches are looked up: all of them, but at most `MAX_ASKED`.

    Half are chosen by the hash of the first block, so that prompts with the same beginning reach the same workers; the
    others by their load.
    """
    if len(candidates) <= MAX_ASKED:
        return [c.worker_id for c in candidates]

    def weight(worker_id: str) -> bytes:
        return hashlib.blake2b(worker_id.encode(), key=first_block, digest_size=8).digest()

    chosen = sorted((c.worker_id for c in candidates), key=weight)[: MAX_ASKED // 2]
    by_load = [c.worker_id for c in rank(candidates, expected_tokens) if c.worker_id not in chosen]
    return chosen + by_load[: MAX_ASKED - len(chosen)]


def same_weights(revision: str, other: str) -> bool:
    """Whether two model revisions have the same weights, in any arithmetic."""
    return revision.partition("/")[0] == other.partition("/")[0]


def info_problem(
    info: worker.WorkerInfo, load: worker.WorkerLoad, role: worker.WorkerRole.ValueType, worker_id: str
) -> str | None:
    """What is wrong with a worker's information about itself; None when it can be used."""
    if info.worker_id != worker_id:
        return f"worker_id: the lease says {worker_id!r}, the worker {info.worker_id!r}"
    if info.role != role:
        return f"role: is not that of a {role_name(role)}"
    if problem := protocol_problem(info) or worker_problem(info, load):
        return problem
    if info.vocab_size == 0:
        return "vocab_size: must be above 0"
    if info.max_context_len == 0:
        return "max_context_len: must be above 0"
    return None


def common_draft_limit(target: worker.WorkerInfo, draft: worker.WorkerInfo) -> int:
    """Most drafted tokens per step that both workers support. 0 from a worker means no limit."""
    limits = (MAX_DRAFT_TOKENS, target.max_draft_tokens, draft.max_draft_tokens)
    return min(limit for limit in limits if limit)
