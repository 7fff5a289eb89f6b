"""Instructor: an object in each of three turns, by a tool and by a schema."""

from __future__ import annotations

from typing import Any

import instructor
from openai import OpenAI

from tests.e2e.clients.common import City, run


def main(url: str, model: str) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
        history: list[Any] = []
        for city in ("Bern", "Rome", "Bern"):
            history.append({"role": "user", "content": f"Which city is {city}?"})
            found, answer = client.create_with_completion(
                model=model, messages=history, response_model=City, max_retries=1
            )
            assert found.city == city, found
            message = answer.choices[0].message
            history.append(message.model_dump())
            history += [
                {"role": "tool", "tool_call_id": call.id, "content": "Noted."} for call in message.tool_calls or ()
            ]


if __name__ == "__main__":
    run(main)
