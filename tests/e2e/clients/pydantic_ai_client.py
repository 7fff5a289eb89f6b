"""Pydantic AI: objects by tools and by a schema, several turns, streams."""

from __future__ import annotations

import asyncio

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.e2e.clients.common import MAX_TOKENS, QUESTION, City, run


def main(url: str, model: str) -> None:
    asyncio.run(turns(OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))))


async def turns(model: OpenAIChatModel) -> None:
    by_tool = await Agent(model, output_type=City).run(QUESTION)
    assert isinstance(by_tool.output, City)
    by_schema = await Agent(model, output_type=NativeOutput(City)).run(QUESTION, message_history=by_tool.all_messages())
    assert isinstance(by_schema.output, City)
    plain = Agent(model, model_settings={"max_tokens": MAX_TOKENS})
    async with plain.run_stream(QUESTION, message_history=by_schema.all_messages()) as stream:
        assert await stream.get_output()


if __name__ == "__main__":
    run(main)
