"""When a request goes on after a break, and when it gives up."""

from __future__ import annotations

import pytest
from outrider.errors import Code, make_error
from outrider.gateway.config import Failover
from outrider.gateway.generation.retry import RouterRetry

LIMITS = Failover(window_s=10, max_moves=2, first_pause_s=0.1, longest_pause_s=0.3)


def patience() -> RouterRetry:
    return RouterRetry(LIMITS, jitter=lambda: 1.0)


def test_the_first_break_is_followed_at_once_and_the_next_ever_later() -> None:
    request = patience()
    assert [request.pause_s(0) for _ in range(5)] == pytest.approx([0, 0.1, 0.2, 0.3, 0.3])


def test_it_gives_up_when_no_router_took_it_for_the_window_after_the_break() -> None:
    request = patience()
    assert request.pause_s(100) is not None
    assert request.pause_s(109.9) is not None
    assert request.pause_s(110) is None


def test_a_token_or_a_router_that_accepts_it_renews_its_patience() -> None:
    request = patience()
    request.pause_s(0)
    request.got_on()
    assert request.pause_s(50) == 0


def test_it_gives_up_on_a_request_that_loses_router_after_router() -> None:
    request = patience()
    pauses = []
    for now_s in range(3):
        request.got_on()
        pauses.append(request.pause_s(now_s))
    assert pauses == [0, 0, None]


def test_jitter_never_more_than_halves_a_pause() -> None:
    request = RouterRetry(LIMITS, jitter=lambda: 0.0)
    assert [request.pause_s(0), request.pause_s(0)] == pytest.approx([0, 0.05])


@pytest.mark.parametrize(
    ("code", "reason", "has_tokens", "expected"),
    [
        (Code.UNAVAILABLE, None, False, True),
        (Code.CANCELLED, None, True, True),
        (Code.INTERNAL, None, True, True),
        (Code.DEADLINE_EXCEEDED, None, True, False),
        (Code.UNAVAILABLE, "DRAINING", False, True),
        (Code.UNAVAILABLE, "NO_TARGET", True, False),
        (Code.UNAVAILABLE, "NO_MODEL", False, True),
        (Code.UNAVAILABLE, "NO_METADATA", True, True),
        (Code.UNAVAILABLE, "NO_TARGET_REACHED", True, True),
        (Code.NOT_FOUND, "UNKNOWN_MODEL", True, True),
        (Code.INTERNAL, "INTERNAL", True, False),
        (Code.INVALID_ARGUMENT, "INVALID_FIELD", True, False),
        (Code.RESOURCE_EXHAUSTED, "OVERLOADED", False, False),
        (Code.RESOURCE_EXHAUSTED, "OVERLOADED", True, True),
    ],
)
def test_another_router_is_asked_only_when_it_may_do_better(
    code: Code, reason: str | None, has_tokens: bool, expected: bool
) -> None:
    assert patience().goes_on(make_error(code, "x", reason=reason), has_tokens=has_tokens) is expected


def test_a_refusal_for_load_is_not_final_where_a_lost_router_may_have_accepted_the_request() -> None:
    full = make_error(Code.RESOURCE_EXHAUSTED, "x", reason="OVERLOADED")
    request = patience()
    assert request.goes_on(make_error(Code.UNAVAILABLE, "x", reason="DRAINING"), has_tokens=False)
    assert not request.goes_on(full, has_tokens=False)
    assert request.goes_on(make_error(Code.UNAVAILABLE, "x"), has_tokens=False)
    assert request.goes_on(full, has_tokens=False)
