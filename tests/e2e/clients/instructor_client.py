"""Instructor: answers as objects, by tools and by a schema, whole and growing."""

from __future__ import annotations

import instructor
from openai import OpenAI

from tests.e2e.clients.common import QUESTION, City, run


def main(url: str, model: str) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
        asked = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_retries": 1}
        assert isinstance(client.create(response_model=City, **asked), City)
        *_, last = client.create_partial(response_model=City, **asked)
        assert last.city in ("Bern", "Rome"), last


if __name__ == "__main__":
    run(main)
