"""Anthropic's client, whole and streamed."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic

from tests.e2e.clients.common import ASKED, SCHEMA, TURNS, check, result_of, run

TOOLS: Any = [{"name": "weather", "description": "Now.", "input_schema": SCHEMA}]


def main(url: str, model: str) -> None:
    client = Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    for streamed in (False, True):
        ASKED.clear()
        history: list[Any] = []
        check([turn(client, model, history, question, streamed=streamed) for question in TURNS])


def turn(client: Anthropic, model: str, history: list[Any], question: str, *, streamed: bool) -> str:
    history.append({"role": "user", "content": question})
    asked: Any = {"model": model, "max_tokens": 200, "tools": TOOLS, "system": "Be brief."}
    while True:
        assert client.messages.count_tokens(model=model, messages=history, tools=TOOLS).input_tokens > 0
        if streamed:
            with client.messages.stream(messages=history, **asked) as stream:
                message: Any = stream.get_final_message()
        else:
            message = client.messages.create(messages=history, **asked)
        history.append({"role": "assistant", "content": message.content})
        uses = [block for block in message.content if block.type == "tool_use"]
        if not uses:
            return str(message.content[0].text)
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": result_of(use.input)} for use in uses]
        history.append({"role": "user", "content": results})


if __name__ == "__main__":
    run(main)
