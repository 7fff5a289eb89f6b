"""What routers' messages and the worker's reports mean for the drafts of the pool. Lives in the event loop.

A commit is sent to the draft when it is sent to the router, and a proposal becomes an event of the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.drafting.pool import DraftLeases, DraftVocabulary, PoolDrafts, PoolListener
from outrider.drafting.source import CloseReason
from outrider.drafting.speculation import Speculation
from outrider.errors import OutriderError
from outrider.protocol.errors import to_sequence_error
from outrider.protocol.limits import clamp_us
from outrider.protocol.sequence_key import Finish, SequenceKey
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.v1 import sequence_pb2, target_pb2
from outrider.target.requests.events import Adjusted, DraftRefused, Event, Offered, Opened
from outrider.target.requests.opening import Limits
from outrider.target.requests.report import TargetReport, TargetStats
from outrider.target.requests.row import StepRow
from outrider.target.requests.wire import assignment_of
from outrider.tuning import MIN_CHANCE

_REASONS = {reason.value: reason for reason in CloseReason}


class PooledDrafts:
    """The drafts of one target, for all its routers."""

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        post: Callable[[list[Event]], None],
        answer: Callable[[int, target_pb2.VerifyResponse], None],
        leases: DraftLeases,
        connect: Connect = create_channel,
        credential: tuple[tuple[str, str], ...] = (),
        stats: TargetStats | None = None,
        features: str = "",
    ) -> None:
        """`post` takes events made of drafts' messages, `answer` what a stream's router is sent besides commits.
        `credential`: metadata of calls to drafts. `features`: those that the worker computes, as in its WorkerInfo."""
        vocabulary = DraftVocabulary(limits.vocab_size, limits.max_context_len)
        listener = PoolListener(self._post_arrived, self._tell_spent, self._tell_lost, self._count_unleased)
        self.pool = PoolDrafts(vocabulary, clock, leases, listener, connect, credential, features)
        self.deepen: Callable[[Speculation], Speculation] = lambda setting: setting
        """What drafts are told of a sequence's setting: an engine may need drafts that are longer than its steps."""
        self._clock = clock
        self._post = post
        self._answer = answer
        self._stats = stats or TargetStats()
        self._speculation: dict[SequenceKey, Speculation] = {}
        """Of the open sequences."""
        self._row_price = 0.0
        """The price last sent to drafts."""

    # -- messages from routers

    def apply(self, stream: int, request: target_pb2.VerifyRequest, events: Sequence[Event]) -> None:
        """Follows the parts of a router's message that concern drafts. `events`: those that it was translated to."""
        assigned = {opening.sequence_id: opening.draft for opening in request.opens if opening.HasField("draft")}
        for event in events:
            # Opened twice: that is an error, which ends the sequence.
            if isinstance(event, Opened) and event.key not in self._speculation:
                self._speculation[event.key] = event.opening.speculation
                draft = assigned.get(event.key.sequence_id)
                assignment = None if draft is None else assignment_of(draft)
                limits = self.deepen(event.opening.speculation).draft_limits(self._row_price)
                self.pool.open(event.key, event.opening.for_drafts(limits), assignment)
            elif isinstance(event, Adjusted) and event.key in self._speculation:
                self._speculation[event.key] = event.speculation
                self.pool.limit(event.key, self.deepen(event.speculation).draft_limits(self._row_price))
        for change in request.set_drafts:
            self.pool.assign(SequenceKey(stream, change.sequence_id), assignment_of(change.draft))
        for close in request.closes:
            self._close(SequenceKey(stream, close.sequence_id), _REASONS.get(close.reason, CloseReason.CANCELLED))

    def stream_ended(self, stream: int) -> None:
        for key in [key for key in self._speculation if key.stream == stream]:
            self._close(key, CloseReason.CANCELLED)

    def _close(self, key: SequenceKey, reason: CloseReason) -> None:
        self._speculation.pop(key, None)
        self.pool.close(key, reason)

    async def stop(self) -> None:
        await self.pool.links.stop()

    # -- reports of the worker

    def take_report(self, report: TargetReport) -> dict[SequenceKey, sequence_pb2.DraftStats]:
        """Sends commits and ends to the drafts; returns the draft statistics that routers are sent."""
        self._price_rows(report.row_price)
        draft_stats = {}
        for key, committed_len, features in report.features:
            self.pool.commit(key, committed_len, (), features)
        for committed in report.commits:
            if (stats := self._commit(committed)) is not None:
                draft_stats[committed.key] = stats
        for failed in report.failures:
            self._close(failed.key, CloseReason.MOVED)
        return draft_stats

    def _commit(self, row: StepRow[Any]) -> sequence_pb2.DraftStats | None:
        key, base_len, serial = row.key, row.base_len, row.draft.last_serial
        committed_len = base_len + len(row.token_ids)
        stats = self.pool.take_stats(key, base_len, row.num_drafted, serial, committed_len, row.draft_useful_s)
        if row.finish is not Finish.NONE:
            self._close(key, CloseReason.FINISHED)
        else:
            self.pool.commit(key, base_len, row.token_ids, row.features)
        return stats

    def _price_rows(self, price: float) -> None:
        """Sends drafts a price that has moved by a quarter: they stop at tokens that would not be verified."""
        if max(price, self._row_price, MIN_CHANCE) <= 1.25 * max(MIN_CHANCE, min(price, self._row_price)):
            return
        self._row_price = price
        for key, speculation in self._speculation.items():
            if speculation.max_draft_tokens:
                self.pool.limit(key, self.deepen(speculation).draft_limits(price))

    # -- what comes of the pool

    def _post_arrived(self) -> None:
        now_s = self._clock()
        self._post(
            [
                DraftRefused(key, found) if isinstance(found, OutriderError) else Offered(key, found, now_s)
                for key, found in self.pool.poll()
            ]
        )

    def _tell_spent(self, key: SequenceKey, draft_share_us: int) -> None:
        usage = sequence_pb2.SequenceUsage(sequence_id=key.sequence_id, draft_share_us=clamp_us(draft_share_us))
        self._answer(key.stream, target_pb2.VerifyResponse(usage=[usage]))

    def _tell_lost(self, key: SequenceKey, draft_sequence_id: int, problem: OutriderError) -> None:
        error = to_sequence_error(draft_sequence_id, problem)
        self._answer(key.stream, target_pb2.VerifyResponse(draft_errors=[error]))

    def _count_unleased(self) -> None:
        self._stats.num_unleased_drafts += 1
