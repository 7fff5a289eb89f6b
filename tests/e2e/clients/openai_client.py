"""OpenAI's client: chats, streamed, and responses."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from tests.e2e.clients.common import ASKED, TURNS, WEATHER, check, result_of, run


def main(url: str, model: str) -> None:
    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    for turn in (chat, responses):
        ASKED.clear()
        history: list[Any] = []
        check([turn(client, model, history, question) for question in TURNS])


def chat(client: OpenAI, model: str, history: list[Any], question: str) -> str:
    history.append({"role": "user", "content": question})
    tools: Any = [{"type": "function", "function": WEATHER}]
    while True:
        with client.chat.completions.stream(model=model, messages=history, tools=tools) as stream:
            message: Any = stream.get_final_completion().choices[0].message
        history.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            result = result_of(call.function.arguments)
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses(client: OpenAI, model: str, history: list[Any], question: str) -> str:
    history.append({"role": "user", "content": question})
    tools: Any = [{"type": "function", **WEATHER}]
    while True:
        with client.responses.stream(model=model, input=history, tools=tools, store=False) as stream:
            answer: Any = stream.get_final_response()
        history += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return str(answer.output_text)
        for call in calls:
            result = result_of(call.arguments)
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


if __name__ == "__main__":
    run(main)
