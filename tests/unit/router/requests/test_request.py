"""What a commit must be to count, and what it adds up to."""

from __future__ import annotations

from typing import Any

import pytest
from outrider.limits import MAX_DRAFT_TOKENS
from outrider.limits import MAX_DURATION_US as MAX_US
from outrider.protocol.sequences import opening_for_target
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.sequence.speculation import Speculation
from outrider_controller.router.request.state import BadReply
from outrider_controller.router.requests.sequences import ActiveRequest

from tests.unit.router.made_requests import a_request, under_way

VOCAB = 200


def begun(resume: tuple[int, ...] = (), max_new_tokens: int = 10) -> ActiveRequest:
    return under_way(a_request(committed=resume, max_new_tokens=max_new_tokens))


def response_to(
    active: ActiveRequest, message: sequence.Commit, step_us: int = 1, now_us: int = 2000
) -> router.RouteResponse:
    """What the client hears of a commit."""
    response = router.RouteResponse()
    active.new_response = lambda: response
    active.respond(message, active.apply(message, step_us=step_us, now_us=now_us))
    return response


def commit(base_len: int, token_ids: list[int], **fields: Any) -> sequence.Commit:
    return sequence.Commit(base_len=base_len, token_ids=token_ids, **fields)


def test_positions_strictly_increase_over_commits() -> None:
    active = begun()
    active.apply(commit(3, [4, 5]), step_us=7, now_us=1500)
    assert (active.state.committed, active.state.committed_len, active.state.remaining) == ([4, 5], 5, 8)
    active.apply(commit(5, [6]), step_us=7, now_us=1700)
    assert active.going_on.tokens == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "bad",
    [
        commit(2, [4]),
        commit(4, [4]),
        commit(3, []),
        commit(3, [VOCAB]),
        commit(3, [1] * 11),
        commit(3, [1] * 10),
        commit(3, [4], num_drafted=1, num_verified=2),
        commit(3, [4], num_drafted=2, num_verified=1, num_accepted=2),
        commit(3, [4], num_drafted=2, num_verified=2, num_accepted=2),
        commit(3, [4], num_drafted=MAX_DRAFT_TOKENS + 1),
        commit(3, [4], finish_reason=77),
        # What a trace would keep of it.
        commit(3, [4], num_drafted=1, chances=b"123"),
        commit(3, [4], num_drafted=1, sources=[sequence.SourceTokens()] * 17),
        commit(3, [], finish_reason=sequence.FINISH_REASON_STOP),
        *(
            commit(3, [4], **{name: 2**32 - 1})
            for name in ("num_drafted", "num_dropped", "num_cached_tokens", "queue_us", "prefill_us")
        ),
        *(
            commit(3, [4], draft_stats=sequence.DraftStats(**{"answer_us": 1, name: 2**32 - 1}))
            for name in ("draft_us", "compute_us", "wire_us", "answer_us", "answer_compute_us", "answer_tokens")
        ),
    ],
    ids=str,
)
def test_a_commit_that_cannot_be_true_changes_nothing(bad: sequence.Commit) -> None:
    active = begun()
    with pytest.raises(BadReply):
        active.apply(bad, step_us=1, now_us=2000)
    assert (active.state.committed, active.state.stats.num_steps, active.state.finished) == ([], 0, False)


def test_a_step_of_more_than_an_hour_is_not_believed() -> None:
    with pytest.raises(BadReply, match="duration"):
        begun().apply(commit(3, [4]), step_us=2**32 - 1, now_us=2000)


def test_what_passes_can_always_be_told() -> None:
    """The longest request of all, whose target says the most of everything in each round."""
    active = begun(max_new_tokens=1 << 17)
    most = {"queue_us": MAX_US, "wait_us": MAX_US, "prefill_us": MAX_US}
    active.state.stats.num_steps = (1 << 17) - 1
    active.state.stats.num_dropped_draft_tokens = active.state.stats.num_steps * (1 << 14)
    active.state.stats.verify_us = active.state.stats.queue_us = active.state.stats.num_steps * MAX_US
    last = commit(3, [99], num_dropped=1 << 14, finish_reason=sequence.FINISH_REASON_STOP, **most)
    assert response_to(active, last, step_us=MAX_US).metrics.num_dropped_draft_tokens == 1 << 31


def test_nothing_is_committed_after_the_finish() -> None:
    active = begun()
    active.apply(commit(3, [99], finish_reason=sequence.FINISH_REASON_STOP), step_us=1, now_us=2000)
    with pytest.raises(BadReply):
        active.apply(commit(4, [5]), step_us=1, now_us=3000)


def test_a_full_context_may_end_a_request_without_a_token() -> None:
    active = begun()
    response = response_to(active, commit(3, [], finish_reason=sequence.FINISH_REASON_LENGTH))
    assert active.state.finished and response.metrics.num_steps == 1


def test_an_opening_elsewhere_carries_prompt_committed_tokens_and_the_same_noise() -> None:
    active = begun(resume=(7,))
    active.apply(commit(4, [8, 9]), step_us=1, now_us=2000)
    opening = opening_for_target(active.request, 55, active.state.committed, Speculation(3), None)
    assert list(opening.prompt_token_ids) == [1, 2, 3]
    assert list(opening.committed_token_ids) == [7, 8, 9]
    assert (opening.sequence_id, opening.sampling.seed, opening.cache_salt) == (55, 9, b"salt")
    assert opening.mode == sequence.VERIFICATION_MODE_GREEDY


def test_a_round_is_timed_from_the_commit_before_and_charged_with_its_own_draft() -> None:
    active = begun()
    first = response_to(active, commit(3, [4], num_cached_tokens=2), step_us=300, now_us=1500)
    assert (first.timing.round_us, first.timing.draft_us, first.timing.verify_us) == (500, 0, 300)
    assert first.num_cached_tokens == 2
    second = response_to(
        active,
        commit(
            *(4, [5, 7]),
            num_drafted=2,
            num_verified=2,
            num_accepted=1,
            queue_us=11,
            num_cached_tokens=2,
            draft_stats=sequence.DraftStats(draft_us=70),
        ),
        step_us=200,
        now_us=2500,
    )
    assert second.num_cached_tokens == 0
    timing = second.timing
    assert (timing.round_us, timing.draft_us, timing.verify_us, timing.queue_us) == (1000, 70, 200, 11)


def test_sums_are_those_of_the_rounds() -> None:
    active = begun(max_new_tokens=20)
    active.apply(commit(3, [4]), step_us=100, now_us=2000)
    active.apply(commit(4, [5, 6, 7], num_drafted=3, num_verified=3, num_accepted=2), step_us=100, now_us=3000)
    active.apply(commit(7, [8], num_drafted=2, num_verified=1, num_dropped=4), step_us=100, now_us=4000)
    m = active.state.stats.to_proto()
    assert (m.num_steps, m.num_spec_steps) == (3, 2)
    assert (m.num_draft_tokens, m.num_verified_tokens, m.num_accepted_draft_tokens) == (5, 4, 2)
    assert list(m.acceptance_histogram) == [1, 0, 1]
    assert (m.num_dropped_draft_tokens, m.round_us, m.verify_us) == (4, 3000, 300)


@pytest.mark.parametrize(
    ("resume", "reason"),
    [
        ((), sequence.FINISH_REASON_UNSPECIFIED),
        ((4,), sequence.FINISH_REASON_UNSPECIFIED),
        ((4, 99), sequence.FINISH_REASON_STOP),
        ((99, 4), sequence.FINISH_REASON_UNSPECIFIED),
        ((4,) * 10, sequence.FINISH_REASON_LENGTH),
    ],
)
def test_resumed_tokens_may_already_end_the_request(
    resume: tuple[int, ...], reason: sequence.FinishReason.ValueType
) -> None:
    assert begun(resume).request.finish_reason == reason
