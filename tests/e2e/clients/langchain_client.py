"""LangChain: tools, streams, structured output, its own error for a full context."""

from __future__ import annotations

from typing import Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.e2e.clients.common import MAX_TOKENS, QUESTION, TOO_LONG, City, run


@tool(args_schema=City)
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sun in {city}"


def main(url: str, model: str) -> None:
    llm = ChatOpenAI(model=model, base_url=url, api_key="none", max_retries=0)
    short = llm.bind(max_tokens=MAX_TOKENS)
    question = HumanMessage(QUESTION)
    called: Any = llm.bind_tools([weather], tool_choice="required").invoke([question])
    assert called.tool_calls[0]["name"] == "weather", called
    results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in called.tool_calls]
    answer = short.invoke([question, called, *results])
    assert answer.content
    streamed = None
    for chunk in short.stream([question, called, *results, answer, question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None and streamed.content
    for method in ("json_schema", "function_calling"):
        assert isinstance(llm.with_structured_output(City, method=method).invoke(QUESTION), City)
    try:
        llm.invoke(TOO_LONG)
        raise AssertionError("a prompt that is too long was taken")
    except ContextOverflowError:
        pass


if __name__ == "__main__":
    run(main)
