"""Pydantic AI, streamed, over chats and over responses, and an object by a schema."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.e2e.clients.common import ASKED, CITY, TURNS, City, check, run, weather


def main(url: str, model: str) -> None:
    asyncio.run(sessions(url, model))


async def sessions(url: str, model: str) -> None:
    provider = OpenAIProvider(base_url=url, api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        ASKED.clear()
        agent = Agent(kind(model, provider=provider), tools=[weather])
        history: Any = None
        answers = []
        for question in TURNS:
            async with agent.run_stream(question, message_history=history) as stream:
                answers.append(await stream.get_output())
            history = stream.all_messages()
        check(answers)
        given = await Agent(kind(model, provider=provider), output_type=NativeOutput(City)).run(CITY)
        assert given.output == City(city="Bern")


if __name__ == "__main__":
    run(main)
