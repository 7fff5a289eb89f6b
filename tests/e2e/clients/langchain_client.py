"""LangChain: streamed, objects in both of its ways, and the error of a full context."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import BadRequestError

from tests.e2e.clients.common import CITY, TOO_LONG, TURNS, City, check, run, weather


def main(url: str, model: str) -> None:
    llm = ChatOpenAI(model=model, base_url=url, api_key="none", max_retries=0)
    bound = llm.bind_tools([tool(weather)], strict=True)
    history: list[Any] = []
    check([turn(bound, history, question) for question in TURNS])
    for method in ("json_schema", "function_calling"):
        assert llm.with_structured_output(City, method=method).invoke(CITY) == City(city="Bern")
    try:
        llm.invoke(TOO_LONG)
        raise AssertionError("a prompt that is too long was taken")
    except BadRequestError as error:
        # LangChain reads the code where OpenAI's client shows it: not in each of its releases.
        assert error.code == "context_length_exceeded", error


def turn(bound: Any, history: list[Any], question: str) -> Any:
    history.append(HumanMessage(question))
    while True:
        answer: Any = None
        for chunk in bound.stream(history):
            answer = chunk if answer is None else answer + chunk
        history.append(answer)
        if not answer.tool_calls:
            return answer.content
        history += [ToolMessage(weather(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]


if __name__ == "__main__":
    run(main)
