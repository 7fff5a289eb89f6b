"""The stock client of OpenAI: chats, tools, streams, parsed answers, responses."""

from __future__ import annotations

import json
from typing import Any

from openai import BadRequestError, OpenAI

from tests.e2e.clients.common import MAX_TOKENS, QUESTION, TOO_LONG, TOOL, WEATHER, City, run

USER: Any = {"role": "user", "content": QUESTION}


def main(url: str, model: str) -> None:
    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    chats(client, model)
    responses(client, model)
    try:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": TOO_LONG}])
        raise AssertionError("a prompt that is too long was taken")
    except BadRequestError as error:
        assert error.code == "context_length_exceeded", error


def chats(client: OpenAI, model: str) -> None:
    """Three turns: a call, its result, and one more question. Whole, streamed and parsed."""
    called = client.chat.completions.create(model=model, messages=[USER], tools=[TOOL], tool_choice="required")
    message = called.choices[0].message
    assert called.choices[0].finish_reason == "tool_calls" and message.tool_calls
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Bern", "Rome")
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Sun."} for call in message.tool_calls]
    turns: list[Any] = [USER, message, *results]
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=model, messages=turns, max_tokens=MAX_TOKENS, stream=True, stream_options=options
        )
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[-1].finish_reason in ("stop", "length") and chunks[-1].usage
    text = "".join(choice.delta.content or "" for choice in choices)
    turns += [{"role": "assistant", "content": text}, USER]
    parsed = client.chat.completions.parse(model=model, messages=turns, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)
    with client.chat.completions.stream(
        model=model, messages=turns, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}
    ) as stream:
        kinds = {event.type for event in stream}
    assert "tool_calls.function.arguments.done" in kinds, kinds


def responses(client: OpenAI, model: str) -> None:
    tool: Any = {"type": "function", **WEATHER}
    first = client.responses.create(model=model, input=QUESTION, tools=[tool], tool_choice="required")
    [call] = [item for item in first.output if item.type == "function_call"][:1]
    history: list[Any] = [USER, *first.output]
    history += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "Sun."}
        for item in first.output
        if item.type == "function_call"
    ]
    with client.responses.stream(model=model, input=history, max_output_tokens=MAX_TOKENS, store=False) as stream:
        events: list[Any] = list(stream)
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds
    assert events[-1].response.output_text and call.name == "weather"
    parsed = client.responses.parse(model=model, input=QUESTION, text_format=City)
    assert isinstance(parsed.output_parsed, City)


if __name__ == "__main__":
    run(main)
