"""How long the target's steps take on this machine: measured for some numbers of sequences and rows, a line between."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.engine import Engine, EngineSequence, Row

_ROWS = (1, 2, 3, 5, 9)
"""Of each sequence."""
_REPEATS = 7
_CHUNK = 256

Clock = Callable[[], float]
Points = tuple[tuple[int, float], ...]
"""(rows, seconds), rows ascending."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """Seconds of a step."""

    decoding: dict[int, Points]
    """By the number of sequences, ascending."""
    prompt_s: float
    """The fixed part of a step that only reads prompts."""
    prompt_token_s: float

    def seconds(self, sequences: float, rows: float, prompt_tokens: int) -> float:
        """`rows`: of the `sequences` that decode or verify."""
        decoding_s = self._decoding_s(sequences, rows) if rows else self.prompt_s
        return decoding_s + prompt_tokens * self.prompt_token_s

    def _decoding_s(self, sequences: float, rows: float) -> float:
        points = tuple((count, on_line(line, rows)) for count, line in self.decoding.items())
        return on_line(points, sequences)


def on_line(points: Points, x: float) -> float:
    """Between two points, or on through the last two."""
    if len(points) == 1:
        return points[0][1]
    last = next((at for at in range(1, len(points) - 1) if points[at][0] >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[last - 1], points[last]
    # Never less than nothing, however far it goes on.
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), 0.0)


def quiet_clock(engine: Engine) -> Clock:
    """Seconds of this thread alone, where it does all the work: what else runs on the machine does not count."""
    alone = engine.info.device == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def measure_steps(engine: Engine, streams: Sequence[int], context: int) -> StepLine:
    """Steps of up to max(streams) sequences with `context` tokens each, or as many as the KV cache holds of them."""
    counts = sorted({*(1 << n for n in range(max(streams).bit_length()) if 1 << n <= max(streams)), *streams})
    sequences: list[EngineSequence] = []
    decoding = {}
    for count in counts:
        held = engine.info.num_blocks // count * engine.info.block_size - max(_ROWS)
        length = max(1, min(context, held))
        for sequence in sequences:
            engine.kv.rewind(sequence, length)
        sequences += [_prefilled(engine, length) for _ in range(count - len(sequences))]
        decoding[count] = tuple((count * rows, _step_s(engine, sequences, rows)) for rows in _ROWS)
    for sequence in sequences:
        engine.kv.close(sequence)
    short_s, long_s = _prompt_s(engine, _CHUNK // 4), _prompt_s(engine, _CHUNK)
    token_s = max(long_s - short_s, 0.0) / (_CHUNK - _CHUNK // 4)
    return StepLine(decoding, max(long_s - _CHUNK * token_s, 0.0), token_s)


def _prefilled(engine: Engine, context: int) -> EngineSequence:
    sequence = engine.kv.open([])
    for start in range(0, context, _CHUNK):
        engine.forward([Row(sequence, _tokens(engine, min(_CHUNK, context - start)), 0)])
    return sequence


def _step_s(engine: Engine, sequences: Sequence[EngineSequence], rows: int) -> float:
    """Each sequence runs one token and a draft of rows - 1."""
    length, ids = sequences[0].cached_len, _tokens(engine, rows)
    times = []
    for _ in range(_REPEATS):
        times.append(_forward_s(engine, [Row(each, ids, rows, parents=range(-1, rows - 2)) for each in sequences]))
        for sequence in sequences:
            engine.kv.rewind(sequence, length)
    return statistics.median(times)


def _prompt_s(engine: Engine, count: int) -> float:
    times = []
    for _ in range(_REPEATS):
        sequence = engine.kv.open([])
        times.append(_forward_s(engine, [Row(sequence, _tokens(engine, count), 1)]))
        engine.kv.close(sequence)
    return statistics.median(times)


def _forward_s(engine: Engine, rows: Sequence[Row]) -> float:
    clock = quiet_clock(engine)
    started_s = clock()
    engine.forward(rows)
    engine.wait()
    return clock() - started_s


def _tokens(engine: Engine, count: int) -> list[int]:
    return [7 * number % engine.info.vocab_size for number in range(1, count + 1)]
