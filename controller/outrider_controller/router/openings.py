"""Where each session is open: on which target, with which draft, under which ids. Decides nothing.

The router talks to targets only: it names a draft, and the target opens the sequence there.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter

from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2

from outrider_controller.router import clock
from outrider_controller.router.course import Course, DraftOpening, TargetOpening
from outrider_controller.router.links import TargetLink
from outrider_controller.router.notices import Notices
from outrider_controller.router.policy import Setting
from outrider_controller.router.pools import DraftWorker


class Openings:
    """Of all sessions of one router."""

    def __init__(self, notices: Notices, first_id: int | None = None) -> None:
        """`first_id`: of the sequences opened on workers; drawn if not given."""
        self._notices = notices
        self.by_target: dict[int, Course] = {}
        self.by_draft: dict[int, Course] = {}
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

    def at_draft_of(self, target: TargetLink, sequence_id: int) -> Course | None:
        """The session that this target opened at a draft under this id."""
        course = self.by_draft.get(sequence_id)
        if course is None or course.target is None or course.target.link is not target:
            self._notices.late_reply("draft")
            return None
        return course

    def drafts_of(self, target: TargetLink) -> Counter[str]:
        """By worker, how many of this target's sequences it drafts for."""
        courses = [self.by_target[sequence_id] for sequence_id in target.open_sequences]
        return Counter(course.draft.worker.worker_id for course in courses if course.draft is not None)

    # -- opening

    def open(self, course: Course, link: TargetLink, draft: DraftWorker | None, setting: Setting) -> None:
        """On a target, which opens it at the draft."""
        if not link.up:
            course.wake()
            return
        opening = TargetOpening(next(self._ids), link)
        course.target = opening
        course.num_targets += 1
        course.rounds_here = 0
        self.by_target[opening.sequence_id] = course
        link.open_sequences.add(opening.sequence_id)
        now_us = clock.now_us()
        course.recorder.opened(link.info, now_us)
        assignment = self._assign(course, draft, now_us) if draft is not None else None
        link.outbox.open(course.session.open_message(opening.sequence_id, _speculation(setting), assignment))
        course.session.legs.opened(now_us)

    def set_draft(self, course: Course, draft: DraftWorker, setting: Setting) -> None:
        """On the target where it is open, with other settings."""
        if course.target is None:
            return
        self.set_speculation(course, setting)
        course.target.link.outbox.set_draft(
            target_pb2.SetDraft(
                sequence_id=course.target.sequence_id, draft=self._assign(course, draft, clock.now_us())
            )
        )

    def _assign(self, course: Course, draft: DraftWorker, now_us: int) -> sequence.DraftAssignment:
        opening = DraftOpening(next(self._ids), draft)
        course.draft = opening
        course.num_drafts += 1
        self.by_draft[opening.sequence_id] = course
        draft.open_sequences.add(opening.sequence_id)
        course.recorder.opened(draft.info, now_us)
        return sequence.DraftAssignment(
            worker_id=draft.worker_id, address=draft.address, sequence_id=opening.sequence_id
        )

    def set_speculation(self, course: Course, setting: Setting) -> None:
        """The target passes on to the draft what concerns it."""
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

    def drop_draft(self, course: Course) -> DraftOpening | None:
        """Forgets the draft's sequence, which the target has closed, or closes with its own."""
        opening, course.draft = course.draft, None
        if opening is None:
            return None
        del self.by_draft[opening.sequence_id]
        opening.worker.open_sequences.discard(opening.sequence_id)
        return opening


def _speculation(setting: Setting) -> sequence.Speculation:
    return sequence.Speculation(
        max_draft_tokens=setting.max_draft_tokens,
        max_wait_us=setting.max_wait_us,
        run_ahead_tokens=setting.run_ahead_tokens,
        num_alternatives=setting.num_alternatives,
    )
