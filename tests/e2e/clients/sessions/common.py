"""The session that all clients have: the weather of two cities, asked of a tool, and thanks."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.clients.common import WEATHER, run

__all__ = ["ANSWERS", "ASKED", "SCHEMA", "TURNS", "WEATHER", "check", "result_of", "run", "weather"]

TURNS = ("What is the weather in Bern?", "And in Rome?", "Thanks!")
ANSWERS = ("It is sunny in Bern.", "It is sunny in Rome.", "You are welcome.")
SCHEMA: dict[str, Any] = WEATHER["parameters"]
ASKED: list[str] = []
"""The cities that the tool was asked for."""


def weather(city: str) -> str:
    """The weather of a city."""
    ASKED.append(city)
    return f"sun in {city}"


def result_of(arguments: str | dict[str, Any]) -> str:
    """The answer of the tool to a call."""
    return weather(**(json.loads(arguments) if isinstance(arguments, str) else arguments))


def check(answers: list[Any]) -> None:
    assert tuple(str(answer) for answer in answers) == ANSWERS, answers
    assert ASKED == ["Bern", "Rome"], ASKED
