"""Sums of this router's requests, by tenant and by worker. Computed when a request ends and when the sums are read: a
round costs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from outrider.protocol.rounds import RequestStats
from outrider.rpc.v1 import trace_pb2 as trace

# Beyond that the name that ended nothing for longest is dropped; a process that runs for months sees many workers.
_MAX_NAMES = 4096

Name = tuple[str, str]
"""A tenant and "", or "" and a worker's id."""


@dataclass(frozen=True, slots=True)
class Work:
    tenant: str
    workers: tuple[str, ...]
    """Its present workers, or its last ones."""
    output_tokens: int
    stats: RequestStats

    @property
    def names(self) -> Iterator[Name]:
        yield self.tenant, ""
        for worker_id in self.workers:
            yield "", worker_id


@dataclass(slots=True)
class Activity:
    """The sums of one router since it started."""

    _ended: dict[Name, trace.Activity] = field(default_factory=dict)

    def ended(self, work: Work) -> None:
        for name in work.names:
            found = self._ended[name] = self._ended.pop(name, _nothing(name))
            found.num_ended += 1
            _add(found, work)
        while len(self._ended) > _MAX_NAMES:
            del self._ended[next(iter(self._ended))]

    def sums(self, running: Iterable[Work]) -> list[trace.Activity]:
        sums: dict[Name, trace.Activity] = {}
        for name, ended in self._ended.items():
            _sum(sums, name).CopyFrom(ended)
        for work in running:
            for name in work.names:
                found = _sum(sums, name)
                found.num_running += 1
                _add(found, work)
        return list(sums.values())


def _sum(sums: dict[Name, trace.Activity], name: Name) -> trace.Activity:
    if name not in sums:
        sums[name] = _nothing(name)
    return sums[name]


def _nothing(name: Name) -> trace.Activity:
    return trace.Activity(tenant=name[0], worker_id=name[1])


def _add(found: trace.Activity, work: Work) -> None:
    found.output_tokens += work.output_tokens
    found.num_draft_tokens += work.stats.num_draft_tokens
    found.num_verified_tokens += work.stats.num_verified_tokens
    found.num_accepted_draft_tokens += work.stats.num_accepted_draft_tokens
