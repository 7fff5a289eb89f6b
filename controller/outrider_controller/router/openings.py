"""Where each session is open: on which target, on which draft, under which ids. Opens, tells, closes; decides nothing.

A target that talks to a draft itself opens the sequence there: here it only hears of the pair.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter, OrderedDict

from outrider.protocol.validate import DraftRules
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2

from outrider_controller.router import clock
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.course import Course, DraftOpening, TargetOpening
from outrider_controller.router.notices import Notices
from outrider_controller.router.policy import Setting
from outrider_controller.router.pools import DraftLink, LinkKey, TargetLink

# Connections that came and went are among them.
_MAX_APART = 1024
# Until it is tried again.
_APART_US = 60_000_000


class Openings:
    """Of all sessions of one router."""

    def __init__(self, config: RouterConfig, notices: Notices, first_id: int | None = None) -> None:
        """`first_id`: of the sequences opened on workers; drawn if not given."""
        self._config = config
        self._notices = notices
        self.by_target: dict[int, Course] = {}
        self.by_draft: dict[int, Course] = {}
        self._apart: OrderedDict[tuple[LinkKey, LinkKey], int] = OrderedDict()
        """Targets that could not reach a draft, and when."""
        # Random start: ids must not repeat after a restart, while workers still hold sequences of the process before.
        self._ids = itertools.count(secrets.randbits(62) + 1 if first_id is None else first_id)

    # -- who is open there

    def at_target(self, link: TargetLink, sequence_id: int) -> Course | None:
        """The session that is open there under this id. Late replies, and replies about others' ids, find none."""
        course = self.by_target.get(sequence_id)
        if course is None or course.target is None or course.target.link is not link:
            self._notices.late_reply("target")
            return None
        return course

    def at_draft(self, link: DraftLink, sequence_id: int) -> Course | None:
        course = self.by_draft.get(sequence_id)
        if course is None or course.draft is None or course.draft.link is not link:
            self._notices.late_reply("draft")
            return None
        return course

    def at_draft_of(self, target: TargetLink, sequence_id: int) -> Course | None:
        """The session that has a draft under this id, and is open on this target."""
        course = self.by_draft.get(sequence_id)
        if course is None or course.target is None or course.target.link is not target or course.draft is None:
            self._notices.late_reply("draft")
            return None
        return course

    def drafts_of(self, target: TargetLink) -> Counter[str]:
        """By worker, how many of this target's sequences it drafts for."""
        courses = [self.by_target[sequence_id] for sequence_id in target.open_sequences]
        return Counter(course.draft.link.worker_id for course in courses if course.draft is not None)

    # -- opening

    def open_target(self, course: Course, link: TargetLink, setting: Setting) -> None:
        if not link.up:
            course.wake()
            return
        opening = TargetOpening(next(self._ids), link)
        course.target = opening
        course.num_targets += 1
        course.rounds_here = 0
        self.by_target[opening.sequence_id] = course
        link.open_sequences.add(opening.sequence_id)
        link.outbox.open(course.session.open_message(opening.sequence_id, _speculation(setting)))
        now_us = clock.now_us()
        course.session.legs.opened(now_us)
        course.recorder.opened(link.info, now_us)

    def open_draft(self, course: Course, link: DraftLink, setting: Setting) -> None:
        most = course.pace.limit + self._config.policy.run_ahead_tokens
        session = course.session
        rules = DraftRules(
            mode=session.mode,
            sampling=session.request.sampling,
            prompt_len=session.prompt_len,
            vocab_size=session.vocab_size,
            max_context_len=link.info.max_context_len,
            max_draft_tokens=most,
        )
        target = self._pairs_with(course, link)
        opening = DraftOpening(next(self._ids), link, rules, _told(setting), target is not None)
        course.draft = opening
        course.num_drafts += 1
        self.by_draft[opening.sequence_id] = course
        link.open_sequences.add(opening.sequence_id)
        now_us = clock.now_us()
        if target is not None:
            link.paired_sequences.add(opening.sequence_id)
            target.link.outbox.pair(
                target_pb2.PairSequence(
                    sequence_id=target.sequence_id,
                    draft_address=link.address,
                    draft_worker_id=link.worker_id,
                    draft_sequence_id=opening.sequence_id,
                )
            )
        else:
            link.outbox.open(course.session.open_message(opening.sequence_id, _speculation(setting)))
            course.session.legs.asked(course.session.committed_len, now_us)
        course.recorder.opened(link.info, now_us)

    def apart(self, target: TargetLink, draft: DraftLink) -> None:
        """This target cannot reach this draft: for a while what the two say to each other goes through the router."""
        self._apart[target.key, draft.key] = clock.now_us()
        if len(self._apart) > _MAX_APART:
            self._apart.popitem(last=False)

    def _pairs_with(self, course: Course, draft: DraftLink) -> TargetOpening | None:
        """The target that is to talk to this draft itself, if one is."""
        target = course.target
        if target is None or not self._config.pair_workers:
            return None
        found_us = self._apart.get((target.link.key, draft.key))
        if found_us is not None and clock.now_us() - found_us < _APART_US:
            return None
        return target

    # -- telling

    def tell(self, course: Course, setting: Setting) -> None:
        """Both, where it concerns both: a draft only needs to hear that it may rest, or is wanted again."""
        self.tell_target(course, setting)
        draft, told = course.draft, _told(setting)
        if draft is None or told == draft.told:
            return
        draft.told = told
        if draft.paired:
            return
        draft.link.outbox.set(sequence.SetSpeculation(sequence_id=draft.sequence_id, speculation=_speculation(setting)))

    def tell_target(self, course: Course, setting: Setting) -> None:
        if course.target is None:
            return
        course.target.link.outbox.set(
            sequence.SetSpeculation(sequence_id=course.target.sequence_id, speculation=_speculation(setting))
        )

    # -- closing

    def drop_target(self, course: Course, reason: sequence.CloseReason.ValueType | None) -> TargetOpening | None:
        """Forgets the target's sequence, and closes it there if a reason is given."""
        opening, course.target = course.target, None
        if opening is None:
            return None
        del self.by_target[opening.sequence_id]
        opening.link.open_sequences.discard(opening.sequence_id)
        if reason is not None and opening.link.up:
            opening.link.outbox.close(sequence.CloseSequence(sequence_id=opening.sequence_id, reason=reason))
        return opening

    def drop_draft(self, course: Course, reason: sequence.CloseReason.ValueType | None) -> DraftOpening | None:
        """Likewise the draft's; where the target opened it, it is the target that hears."""
        opening, course.draft = course.draft, None
        if opening is None:
            return None
        del self.by_draft[opening.sequence_id]
        opening.link.open_sequences.discard(opening.sequence_id)
        if opening.paired:
            opening.link.paired_sequences.discard(opening.sequence_id)
            # Without a target here it has ended with the target's sequence.
            if reason is not None and course.target is not None and course.target.link.up:
                course.target.link.outbox.pair(target_pb2.PairSequence(sequence_id=course.target.sequence_id))
        elif reason is not None and opening.link.up:
            opening.link.outbox.close(sequence.CloseSequence(sequence_id=opening.sequence_id, reason=reason))
        return opening


def _told(setting: Setting) -> tuple[int, int, int]:
    """What of a setting concerns a draft."""
    return setting.max_draft_tokens, setting.run_ahead_tokens, setting.num_alternatives


def _speculation(setting: Setting) -> sequence.Speculation:
    return sequence.Speculation(
        max_draft_tokens=setting.max_draft_tokens,
        max_wait_us=setting.max_wait_us,
        run_ahead_tokens=setting.run_ahead_tokens,
        num_alternatives=setting.num_alternatives,
    )
