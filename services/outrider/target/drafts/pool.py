"""The drafts of one target at draft workers: what routers' messages and the worker's reports mean for them.

A router decides which worker drafts, how far, and what follows when a draft fails. Lives in the event loop. A commit is
sent to the draft when it is sent to the router, and a proposal becomes an event of the worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.drafting.pool import DraftLeases, DraftLinks, DraftVocabulary, PooledSequence
from outrider.drafting.pool.link import DraftLink
from outrider.drafting.source import CloseReason, DraftAssignment
from outrider.errors import InvalidRequest, OutriderError
from outrider.limits import clamp_us
from outrider.protocol.errors import from_sequence_error, to_sequence_error
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.v1 import draft_pb2, sequence_pb2, target_pb2
from outrider.sequence.key import Finish, SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation, price_moved
from outrider.target.requests.events import Adjusted, Event, Offered, Paired
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport, TargetStats
from outrider.target.requests.row import StepRow
from outrider.target.requests.wire import assignment_of
from outrider.worker.events import Opened

_REASONS = {reason.value: reason for reason in CloseReason}


@dataclass(slots=True)
class _Open:
    """One open sequence: all that a draft would be sent now."""

    spec: SequenceSpec
    speculation: Speculation
    tokens: Sequence[int]
    """Its engine's: others may be among them already that no report has told of."""
    committed_len: int
    pooled: PooledSequence | None = None


class PoolDrafts:
    """For all routers of the target."""

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
        deepen: Callable[[Speculation], Speculation] = lambda setting: setting,
    ) -> None:
        """`post` takes events made of drafts' messages, `answer` what a stream's router is sent besides commits.
        `credential`: metadata of calls to drafts. `features`: those that the worker computes, as in its WorkerInfo.
        `deepen`: as of Drafts."""
        callbacks = self._pair, self._replied, self._lose, self._count_unleased
        self.links = DraftLinks(leases, *callbacks, connect, credential)
        self._deepen = deepen
        self._vocabulary = DraftVocabulary(limits.vocab_size, limits.max_context_len)
        self._clock = clock
        self._post = post
        self._answer = answer
        self._leases = leases
        self._features = features
        self._stats = stats or TargetStats()
        self._open: dict[SequenceKey, _Open] = {}
        self._row_price = 0.0
        """The price last sent to drafts."""

    async def stop(self) -> None:
        await self.links.stop()

    # -- messages from routers

    def apply(self, stream: int, request: target_pb2.VerifyRequest, events: Sequence[Event]) -> None:
        """Follows the parts of a router's message that concern drafts. `events`: those that it was translated to."""
        assigned = {opening.sequence_id: opening.draft for opening in request.opens if opening.HasField("draft")}
        for event in events:
            # Opened twice: that is an error, which ends the sequence.
            if isinstance(event, Opened) and event.key not in self._open:
                spec = event.spec
                self._open[event.key] = _Open(spec, spec.speculation, event.tokens, spec.num_tokens)
                if (draft := assigned.get(event.key.sequence_id)) is not None:
                    self.assign(event.key, assignment_of(draft))
            elif isinstance(event, Adjusted) and (found := self._open.get(event.key)) is not None:
                found.speculation = event.speculation
                self._limit(found)
        for change in request.set_drafts:
            self.assign(SequenceKey(stream, change.sequence_id), assignment_of(change.draft))
        for close in request.closes:
            self._close(SequenceKey(stream, close.sequence_id), _REASONS.get(close.reason, CloseReason.CANCELLED))

    def assign(self, key: SequenceKey, assignment: DraftAssignment | None) -> None:
        """From now on this draft proposes for the sequence; None for no draft."""
        if (found := self._open.get(key)) is None:
            return
        self.links.cancel(key)
        self._unpair(found, CloseReason.MOVED)
        if assignment is not None:
            self.links.look_up(key, assignment)

    def stream_ended(self, stream: int) -> None:
        for key in [key for key in self._open if key.stream == stream]:
            self._close(key, CloseReason.CANCELLED)

    def _close(self, key: SequenceKey, reason: CloseReason) -> None:
        self.links.cancel(key)
        if (found := self._open.pop(key, None)) is not None:
            self._unpair(found, reason)

    def _limits(self, speculation: Speculation) -> Speculation:
        return self._deepen(speculation).for_draft(self._row_price)

    def _limit(self, found: _Open) -> None:
        if found.pooled is not None:
            found.pooled.limit(self._limits(found.speculation))

    # -- reports of the worker

    def take_report(self, report: TargetReport) -> None:
        """Sends commits and ends to the drafts; fills in what routers are told of these."""
        self._price_rows(report.row_price)
        ended = {row.key for row in report.commits if row.finish is not Finish.NONE}
        for key, base_len, features in report.features:
            if (found := self._open.get(key)) is not None and found.pooled is not None and key not in ended:
                found.pooled.show(base_len, features)
        for row in report.commits:
            if (found := self._open.get(row.key)) is not None:
                self._commit(found, row)
        for failed in report.failures:
            self._close(failed.key, CloseReason.MOVED)

    def _commit(self, found: _Open, row: StepRow[Any]) -> None:
        base_len, committed_len, pooled = row.base_len, row.base_len + len(row.token_ids), found.pooled
        if pooled is not None:
            drafted = row.num_drafted, row.draft.last_serial
            row.draft_stats = pooled.take_stats(base_len, *drafted, committed_len, row.draft_useful_s)
        if row.finish is not Finish.NONE:
            self._close(row.key, CloseReason.FINISHED)
        else:
            found.committed_len = committed_len
            if pooled is not None:
                pooled.commit(base_len, row.token_ids, self._now_us())

    def _price_rows(self, price: float) -> None:
        if not price_moved(self._row_price, price):
            return
        self._row_price = price
        for found in self._open.values():
            if found.speculation.max_draft_tokens:
                self._limit(found)

    # -- what comes of the pool

    def _pair(self, key: SequenceKey, draft: DraftAssignment) -> None:
        found = self._open[key]
        limits, bits = self._limits(found.speculation), self._bits_for(draft.worker_id)
        committed = found.tokens[len(found.spec.prompt) : found.committed_len]
        try:
            link = self.links.get(draft)
            found.pooled = PooledSequence.open(
                *(link, draft.sequence_id, key, found.spec, committed, limits),
                *(self._vocabulary, self._now_us()),
                reads_features=bits > 0,
            )
            if bits:
                self._post([Paired(key, bits)])
        except OutriderError as problem:
            self._tell_lost(key, draft.sequence_id, problem)
        except ValueError as error:
            # A token id that no message can hold: not every target checks them.
            self._tell_lost(key, draft.sequence_id, InvalidRequest("opening", str(error)))

    def _bits_for(self, worker_id: str) -> int:
        """The fewest of a number of features that the worker reads; 0 for one that reads none of this target's."""
        record = self._leases.find(worker_id)
        if record is None or not self._features or record.info.features != self._features:
            return 0
        return record.info.feature_bits or 16

    def _unpair(self, found: _Open, reason: CloseReason) -> None:
        pooled, found.pooled = found.pooled, None
        if pooled is not None:
            self._tell_spent(pooled.close(reason), pooled.share_us)

    def _replied(self, link: DraftLink, reply: draft_pb2.DraftResponse) -> None:
        late_us = Counter[int]()
        if events := [event for draft in reply.drafts if (event := self._take(link, draft, late_us)) is not None]:
            self._post(events)
        for message in reply.errors:
            if (key := link.keys.get(message.sequence_id)) is not None:
                self._lose(key, from_sequence_error(message))
        for usage in reply.usage:
            late_us[usage.sequence_id] += usage.share_us
        # One message of each: a worker that repeats itself must not fill the stream of a router.
        for sequence_id, share_us in late_us.items():
            self._tell_spent(link.last_closed.get(sequence_id), share_us)

    def _take(self, link: DraftLink, draft: sequence_pb2.Draft, late_us: Counter[int]) -> Event | None:
        """`late_us`: takes the time of messages about sequences that have ended, by their id on the link."""
        if (key := link.keys.get(draft.sequence_id)) is None or (pooled := self._open[key].pooled) is None:
            late_us[draft.sequence_id] += draft.share_us
            return None
        pooled.share_us += draft.share_us
        try:
            return Offered(key, pooled.take(draft, self._now_us()), self._clock())
        except OutriderError as error:
            self._stats.num_refused_drafts += 1
            self._lose(key, error)
            return None

    def _lose(self, key: SequenceKey, problem: OutriderError) -> None:
        """The sequence continues without its draft, and the router is sent the reason."""
        found = self._open[key]
        assert found.pooled is not None
        sequence_id = found.pooled.sequence_id
        self._unpair(found, CloseReason.MOVED)
        self._tell_lost(key, sequence_id, problem)

    def _tell_spent(self, key: SequenceKey | None, draft_share_us: int) -> None:
        """A draft spent this time on a sequence, which no commit will report any more."""
        if key is not None and draft_share_us:
            usage = sequence_pb2.SequenceUsage(sequence_id=key.sequence_id, draft_share_us=clamp_us(draft_share_us))
            self._answer(key.stream, target_pb2.VerifyResponse(usage=[usage]))

    def _tell_lost(self, key: SequenceKey, draft_sequence_id: int, problem: OutriderError) -> None:
        error = to_sequence_error(draft_sequence_id, problem)
        self._answer(key.stream, target_pb2.VerifyResponse(draft_errors=[error]))

    def _count_unleased(self) -> None:
        self._stats.num_unleased_drafts += 1

    def _now_us(self) -> int:
        return round(self._clock() * 1e6)
