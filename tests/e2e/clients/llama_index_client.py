"""LlamaIndex, through its client of servers like OpenAI's."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.e2e.clients.common import TURNS, check, run, weather


def main(url: str, model: str) -> None:
    llm = OpenAILike(
        model=model,
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        max_retries=0,
    )
    history: list[Any] = []
    check([turn(llm, history, question) for question in TURNS])


def turn(llm: OpenAILike, history: list[Any], question: str) -> Any:
    history.append(ChatMessage(role=MessageRole.USER, content=question))
    while True:
        *_, answer = llm.stream_chat_with_tools([FunctionTool.from_defaults(weather)], chat_history=history)
        history.append(answer.message)
        calls = llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
        if not calls:
            return answer.message.content
        for call in calls:
            result = weather(**call.tool_kwargs)
            known = {"tool_call_id": call.tool_id}
            history.append(ChatMessage(role=MessageRole.TOOL, content=result, additional_kwargs=known))


if __name__ == "__main__":
    run(main)
