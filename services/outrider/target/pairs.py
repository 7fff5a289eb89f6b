"""The drafts of a target's sequences: opens each sequence at the draft that its router named, and passes commits and
proposals between the two.

A router decides which worker drafts, how far, and what follows when a draft fails. Lives in the event loop, between the
routers' streams and the worker: a commit is sent to the draft when it is sent to the router, and a proposal becomes an
event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.errors import InvalidRequest, OutriderError, Unavailable
from outrider.protocol.draft_log import DraftLog, clamp_us, drafted_us
from outrider.protocol.errors import from_sequence_error, to_sequence_error
from outrider.protocol.finish import Finish
from outrider.protocol.validate import DraftValidator
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.v1 import draft_pb2, sequence_pb2, target_pb2
from outrider.target.calibration import min_chance
from outrider.target.draft_leases import DraftLeases
from outrider.target.draft_link import UNREACHABLE, DraftLink
from outrider.target.events import DraftRefused, Event, Offered
from outrider.target.opening import Limits
from outrider.target.report import Committed, Report, TargetStats
from outrider.target.wire import checked_draft
from outrider.worker.events import SequenceKey

# More drafts than one target is ever assigned.
_MAX_LINKS = 256
# Least time between two readings of the leases.
_LOOK_PAUSE_S = 0.1
# No draft reports a lower chance than this: a lower price is as good as none.
_MIN_PRICE = 0.02


@dataclass(slots=True)
class _Pairing:
    """One sequence, open at one draft."""

    link: DraftLink
    sequence_id: int
    sent_settings: tuple[int, int, float]
    """The settings sent to the draft last."""
    opened_len: int
    """Committed length when it was opened there: the answer to that includes the prefill of the prompt."""
    validator: DraftValidator
    log: DraftLog = field(default_factory=DraftLog)
    draft_active: bool = False
    """The draft sent something since the last commit. The next three fields: its last answer to a commit."""
    answer_us: int = 0
    answer_compute_us: int = 0
    answer_tokens: int = 0
    share_us: int = 0
    """Draft time not yet reported to the router."""

    def offered(self, draft: sequence_pb2.Draft, num_positions: int, now_us: int) -> None:
        answer_us = self.log.add(draft, draft.base_len, num_positions, now_us)
        self.draft_active = True
        if answer_us and draft.base_len != self.opened_len:
            self.answer_us, self.answer_tokens = clamp_us(answer_us), num_positions
            self.answer_compute_us = clamp_us(draft.compute_us)

    def take_stats(self, committed: Committed) -> sequence_pb2.DraftStats | None:
        """What the router is sent about the draft with this commit, if anything."""
        if not (self.log.waits or self.draft_active or committed.draft_useful_s):
            return None
        base_len, outcome = committed.base_len, committed.outcome
        verified = self.log.take_verified(
            *(base_len, outcome.num_drafted, committed.draft_serial, base_len + len(outcome.token_ids))
        )
        if not (verified or self.draft_active or committed.draft_useful_s):
            return None
        draft_us, compute_us, wire_us = drafted_us(verified)
        stats = sequence_pb2.DraftStats(
            draft_us=draft_us,
            compute_us=compute_us,
            wire_us=wire_us,
            source=verified[-1].source if verified else "",
            answer_us=self.answer_us,
            answer_compute_us=self.answer_compute_us,
            answer_tokens=self.answer_tokens,
            share_us=clamp_us(self.share_us),
            useful_us=clamp_us(round(committed.draft_useful_s * 1e6)),
        )
        self.draft_active, self.answer_us, self.answer_compute_us, self.answer_tokens = False, 0, 0, 0
        self.share_us = 0
        return stats


@dataclass(slots=True)
class _Open:
    """One sequence that is open here."""

    opening: sequence_pb2.OpenSequence
    """The opening that a draft would be sent now: with all committed tokens and the current settings."""
    pairing: _Pairing | None = None
    assigned: sequence_pb2.DraftAssignment | None = None
    """The draft that its router named last."""

    @property
    def committed_len(self) -> int:
        return len(self.opening.prompt_token_ids) + len(self.opening.committed_token_ids)


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
        self._limits = limits
        self._clock = clock
        self._post = post
        self._answer = answer
        self._leases = leases
        self._connect = connect
        self._credential = credential
        self._stats = stats or TargetStats()
        self._open: dict[SequenceKey, _Open] = {}
        self._links: dict[tuple[str, str], DraftLink] = {}
        self._unknown: dict[SequenceKey, sequence_pb2.DraftAssignment] = {}
        """Assigned drafts whose leases are still to be checked."""
        self._looking: asyncio.Task[None] | None = None
        self._row_price = 0.0
        """The price last sent to drafts."""

    async def stop(self) -> None:
        links = list(self._links.values())
        self._links.clear()
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.gather(*(link.stop() for link in links))

    @property
    def open_keys(self) -> list[SequenceKey]:
        return list(self._open)

    def apply(self, stream: int, request: target_pb2.VerifyRequest) -> None:
        """Follows the parts of a router's message that concern drafts."""
        for opening in request.opens:
            self._opened(SequenceKey(stream, opening.sequence_id), opening)
        for setting in request.settings:
            self._set(SequenceKey(stream, setting.sequence_id), setting.speculation)
        for change in request.set_drafts:
            self._assign(SequenceKey(stream, change.sequence_id), change.draft)
        for close in request.closes:
            self._close(SequenceKey(stream, close.sequence_id), close.reason)

    def _opened(self, key: SequenceKey, opening: sequence_pb2.OpenSequence) -> None:
        if key in self._open:
            # That is an error, which ends the sequence.
            return
        self._open[key] = _Open(opening)
        if opening.HasField("draft"):
            self._assign(key, opening.draft)

    def stream_ended(self, stream: int) -> None:
        for key in [key for key in self._open if key.stream == stream]:
            self._close(key, sequence_pb2.CLOSE_REASON_CANCELLED)

    def follow(self, report: Report) -> dict[SequenceKey, sequence_pb2.DraftStats]:
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
                pairing.link.outbox.commit(
                    sequence_pb2.Commit(
                        sequence_id=pairing.sequence_id, base_len=committed.base_len, token_ids=outcome.token_ids
                    )
                )
                self._asked(pairing, committed.base_len + len(outcome.token_ids))
        return stats

    def _set(self, key: SequenceKey, speculation: sequence_pb2.Speculation) -> None:
        found = self._open.get(key)
        if found is None:
            return
        found.opening.speculation.CopyFrom(speculation)
        self._tell_setting(found)

    def _tell_setting(self, found: _Open) -> None:
        """Sends the settings to the draft if those that concern it have changed."""
        pairing, speculation = found.pairing, found.opening.speculation
        speculation.min_chance = min_chance(self._row_price, speculation.weight or 1.0)
        if pairing is not None and pairing.sent_settings != (settings := _draft_settings(speculation)):
            pairing.sent_settings = settings
            pairing.validator.allow(_max_positions(speculation))
            pairing.link.outbox.set(
                sequence_pb2.SetSpeculation(sequence_id=pairing.sequence_id, speculation=speculation)
            )

    def _price_rows(self, price: float) -> None:
        """Sends drafts a price that has moved by a quarter: they stop at tokens that would not be verified."""
        if max(price, self._row_price, _MIN_PRICE) <= 1.25 * max(_MIN_PRICE, min(price, self._row_price)):
            return
        self._row_price = price
        for found in self._open.values():
            if found.pairing is not None and found.opening.speculation.max_draft_tokens:
                self._tell_setting(found)

    def _assign(self, key: SequenceKey, draft: sequence_pb2.DraftAssignment) -> None:
        found = self._open.get(key)
        if found is None:
            return
        self._unpair(found, sequence_pb2.CLOSE_REASON_MOVED)
        found.assigned = draft
        if not draft.address:
            return
        if self._leases.hold(draft.worker_id, draft.address):
            self._pair(key, found, draft)
            return
        self._unknown[key] = draft
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_for_unknown(), name="look for drafts")

    async def _look_for_unknown(self) -> None:
        try:
            while self._unknown:
                unknown, self._unknown = self._unknown, {}
                await self._leases.look()
                for key, draft in unknown.items():
                    found = self._open.get(key)
                    # It may have ended meanwhile, or have been given another draft.
                    if found is not None and found.assigned is draft:
                        self._pair_if_leased(key, found, draft)
                await asyncio.sleep(_LOOK_PAUSE_S)
        finally:
            self._looking = None

    def _pair_if_leased(self, key: SequenceKey, found: _Open, draft: sequence_pb2.DraftAssignment) -> None:
        if self._leases.hold(draft.worker_id, draft.address):
            self._pair(key, found, draft)
        else:
            self._stats.num_unleased_drafts += 1
            self._tell_fault(
                key, draft.sequence_id, Unavailable("no lease names this draft at this address", reason=UNREACHABLE)
            )

    def _pair(self, key: SequenceKey, found: _Open, draft: sequence_pb2.DraftAssignment) -> None:
        link, sequence_id = self._link(draft), draft.sequence_id
        if link is None:
            self._tell_fault(
                key, draft.sequence_id, Unavailable(f"all {_MAX_LINKS} links are in use", reason=UNREACHABLE)
            )
            return
        if sequence_id in link.keys:
            self._tell_fault(key, draft.sequence_id, InvalidRequest("draft.sequence_id", "already open"))
            return
        speculation = found.opening.speculation
        speculation.min_chance = min_chance(self._row_price, speculation.weight or 1.0)
        settings, validator = _draft_settings(speculation), self._validator(found.opening)
        found.pairing = pairing = _Pairing(link, sequence_id, settings, found.committed_len, validator)
        link.keys[sequence_id] = key
        opening = sequence_pb2.OpenSequence()
        opening.CopyFrom(found.opening)
        opening.ClearField("draft")
        opening.sequence_id = sequence_id
        opening.ClearField("logits")
        opening.ClearField("logprobs")
        link.outbox.open(opening)
        self._asked(pairing, found.committed_len)

    def _validator(self, opening: sequence_pb2.OpenSequence) -> DraftValidator:
        return DraftValidator(
            mode=opening.mode,
            sampling=opening.sampling,
            prompt_len=len(opening.prompt_token_ids),
            vocab_size=self._limits.vocab_size,
            max_context_len=self._limits.max_context_len,
            max_draft_tokens=_max_positions(opening.speculation),
        )

    def _asked(self, pairing: _Pairing, committed_len: int) -> None:
        pairing.log.asked(committed_len, round(self._clock() * 1e6))
        if pairing.sent_settings[0]:
            pairing.link.asked()

    def _link(self, draft: sequence_pb2.DraftAssignment) -> DraftLink | None:
        """None when there are too many links already."""
        name = draft.worker_id, draft.address
        if name not in self._links and len(self._links) < _MAX_LINKS:
            self._links[name] = DraftLink(
                *name, self._connect, self._replied, self._link_ended, self._forget, self._credential
            )
        return self._links.get(name)

    def _forget(self, link: DraftLink) -> None:
        name = link.worker_id, link.address
        if self._links.get(name) is link:
            del self._links[name]

    def _close(self, key: SequenceKey, reason: sequence_pb2.CloseReason.ValueType) -> None:
        self._unknown.pop(key, None)
        if (found := self._open.pop(key, None)) is not None:
            self._unpair(found, reason)

    def _unpair(self, found: _Open, reason: sequence_pb2.CloseReason.ValueType) -> None:
        pairing, found.pairing = found.pairing, None
        if pairing is None:
            return
        key = pairing.link.closed(pairing.sequence_id)
        self._tell_usage(key, pairing.share_us)
        pairing.link.outbox.close(sequence_pb2.CloseSequence(sequence_id=pairing.sequence_id, reason=reason))

    # -- messages from drafts

    def _replied(self, link: DraftLink, reply: draft_pb2.DraftResponse) -> None:
        now_s = self._clock()
        offered: list[Event] = []
        for draft in reply.drafts:
            # A late message, about a sequence that has ended, finds nothing.
            if (key := link.keys.get(draft.sequence_id)) is None or (pairing := self._open[key].pairing) is None:
                self._used_late(link, draft)
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
            self._used_late(link, usage)

    def _used_late(self, link: DraftLink, message: sequence_pb2.Draft | sequence_pb2.SequenceUsage) -> None:
        if (key := link.last_closed.get(message.sequence_id)) is not None:
            self._tell_usage(key, message.share_us)

    def _tell_usage(self, key: SequenceKey, draft_share_us: int) -> None:
        if draft_share_us:
            usage = sequence_pb2.SequenceUsage(sequence_id=key.sequence_id, draft_share_us=clamp_us(draft_share_us))
            self._answer(key.stream, target_pb2.VerifyResponse(usage=[usage]))

    def _link_ended(self, link: DraftLink, error: Unavailable) -> None:
        self._forget(link)
        for key in list(link.keys.values()):
            self._lose(key, error)

    def _lose(self, key: SequenceKey, problem: OutriderError) -> None:
        """The sequence continues without its draft, and the router is sent the reason."""
        found = self._open[key]
        assert found.pairing is not None
        sequence_id = found.pairing.sequence_id
        self._unpair(found, sequence_pb2.CLOSE_REASON_MOVED)
        self._tell_fault(key, sequence_id, problem)

    def _tell_fault(self, key: SequenceKey, draft_sequence_id: int, problem: OutriderError) -> None:
        error = to_sequence_error(draft_sequence_id, problem)
        self._answer(key.stream, target_pb2.VerifyResponse(draft_errors=[error]))


def _draft_settings(speculation: sequence_pb2.Speculation) -> tuple[int, int, float]:
    """The settings that concern a draft."""
    return speculation.max_draft_tokens, speculation.run_ahead_tokens, speculation.min_chance


def _max_positions(speculation: sequence_pb2.Speculation) -> int:
    """Positions that one message of a draft may cover."""
    return speculation.max_draft_tokens + speculation.run_ahead_tokens if speculation.max_draft_tokens else 0
