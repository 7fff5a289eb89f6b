"""OpenAI's Agents SDK, over responses and over chats."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.e2e.clients.common import ASKED, TURNS, check, run, weather

set_tracing_disabled(True)


def main(url: str, model: str) -> None:
    asyncio.run(sessions(url, model))


async def sessions(url: str, model: str) -> None:
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        ASKED.clear()
        tools: list[Any] = [function_tool(weather, strict_mode=False)]
        agent = Agent("Agent", instructions="Be brief.", tools=tools, model=kind(model, client))
        history: list[Any] = []
        answers = []
        for question in TURNS:
            streamed = Runner.run_streamed(agent, [*history, {"role": "user", "content": question}])
            async for _ in streamed.stream_events():
                pass
            answers.append(streamed.final_output)
            history = streamed.to_input_list()
        check(answers)


if __name__ == "__main__":
    run(main)
