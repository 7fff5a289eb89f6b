"""The measurements, as requests to the peers. Pure: the same prompts for all, made from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

Request = dict[str, Any]
"""{"do": the name of a measurement, ...its arguments}"""

# Ordinary tokens of any vocabulary, without the special ones at its start.
_FIRST_ID, _END_ID = 100, 30_000
# Context at which decoding starts. It grows to about 230, or less with fewer rounds: no subject can undo a step.
_CONTEXT = 190


@dataclass(frozen=True, slots=True)
class Measure:
    """A measurement that the subjects make in turns, once per round."""

    name: str
    each: Request
    before: tuple[Request, ...] = ()
    """Requests before the first round: open sequences, warm up."""
    after: tuple[Request, ...] = ()
    batch: int | None = None
    """Tokens per sample, if tokens/s are wanted."""


def tokens(count: int, seed: int) -> list[int]:
    """A random prompt: the time of a step does not depend on the text."""
    draw = random.Random(seed)
    return [draw.randrange(_FIRST_ID, _END_ID) for _ in range(count)]


def plan() -> list[Measure]:
    """All measures, in order."""
    return [
        decode(batch=1, steps=8),
        decode(batch=16, steps=6),
        decode(batch=32, steps=5),
        _prefill(1000),
    ]


def decode(batch: int, steps: int) -> Measure:
    """Steps that give each of some sequences a token."""
    prompts = [tokens(_CONTEXT, seed) for seed in range(batch)]
    opening = ({"do": "open", "prompts": prompts}, {"do": "decode", "steps": 3})
    each = {"do": "decode", "steps": steps}
    return Measure(f"decode {batch}", each, opening, ({"do": "close"},), batch=batch)


def _prefill(count: int) -> Measure:
    each = {"do": "prefill", "prompt": tokens(count, 1)}
    return Measure(f"prefill {count}", each, (each,))
