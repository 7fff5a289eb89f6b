"""Tasks that have to go on, and tasks that end together."""

from __future__ import annotations

import asyncio

import pytest
from outrider.runtime.supervision import Backoff, keep_running, until_first_ends


class Attempts:
    """Raises what it is given, one for each attempt, None for a good one; then waits for ever."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.reported: list[Exception] = []

    async def __call__(self) -> None:
        if not self.outcomes:
            await asyncio.Event().wait()
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome

    async def run(self, backoff: Backoff) -> None:
        """Until all outcomes have come, then cancelled."""
        running = asyncio.create_task(keep_running(self, backoff, self.reported.append))
        async with asyncio.timeout(60):
            while self.outcomes and not running.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_whatever_is_raised_is_reported_and_the_next_attempt_is_made() -> None:
    errors = [LookupError("a"), TypeError("b"), OSError("c")]
    attempts = Attempts(errors[0], None, *errors[1:])
    await attempts.run(Backoff(0.001, 0.002))
    assert attempts.reported == errors


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_reset() -> None:
    backoff = Backoff(1.0, 5.0)
    # Jitter takes up to half of each.
    for longest_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert longest_s / 2 <= backoff.pause_s() <= longest_s
    backoff.reset()
    assert backoff.pause_s() <= 1.0


async def test_the_first_end_ends_all_and_its_error_is_raised() -> None:
    ended = asyncio.Event()

    async def long() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def short() -> None:
        raise LookupError("why")

    before = asyncio.all_tasks()
    with pytest.raises(LookupError, match="why"):
        await until_first_ends(long(), short())
    assert ended.is_set()
    assert asyncio.all_tasks() == before


async def test_a_cancellation_from_elsewhere_is_an_error_and_not_the_end_of_whoever_waits() -> None:
    async def cancelled_by_a_library() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled_by_a_library"):
        await until_first_ends(cancelled_by_a_library())
