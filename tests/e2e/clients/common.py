"""What all clients ask. The model is small, so every answer that is checked is forced by a grammar."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

QUESTION = "What is the weather in Bern?"
TOO_LONG = "word " * 20_000
MAX_TOKENS = 12


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
TOOL: Any = {"type": "function", "function": WEATHER}


def run(client: Callable[[str, str], None]) -> None:
    client(sys.argv[1], sys.argv[2])
