"""What `outrider trace export` wrote, as texts and times for a virtual stack. Pure but for reading the file.

A round tells what its sources guessed at the positions that it verified, and whether that was right: together the
rounds of a request tell it for nearly each position, whatever the cap, the load and the network were. Where nothing was
verified, as after a draft that was right to its end, a guess is drawn from those of the same request.
"""

from __future__ import annotations

import json
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from outrider.sim.engine import Guess

from outrider_controller.whatif.stack import Times
from outrider_controller.whatif.texts import Text

VOCAB_SIZE = 64
_PROMPT, _RIGHT, _WRONG = 1, 7, 8
_MIN_CHANCE, _MAX_CHANCE = 0.02, 0.995
# Larger steps than these many tokens for a sequence read prompts too.
_MAX_ROWS = 16
Line = Mapping[str, Any]
Round = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recording:
    """The requests of a file: each with its rounds, the first of which read the prompt."""

    requests: Sequence[Line]

    @classmethod
    def read(cls, file: Path) -> Recording:
        """Raises ValueError that names the line."""
        found = []
        for number, text in enumerate(file.read_text().splitlines(), 1):
            try:
                line = json.loads(text)
                if line["schema"] != "outrider/rounds/v1":
                    raise ValueError(f"schema: {line['schema']!r} is not 'outrider/rounds/v1'")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}:{number}: not a line of `outrider trace export`: {error}") from None
            if len(line["rounds"]) > 1 and line["rounds"][0]["position"] == line["prompt_tokens"]:
                found.append(line)
        if not found:
            raise ValueError(f"{file}: no request with more than one round")
        return cls(found)

    @property
    def drafts(self) -> list[str]:
        """Models of the draft workers that served them."""
        return sorted({name for line in self.requests for name in _drafts(line)})

    def of(self, draft: str) -> Recording:
        """The requests that this draft served. Raises ValueError if there are none."""
        if not (found := [line for line in self.requests if draft in _drafts(line)]):
            asked = f"ask for one of {', '.join(self.drafts)}" if self.drafts else "no draft worker served any"
            record = f"`outrider rollout start {draft}` lets it serve some, to be exported then"
            raise ValueError(f"--draft {draft}: it served no request of the file; {asked}; {record}")
        return Recording(found)

    @property
    def steps(self) -> Iterator[Round]:
        """All rounds but the first of each request."""
        return (one for line in self.requests for one in line["rounds"][1:])

    @property
    def lookups(self) -> list[str]:
        """Sources in the target's own process."""
        return sorted({s["source"] for one in self.steps for s in one["sources"] if s["made_by"] == "target"})

    def texts(self) -> list[Text]:
        drafted = [_guessed(line) for line in self.requests]
        everywhere = [guess for by_source in drafted for guess in by_source.get("", {}).values()]
        return [
            _text(line, by_source, everywhere, random.Random(number))
            for number, (line, by_source) in enumerate(zip(self.requests, drafted, strict=True))
        ]

    def times(self) -> Times:
        return _Fit(self).times()


def _drafts(line: Line) -> set[str]:
    return {event["model"] for event in line["events"] if event["role"] == "draft" and event["event"] == "opened"}


def _guessed(line: Line) -> dict[str, dict[int, Guess]]:
    """By source, the draft worker's being "": place in the answer → its guess there."""
    found: dict[str, dict[int, Guess]] = defaultdict(dict)
    for one in line["rounds"]:
        own = {each["source"] for each in one["sources"] if each["made_by"] == "target"}
        drafted = zip(one["token_sources"], one["chances"], strict=False)
        for depth, (source, chance) in enumerate(list(drafted)[: one["verified"]]):
            token = _RIGHT if depth < one["accepted"] else _WRONG + (source in own)
            place = one["position"] - line["prompt_tokens"] + depth
            chance = min(max(chance, _MIN_CHANCE), _MAX_CHANCE)
            found[source if source in own else ""][place] = ((token, chance),)
            if token == _WRONG + 1 and len(own) < len(one["sources"]):
                # A right guess of the draft worker, in the same tree, would have been accepted here.
                found[""][place] = ((_WRONG, chance),)
    return found


def _text(
    line: Line, by_source: Mapping[str, Mapping[int, Guess]], everywhere: Sequence[Guess], chance: random.Random
) -> Text:
    length, known = max(2, line["output_tokens"]), by_source.get("", {})
    pool = list(known.values()) or everywhere
    return Text(
        prompt=[_PROMPT] * max(1, line["prompt_tokens"] - line["cached_tokens"]),
        answer=[_RIGHT] * length,
        guesses=[known.get(n) or (chance.choice(pool) if pool else ()) for n in range(length)],
        lookups={name: [at.get(n, ()) for n in range(length)] for name, at in by_source.items() if name},
        tenant=line["tenant"],
    )


@dataclass(slots=True)
class _Fit:
    """Times as lines through medians, because a few disturbed steps would turn them; then all steps together take as
    long as they took."""

    recording: Recording
    _steps: list[Round] = field(init=False)

    def __post_init__(self) -> None:
        self._steps = [s for s in self.recording.steps if s["batch_tokens"] <= _MAX_ROWS * s["batch_sequences"]]
        if not self._steps:
            raise ValueError("no round in the file tells the size of its step")

    def times(self) -> Times:
        base, each, row = self._as_long_as_measured(*self._step_line())
        row *= self._branch_rows()
        prompt = self._prompt_token_s(base, each)
        draft_base, draft_each = self._forward_line()
        reads = prompt * draft_base / base if base else 0.0
        return Times(
            target=lambda sequences, rows, tokens: base + each * sequences + row * (rows - sequences) + prompt * tokens,
            draft=lambda sequences, rows, tokens: draft_base + draft_each * sequences + reads * tokens,
            one_way_s=_median([one["wire_ms"] for one in self._by_draft()]) / 2e3,
            between_steps_s=_low([one["queue_ms"] for one in self._steps if not one["wait_ms"]]) / 1e3,
            between_s=_median([_before_s(line) for line in self.recording.requests]),
        )

    def _step_line(self) -> tuple[float, float, float]:
        """Seconds of a step, of each sequence in it, and of each row more."""
        cells: dict[tuple[int, int], list[float]] = defaultdict(list)
        for one in self._steps:
            cells[one["batch_sequences"], one["batch_tokens"] - one["batch_sequences"]].append(one["verify_ms"] / 1e3)
        points = [(n, rows, statistics.median(times), len(times)) for (n, rows), times in cells.items()]
        # One number of sequences tells nothing of what a sequence takes: as much as a row.
        base, row = _line([(n + rows, y, count) for n, rows, y, count in points])
        if len({n for n, _, _, _ in points}) == 1:
            return base, row, row
        found = _least_squares([(1.0, n, rows) for n, rows, _, _ in points], points)
        return (found[0], found[1], found[2]) if min(found) >= 0 else (base, row, row)

    def _as_long_as_measured(self, base: float, each: float, row: float) -> tuple[float, float, float]:
        sizes = [(one["batch_sequences"], one["batch_tokens"]) for one in self._steps]
        fitted = sum(base + each * n + row * (tokens - n) for n, tokens in sizes)
        scale = sum(float(one["verify_ms"]) for one in self._steps) / 1e3 / fitted
        return base * scale, each * scale, row * scale

    def _branch_rows(self) -> float:
        """Rows of drafted tokens for each drafted position: more than 1 where drafts are trees."""
        rows: float = sum(one["batch_tokens"] / one["batch_sequences"] - 1 for one in self._steps)
        drafted: int = sum(one["drafted"] for one in self._steps)
        return max(1.0, rows / max(1, drafted))

    def _prompt_token_s(self, base: float, each: float) -> float:
        firsts = [line["rounds"][0] for line in self.recording.requests]
        taken = [
            max(0.0, one["verify_ms"] / 1e3 - base - each * one["batch_sequences"]) / one["batch_tokens"]
            for one in firsts
            if one["batch_tokens"] > _MAX_ROWS * one["batch_sequences"]
        ]
        return _median(taken)

    def _by_draft(self) -> list[Round]:
        """Rounds whose tokens all came from a draft worker."""
        return [s for s in self._steps if s["draft_ms"] and all(one["made_by"] == "draft" for one in s["sources"])]

    def _forward_line(self) -> tuple[float, float]:
        """Seconds of a draft's forward, and of each sequence in it."""
        cells: dict[int, list[float]] = defaultdict(list)
        for one in self._by_draft():
            cells[one["batch_sequences"]].append(one["draft_ms"] / 1e3 / one["drafted"])
        if not cells:
            return 0.0, 0.0
        points = [(n, statistics.median(times), len(times)) for n, times in cells.items()]
        if len(points) == 1:
            return points[0][1], 0.0
        return _line(points)


def _line(points: Sequence[tuple[int, float, int]]) -> tuple[float, float]:
    """(x, y, weight) → intercept and slope, neither below 0."""
    if len({x for x, _, _ in points}) == 1:
        return statistics.median(y for _, y, _ in points), 0.0
    base, slope = _least_squares([(1.0, x) for x, _, _ in points], [(0, 0, y, count) for _, y, count in points])
    mean = sum(y * count for _, y, count in points) / sum(count for _, _, count in points)
    return (base, slope) if base >= 0 and slope >= 0 else (mean, 0.0)


def _least_squares(
    features: Sequence[Sequence[float]], points: Sequence[tuple[int, int, float, int]]
) -> tuple[float, ...]:
    """Weighted by the number of steps behind each point."""
    weights = np.sqrt([count for _, _, _, count in points])
    x, y = np.array(features) * weights[:, None], np.array([y for _, _, y, _ in points]) * weights
    return tuple(float(each) for each in np.linalg.lstsq(x, y, rcond=None)[0])


def _before_s(line: Line) -> float:
    """From the arrival of a request to the moment in which its first step could have begun."""
    first: Mapping[str, float] = line["rounds"][0]
    return max(0.0, first["at_ms"] - first["verify_ms"] - first["prefill_ms"] - first["queue_ms"]) / 1e3


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0


def _low(values: Iterable[float]) -> float:
    """The lower quartile: above it a sequence waited for a step of others."""
    found = sorted(values)
    return found[len(found) // 4] if found else 0.0
