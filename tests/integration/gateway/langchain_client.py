"""What LangChain does with a gateway, in an environment of its own: langchain_client.py URL MODEL. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def weather(city: str) -> str:
    """Now."""
    return f"rain in {city}"


class City(BaseModel):
    """A city."""

    city: str


def main(url: str, model: str) -> dict[str, Any]:
    llm = ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, max_retries=0)
    with_tools = llm.bind_tools([weather], strict=True)
    question = HumanMessage("What is the weather in Bern?")
    called = with_tools.invoke([question])
    results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in called.tool_calls]
    streamed = None
    for chunk in with_tools.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    return {
        "called": [(call["name"], call["args"]) for call in called.tool_calls],
        "streamed": [(call["name"], call["args"]) for call in streamed.tool_calls],
        "after results": llm.invoke([question, called, *results]).content,
        "structured": [
            llm.with_structured_output(City, method=method).invoke("Where?").city
            for method in ("json_schema", "function_calling")
        ],
        "either": llm.bind_tools([weather], response_format=City, strict=True).invoke("Where?").tool_calls[0]["name"],
        "text": llm.invoke("Hm?").content,
        "stream": "".join(chunk.content for chunk in llm.stream("Hm?")),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
