"""Which sequences are open, which are due, and what ends one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from outrider.draft.events import DraftCommitted, DraftReport, Event, Limited
from outrider.draft.worker import DraftWorker
from outrider.drafters import DraftSequence
from outrider.errors import Code, InvalidRequest
from outrider.protocol.errors import to_sequence_error
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import SamplingParams, VerificationMode
from outrider.tree import DraftTree
from outrider.worker.events import Closed, DrainExpired, DrainStarted, Opened, PeerStreamEnded, Refused, SequenceKey
from outrider.worker.faults import WholeStepFailed

from tests.ngram_drafter import NgramDrafter

ONE, TWO = SequenceKey(1, 1), SequenceKey(1, 2)
PROMPT = (20, 21, 22, 23, 20, 21)


def opened(key: SequenceKey, prompt: tuple[int, ...] = PROMPT, max_draft_tokens: int = 3) -> Opened:
    params = SamplingParams(temperature=0)
    opening = SequenceSpec(prompt, params, VerificationMode.GREEDY, speculation=Speculation(max_draft_tokens))
    return Opened(key, opening, received_s=1.0)


def committed(key: SequenceKey, base_len: int, *token_ids: int, finished: bool = False) -> DraftCommitted:
    return DraftCommitted(key, base_len, token_ids, finished, received_s=2.0)


def turn(worker: DraftWorker, *events: Event) -> DraftReport:
    for event in events:
        worker.apply(event)
    worker.step()
    return worker.take_report()


def failed(report: DraftReport) -> list[tuple[SequenceKey, str | None, Code]]:
    return [(f.key, e.reason or None, Code(e.code)) for f in report.failures for e in [to_sequence_error(1, f.error)]]


def test_an_opening_is_answered_with_a_proposal_from_its_end(worker: DraftWorker) -> None:
    [proposed] = turn(worker, opened(ONE)).proposals
    assert (proposed.key, proposed.epoch, proposed.tree.base_len) == (ONE, 0, 6)
    assert proposed.tree.guess() == [22, 23, 20]
    assert proposed.since_s == 1.0


def test_each_commit_is_answered_once(worker: DraftWorker) -> None:
    turn(worker, opened(ONE))
    [proposed] = turn(worker, committed(ONE, 6, 22)).proposals
    assert (proposed.tree.base_len, proposed.tree.guess(), proposed.epoch) == (7, [23, 20, 21], 0)
    assert not turn(worker).proposals
    assert not worker.has_work


def test_commits_that_came_in_together_are_answered_together(worker: DraftWorker) -> None:
    turn(worker, opened(ONE), opened(TWO))
    report = turn(worker, committed(ONE, 6, 22), committed(TWO, 6, 99), committed(ONE, 7, 23))
    assert [(p.key, p.tree.base_len, p.epoch) for p in report.proposals] == [(ONE, 8, 0), (TWO, 7, 1)]


def test_without_anything_to_say_it_says_so(worker: DraftWorker) -> None:
    [proposed] = turn(worker, opened(ONE, (1, 2, 3))).proposals
    assert proposed.tree.guess() == []
    assert worker.stats.num_declined == 1


def test_a_paused_sequence_is_not_drafted_until_its_pause_ends(worker: DraftWorker) -> None:
    assert not turn(worker, opened(ONE, max_draft_tokens=0)).proposals
    assert not turn(worker, committed(ONE, 6, 22)).proposals
    [proposed] = turn(worker, Limited(ONE, Speculation(2), 3.0)).proposals
    assert (proposed.tree.base_len, proposed.tree.guess()) == (7, [23, 20])
    assert not turn(worker, committed(ONE, 7, 23), Limited(ONE, Speculation(0), 4.0)).proposals


def test_a_smaller_limit_needs_no_new_proposal(worker: DraftWorker) -> None:
    turn(worker, opened(ONE))
    assert not turn(worker, Limited(ONE, Speculation(1), 3.0)).proposals
    [proposed] = turn(worker, committed(ONE, 6, 22)).proposals
    assert proposed.tree.guess() == [23]


@pytest.mark.parametrize("base_len", [5, 7, 1000])
def test_a_commit_that_does_not_fit_ends_its_sequence_and_no_other(worker: DraftWorker, base_len: int) -> None:
    turn(worker, opened(ONE), opened(TWO))
    report = turn(worker, committed(ONE, base_len, 99), committed(TWO, 6, 22))
    assert failed(report) == [(ONE, "COMMIT_MISMATCH", Code.INVALID_ARGUMENT)]
    assert [p.key for p in report.proposals] == [TWO]


def test_messages_about_unknown_sequences_are_counted_and_ignored(worker: DraftWorker) -> None:
    report = turn(worker, committed(ONE, 6, 22), Limited(ONE, Speculation(3), 1.0), Closed(ONE))
    assert not report.proposals and not report.failures
    assert worker.stats.num_unknown == 3


def test_a_refused_message_ends_its_sequence(worker: DraftWorker) -> None:
    turn(worker, opened(ONE))
    report = turn(worker, Refused(ONE, InvalidRequest("token_ids", "bad")))
    assert failed(report) == [(ONE, "INVALID_FIELD", Code.INVALID_ARGUMENT)]
    turn(worker, committed(ONE, 6, 22))
    assert worker.stats.num_unknown == 1


def test_an_id_opened_twice_ends_both(worker: DraftWorker) -> None:
    report = turn(worker, opened(ONE), opened(ONE))
    assert [(key, code) for key, _, code in failed(report)] == [(ONE, Code.INVALID_ARGUMENT)]
    assert not report.proposals


def test_the_same_id_on_another_stream_is_another_sequence(worker: DraftWorker) -> None:
    elsewhere = SequenceKey(2, 1)
    report = turn(worker, opened(ONE), opened(elsewhere, (1, 2, 1, 2)))
    assert [p.tree.guess() for p in report.proposals] == [[22, 23, 20], [1, 2, 1]]


def test_one_opening_too_many_is_refused(worker: DraftWorker) -> None:
    report = turn(worker, *(opened(SequenceKey(1, i)) for i in range(5)))
    assert failed(report) == [(SequenceKey(1, 4), "OVERLOADED", Code.RESOURCE_EXHAUSTED)]
    assert len(report.proposals) == 4


def test_the_end_of_a_stream_closes_what_was_opened_on_it(worker: DraftWorker) -> None:
    other = SequenceKey(2, 1)
    turn(worker, opened(ONE), opened(TWO), opened(other), PeerStreamEnded(1))
    assert worker.load.num_running == 1
    assert [p.key for p in turn(worker, committed(other, 6, 22)).proposals] == [other]


def test_a_finished_sequence_waits_only_for_its_close(worker: DraftWorker) -> None:
    turn(worker, opened(ONE))
    assert not turn(worker, committed(ONE, 6, 22, finished=True)).proposals
    assert worker.load.num_running == 0
    assert not turn(worker, Closed(ONE)).failures
    assert worker.stats.num_unknown == 0


def test_draining_refuses_openings_and_is_over_when_nothing_is_open(worker: DraftWorker) -> None:
    turn(worker, opened(ONE))
    report = turn(worker, DrainStarted(), opened(TWO), committed(ONE, 6, 22))
    assert failed(report) == [(TWO, "DRAINING", Code.UNAVAILABLE)]
    assert [p.key for p in report.proposals] == [ONE]
    assert not worker.load.drained
    turn(worker, Closed(ONE))
    assert worker.load.drained


def test_what_outlasts_the_drain_is_given_back(worker: DraftWorker) -> None:
    turn(worker, opened(ONE), DrainStarted())
    report = turn(worker, DrainExpired())
    assert failed(report) == [(ONE, "DRAINING", Code.UNAVAILABLE)]
    assert worker.load.drained


class FragileDrafter(NgramDrafter):
    """Breaks on one token."""

    def propose(self, sequences: Sequence[DraftSequence]) -> list[DraftTree | None]:
        if any(99 in sequence.tokens for sequence in sequences):
            raise RuntimeError("prompt: 99")
        return super().propose(sequences)


def test_a_sequence_that_breaks_the_round_ends_alone_and_tells_nothing_of_its_text() -> None:
    worker = DraftWorker(FragileDrafter(), max_sequences=4)
    report = turn(worker, opened(ONE), opened(TWO, (99, 98)))
    assert failed(report) == [(TWO, "INTERNAL", Code.INTERNAL)]
    assert "99" not in to_sequence_error(1, report.failures[0].error).message
    assert [p.key for p in report.proposals] == [ONE]
    assert worker.stats.num_round_failures == 1


class _Dead(NgramDrafter):
    """Its model fails whatever it is given."""

    def propose(self, sequences: Sequence[DraftSequence]) -> list[DraftTree | None]:
        raise RuntimeError("launch failed")

    def check(self) -> None:
        raise RuntimeError("launch failed")


def test_a_dead_drafter_fails_no_sequence() -> None:
    worker = DraftWorker(_Dead(), max_sequences=4)
    worker.apply(opened(ONE))
    for _ in range(3):
        with pytest.raises(WholeStepFailed):
            worker.step()
    assert not worker.take_report().failures and worker.load.num_running == 1


def test_what_sequences_took_of_the_rounds_is_all_their_time_and_a_closed_one_tells_the_rest() -> None:
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 0.001
        return now_s[0]

    worker = DraftWorker(NgramDrafter(), 4, clock)
    reports = [turn(worker, opened(ONE), opened(TWO)), turn(worker), turn(worker, committed(ONE, 6, 22))]
    two = worker._sequences.find(TWO)
    assert two is not None
    two.share_s += 0.5
    worker.stats.busy_s += 0.5
    reports.append(turn(worker, Closed(ONE), Closed(TWO)))
    proposed = sum(proposal.share_s for report in reports for proposal in report.proposals)
    rest = [each for report in reports for each in report.removed]
    assert (TWO, pytest.approx(0.5, abs=0.1)) in rest
    assert proposed + sum(share_s for _, share_s in rest) == pytest.approx(worker.stats.busy_s)
    [first, second] = reports[0].proposals
    assert first.share_s == second.share_s > 0
