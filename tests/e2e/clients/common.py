"""What all clients ask: a session of three turns about the weather of two cities, with a tool, and thanks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

TURNS = ("What is the weather in Bern?", "And in Rome?", "Thanks!")
ANSWERS = ("It is sunny in Bern.", "It is sunny in Rome.", "You are welcome.")
CITY = "Which city is Bern?"
"""Asks for a `City`."""
TOO_LONG = "word " * 20_000


class City(BaseModel):
    """A city."""

    city: Literal["Bern", "Rome"]


WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Bern", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
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


def run(client: Callable[[str, str], None]) -> None:
    client(sys.argv[1], sys.argv[2])
