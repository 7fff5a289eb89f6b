"""The drafts of a target's sequences: opens each sequence at the draft that its router named, and passes commits and
proposals between the two.

A router decides which worker drafts, how far, and what follows when a draft fails. Lives in the event loop, between the
routers' streams and the worker: a commit is sent to the draft when it is sent to the router, and a proposal becomes an
event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import OutriderError
from outrider.protocol.draft_log import clamp_us
from outrider.protocol.errors import from_sequence_error, to_sequence_error
from outrider.protocol.finish import Finish
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.v1 import draft_pb2, sequence_pb2, target_pb2
from outrider.target.calibration import min_chance
from outrider.target.draft_leases import DraftLeases
from outrider.target.draft_link import DraftLink
from outrider.target.draft_links import DraftLinks
from outrider.target.events import DraftRefused, Event, Offered
from outrider.target.opening import Limits
from outrider.target.pairing import Pairing
from outrider.target.report import Committed, Report, TargetStats
from outrider.target.wire import checked_draft
from outrider.worker.events import SequenceKey

# No draft reports a lower chance than this: a lower price is as good as none.
_MIN_PRICE = 0.02


@dataclass(slots=True)
class _Open:
    """One sequence that is open here."""

    opening: sequence_pb2.OpenSequence
    """The opening that a draft would be sent now: with all committed tokens and the current settings."""
    pairing: Pairing | None = None

    def price_rows(self, row_price: float) -> None:
        speculation = self.opening.speculation
        speculation.min_chance = min_chance(row_price, speculation.weight or 1.0)
        if self.pairing is not None:
            self.pairing.set(speculation)


class Pairs:
    """All pairings of one target, for all its routers."""

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        post: Callable[[list[Event]], None],
        answer: Callable[[int, target_pb2.VerifyResponse], None],
        leases: DraftLeases,
        connect: Connect = create_channel,
        stats: TargetStats | None = None,
        credential: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """`post` takes events made of drafts' messages, `answer` what a stream's router is sent besides commits.
        `credential`: metadata of calls to drafts."""
        self.links = DraftLinks(
            leases, self._pair, self._replied, self._lose, connect, credential, stats or TargetStats()
        )
        self._limits = limits
        self._clock = clock
        self._post = post
        self._answer = answer
        self._open: dict[SequenceKey, _Open] = {}
        self._row_price = 0.0
        """The price last sent to drafts."""

    # -- messages from routers

    def apply(self, stream: int, request: target_pb2.VerifyRequest) -> None:
        """Follows the parts of a router's message that concern drafts."""
        for opening in request.opens:
            key = SequenceKey(stream, opening.sequence_id)
            if key in self._open:
                # That is an error, which ends the sequence.
                continue
            self._open[key] = _Open(opening)
            if opening.HasField("draft"):
                self._assign(key, opening.draft)
        for setting in request.settings:
            if (found := self._open.get(SequenceKey(stream, setting.sequence_id))) is not None:
                found.opening.speculation.CopyFrom(setting.speculation)
                found.price_rows(self._row_price)
        for change in request.set_drafts:
            self._assign(SequenceKey(stream, change.sequence_id), change.draft)
        for close in request.closes:
            self._close(SequenceKey(stream, close.sequence_id), close.reason)

    def stream_ended(self, stream: int) -> None:
        for key in [key for key in self._open if key.stream == stream]:
            self._close(key, sequence_pb2.CLOSE_REASON_CANCELLED)

    def _assign(self, key: SequenceKey, draft: sequence_pb2.DraftAssignment) -> None:
        if (found := self._open.get(key)) is None:
            return
        self.links.cancel(key)
        self._unpair(found, sequence_pb2.CLOSE_REASON_MOVED)
        if draft.address:
            self.links.look_up(key, draft)

    def _pair(self, key: SequenceKey, draft: sequence_pb2.DraftAssignment) -> None:
        found, now_us = self._open[key], round(self._clock() * 1e6)
        found.price_rows(self._row_price)
        try:
            link = self.links.get(draft)
            found.pairing = Pairing.open(link, draft.sequence_id, key, found.opening, self._limits, now_us)
        except OutriderError as problem:
            self._tell_fault(key, draft.sequence_id, problem)

    def _close(self, key: SequenceKey, reason: sequence_pb2.CloseReason.ValueType) -> None:
        self.links.cancel(key)
        if (found := self._open.pop(key, None)) is not None:
            self._unpair(found, reason)

    def _unpair(self, found: _Open, reason: sequence_pb2.CloseReason.ValueType) -> None:
        pairing, found.pairing = found.pairing, None
        if pairing is not None:
            self._tell_usage(pairing.close(reason), pairing.share_us)

    # -- reports of the worker

    def take_report(self, report: Report) -> dict[SequenceKey, sequence_pb2.DraftStats]:
        """Sends commits and ends to the drafts; returns the draft statistics that routers are sent."""
        self._price_rows(report.row_price)
        draft_stats = {}
        for committed in report.commits:
            if (stats := self._commit(committed)) is not None:
                draft_stats[committed.key] = stats
        for failed in report.failures:
            self._close(failed.key, sequence_pb2.CLOSE_REASON_MOVED)
        return draft_stats

    def _commit(self, committed: Committed) -> sequence_pb2.DraftStats | None:
        key, outcome = committed.key, committed.outcome
        found = self._open.get(key)
        if found is None:
            return None
        pairing = found.pairing
        stats = pairing.take_stats(committed) if pairing is not None else None
        if outcome.finish is not Finish.NONE:
            self._close(key, sequence_pb2.CLOSE_REASON_FINISHED)
        else:
            found.opening.committed_token_ids.extend(outcome.token_ids)
            if pairing is not None:
                pairing.commit(committed.base_len, outcome.token_ids, round(self._clock() * 1e6))
        return stats

    def _price_rows(self, price: float) -> None:
        """Sends drafts a price that has moved by a quarter: they stop at tokens that would not be verified."""
        if max(price, self._row_price, _MIN_PRICE) <= 1.25 * max(_MIN_PRICE, min(price, self._row_price)):
            return
        self._row_price = price
        for found in self._open.values():
            if found.pairing is not None and found.opening.speculation.max_draft_tokens:
                found.price_rows(price)

    # -- messages from drafts

    def _replied(self, link: DraftLink, reply: draft_pb2.DraftResponse) -> None:
        now_s = self._clock()
        offered: list[Event] = []
        for draft in reply.drafts:
            # A late message, about a sequence that has ended, finds nothing.
            if (key := link.keys.get(draft.sequence_id)) is None or (pairing := self._open[key].pairing) is None:
                self._tell_usage(link.last_closed.get(draft.sequence_id), draft.share_us)
                continue
            pairing.share_us += draft.share_us
            pairing.log.number(draft)
            try:
                num_positions = pairing.validator.check(draft)
                checked = checked_draft(draft, now_s)
            except OutriderError as error:
                self._lose(key, error)
                offered.append(DraftRefused(key, error))
                continue
            pairing.offered(draft, num_positions, round(now_s * 1e6))
            offered.append(Offered(key, checked))
        if offered:
            self._post(offered)
        for message in reply.errors:
            if (key := link.keys.get(message.sequence_id)) is not None:
                self._lose(key, from_sequence_error(message))
        for usage in reply.usage:
            self._tell_usage(link.last_closed.get(usage.sequence_id), usage.share_us)

    def _lose(self, key: SequenceKey, problem: OutriderError) -> None:
        """The sequence continues without its draft, and the router is sent the reason."""
        found = self._open[key]
        assert found.pairing is not None
        sequence_id = found.pairing.sequence_id
        self._unpair(found, sequence_pb2.CLOSE_REASON_MOVED)
        self._tell_fault(key, sequence_id, problem)

    # -- what routers are sent

    def _tell_usage(self, key: SequenceKey | None, draft_share_us: int) -> None:
        if key is not None and draft_share_us:
            usage = sequence_pb2.SequenceUsage(sequence_id=key.sequence_id, draft_share_us=clamp_us(draft_share_us))
            self._answer(key.stream, target_pb2.VerifyResponse(usage=[usage]))

    def _tell_fault(self, key: SequenceKey, draft_sequence_id: int, problem: OutriderError) -> None:
        error = to_sequence_error(draft_sequence_id, problem)
        self._answer(key.stream, target_pb2.VerifyResponse(draft_errors=[error]))
