"""Paced streams in virtual time: packets tell nothing of accepted tokens, and an answer takes hardly longer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai._streaming import SSEDecoder
from outrider.gateway.generation.pacing import FRAME_BYTES, Beat
from outrider.gateway.grpc.service import padded
from outrider.gateway.http.sse import AnswerEvents, PacedStream, event, take_frame
from outrider.rpc.v1 import generation_pb2
from outrider.sim.clock import VirtualLoop, run_virtually

NUM_ROUNDS = 2000
ROUND_S = 0.03
CHOICES: Any = SimpleNamespace(
    id="r", answers=[SimpleNamespace(options=SimpleNamespace(logprobs=None, shows_logprobs=False))]
)


class Answer:
    """2,000 rounds: a passage is easy to draft or hard, and a step with more drafted tokens takes a bit longer."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, rng = seed, np.random.default_rng(seed)
        easy = np.repeat(rng.random(NUM_ROUNDS // 20) < 0.5, 20)
        self.accepted = rng.binomial(4, np.where(easy, 0.85, 0.3))
        self.round_s = ROUND_S * (1 + 0.02 * self.accepted + rng.normal(0, 0.03, NUM_ROUNDS).clip(-0.1, 0.1))
        self.texts = ["".join(f" word{i % 9}"[: rng.integers(2, 7)] for i in range(n + 1)) for n in self.accepted]

    @property
    def num_tokens(self) -> int:
        return int(self.accepted.sum()) + NUM_ROUNDS

    @property
    def s_per_token(self) -> float:
        return float(self.round_s.sum()) / self.num_tokens


class Wire:
    """What somebody between the two ends sees, and what the client gets."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.packets: list[tuple[float, int]] = []
        self.body = b""
        self._loop = loop

    async def send(self, message: Any) -> None:
        if data := message.get("body"):
            self.packets.append((self._loop.time(), len(data)))
            self.body += data


@cache
def streamed(seed: int, *, paced: bool) -> tuple[Wire, list[float]]:
    """And the time of each round."""
    loop, answer = VirtualLoop(), Answer(seed)
    wire, came, rng = Wire(loop), list[float](), np.random.default_rng(7)

    async def sleep(seconds: float) -> None:
        """A process wakes up a moment late."""
        await asyncio.sleep(seconds + float(rng.exponential(0.0005)))

    async def run() -> None:
        beat = Beat()
        for _ in range(500):
            beat.answered(answer.s_per_token)
        clock: dict[str, Any] = {"clock": loop.time, "sleep": sleep}
        stream = PacedStream(wire.send, **clock, beat_s=beat.s) if paced else AnswerEvents(wire.send, **clock)
        async with stream.kept_open(CHOICES):
            for text, round_s in zip(answer.texts, answer.round_s, strict=True):
                await asyncio.sleep(round_s)
                came.append(loop.time())
                await stream.say(event({"choices": [{"index": 0, "delta": {"content": text}}]}))
        await stream.close()

    run_virtually(run(), loop)
    assert not loop.unhandled
    return wire, came


def information(features: Sequence[Any], accepted: Sequence[int]) -> float:
    """Mutual information in bits, of the counts."""
    _, x = np.unique(np.array(features), axis=0, return_inverse=True)
    table = np.zeros((x.max() + 1, max(accepted) + 1))
    np.add.at(table, (x.ravel(), np.array(accepted)), 1)
    p = table / table.sum()
    outer = p.sum(1, keepdims=True) * p.sum(0, keepdims=True)
    return float((p[p > 0] * np.log2(p[p > 0] / outer[p > 0])).sum())


def p_value(features: Sequence[Any], accepted: Sequence[int], rounds: int = 200) -> float:
    """How often the information about shuffled counts is as high."""
    rng, real = np.random.default_rng(1), information(features, accepted)
    shuffled = [information(features, rng.permutation(accepted)) for _ in range(rounds)]
    return (1 + sum(each >= real for each in shuffled)) / (1 + rounds)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_packets_of_a_paced_stream_tell_nothing_of_accepted_tokens(seed: int) -> None:
    answer = Answer(seed)
    wire, _ = streamed(answer.seed, paced=True)
    times, sizes = zip(*wire.packets, strict=True)
    assert set(sizes) == {FRAME_BYTES}
    # As many packets for each round, of which the observer sees the number, the bytes, and the time to the next one.
    groups = np.array_split(np.arange(len(times)), NUM_ROUNDS)
    gaps = np.diff(times, append=times[-1])
    seen = [(len(each), sum(sizes[i] for i in each), round(gaps[each].sum() / 0.0005)) for each in groups]
    assert p_value(seen, answer.accepted) > 0.05


def test_the_same_test_finds_what_a_stream_without_pacing_tells() -> None:
    answer = Answer()
    wire, _ = streamed(answer.seed, paced=False)
    assert len(wire.packets) == NUM_ROUNDS
    times = [at for at, _ in wire.packets]
    for seen in (
        [(0, size // 4) for _, size in wire.packets],
        [(0, round(gap / 0.0005)) for gap in np.diff(times, prepend=times[0] - ROUND_S)],
    ):
        assert p_value(seen, answer.accepted) < 0.05


def test_an_answer_takes_a_tenth_longer_at_most_and_its_text_is_whole() -> None:
    answer = Answer()
    wire, came = streamed(answer.seed, paced=True)
    added = wire.packets[-1][0] - came[-1]
    assert added / answer.num_tokens <= 0.1 * answer.s_per_token
    assert read(wire.body) == "".join(answer.texts)


def read(body: bytes) -> str:
    """As OpenAI's client reads events."""
    events = SSEDecoder().iter_bytes(iter([body]))
    return "".join(json.loads(each.data)["choices"][0]["delta"]["content"] for each in events)


@pytest.mark.parametrize("left", [0, 1, 2, 3, 4, 100])
def test_a_frame_has_its_size_whatever_is_left_for_it(left: int) -> None:
    data = event({"choices": [{"index": 0, "delta": {"content": "x"}}]})
    unsent = bytearray(data)
    frame = take_frame(unsent, len(data) + left)
    assert len(frame) == len(data) + left and not unsent
    assert read(frame + data) == "xx"


def test_messages_over_grpc_are_filled_up_to_one_size() -> None:
    for length in range(2 * FRAME_BYTES):
        message = generation_pb2.StreamGenerateResponse(id="x", text="a" * length)
        size = padded(message).ByteSize()
        assert size % FRAME_BYTES == 0 and (size == FRAME_BYTES or length > FRAME_BYTES - 144)
