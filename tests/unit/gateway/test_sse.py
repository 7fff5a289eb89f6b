"""What a stream sends while there is nothing to say, in virtual time, and what a line of it may not hold."""

from __future__ import annotations

import asyncio
import heapq
import json
from itertools import count
from types import SimpleNamespace
from typing import Any

from outrider.gateway.http.sse import COMMENT, COMMENT_EVERY_S, OPEN_AFTER_S, AnswerEvents, event


class Time:
    """A clock that moves only when everybody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + delay_s, next(self._order), woken))
        await woken

    async def until(self, end_s: float) -> None:
        """Moves on, and lets all who wake by then go on."""
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            self.now_s, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
            await settle()
        self.now_s = end_s


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Sent:
    """What was sent, with its time."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self.messages: list[tuple[float, Any]] = []

    async def __call__(self, message: Any) -> None:
        self.messages.append((self._time.now_s, message.get("body", message.get("status"))))


async def test_headers_do_not_wait_for_the_first_token_and_silence_is_broken_by_comments() -> None:
    time = Time()
    sent = Sent(time)
    stream = AnswerEvents(sent, time.clock, time.sleep)
    async with stream.kept_open(SimpleNamespace(id="id")):
        await time.until(OPEN_AFTER_S / 2)
        assert sent.messages == [], "a refusal may still have its own status"
        await time.until(40.0)
        await stream.say(b"token")
        await time.until(56.0)
    await stream.close()
    first, second = (OPEN_AFTER_S + n * COMMENT_EVERY_S for n in (1, 2))
    assert sent.messages == [
        *[(OPEN_AFTER_S, 200), (first, COMMENT), (second, COMMENT)],
        *[(40.0, b"token"), (40.0 + COMMENT_EVERY_S, COMMENT), (56.0, b"")],
    ]


async def test_a_stream_with_something_to_say_has_no_comments() -> None:
    time = Time()
    sent = Sent(time)
    stream = AnswerEvents(sent, time.clock, time.sleep)
    async with stream.kept_open(SimpleNamespace(id="id")):
        for at in range(60):
            await time.until(at)
            await stream.say(b"token")
    assert [body for _, body in sent.messages] == [200, *[b"token"] * 60]
    assert stream.num_events == 60


def test_an_event_is_one_line_for_whoever_splits_it() -> None:
    text = "".join(map(chr, range(0x3000))) + "\U0001f600"
    data = event({"text": text}).decode()
    assert data.removesuffix("\n\n").splitlines() == [data.removesuffix("\n\n")]
    assert json.loads(data.removeprefix("data: ")) == {"text": text}


def test_an_event_is_json_whatever_numbers_a_request_or_a_model_has_written() -> None:
    assert event({"input": {"a": float("inf"), "b": float("nan")}}) == b'data: {"input":{"a":null,"b":null}}\n\n'
