"""Which worker a sequence goes to. Pure: candidates in, order out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.metadata import LeaseRecord
from outrider.metadata.lease import HEARTBEAT_S
from outrider.rpc.v1 import worker_pb2 as worker

# Of a worker's limit: loads that differ by less are about the same.
_ALIKE = 0.125
# How long a report is believed. What a worker had to do then may be done, and while the metadata store is away nobody
# would say so.
BELIEVED_S = 2 * HEARTBEAT_S


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


def believed_load(record: LeaseRecord) -> worker.WorkerLoad:
    """What it reported; of an old report only whether it is leaving, which no worker takes back."""
    return record.load if record.age_ms <= BELIEVED_S * 1000 else only_leaving(record.load)


def only_leaving(load: worker.WorkerLoad) -> worker.WorkerLoad:
    return worker.WorkerLoad(draining=load.draining)


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those with room, best first: longest cached prefix, then least load. Equal ones keep their order.

    Of drafts that are about as busy as the least busy one, that which drafts most for the same target: what a step
    commits then goes to one draft in one message and comes back in one, as one batch.
    """
    with_room = [c for c in candidates if not c.full]
    busy = min((c.load for c in with_room), default=0.0) + _ALIKE

    def order(c: Candidate) -> tuple[bool, int, bool, int, float]:
        return c.num_waiting > 0, -c.matched_blocks, c.load > busy, -c.num_together, c.load

    return sorted(with_room, key=order)
