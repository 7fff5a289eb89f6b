"""Reads and checks `tools`, `tool_choice` and `parallel_tool_calls` of OpenAI's API."""

from __future__ import annotations

from typing import Any

from outrider.errors import InvalidRequest
from outrider.gateway.fields import ignore_unknown
from outrider.gateway.http.errors import unsupported
from outrider.gateway.tools import ToolUse

_FUNCTION = ("name", "description", "parameters", "strict")


def tool_use(tools: list[Any] | None, choice: Any, parallel: bool | None) -> ToolUse | None:
    """None if no tool may be called. Raises InvalidRequest or HttpError, naming the field."""
    definitions = tuple(_definition(f"tools[{i}]", tool) for i, tool in enumerate(tools or ()))
    named = _named(choice)
    if not definitions:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "there are no tools")
        return None
    if choice == "none":
        return None
    if named is not None:
        return ToolUse(definitions, "named", named, parallel=False)
    strict = frozenset(tool["function"]["name"] for tool in tools or () if tool["function"].get("strict"))
    return ToolUse(
        definitions,
        "required" if choice == "required" else "auto",
        parallel=parallel is not False,
        strict=strict,
    )


def _named(choice: Any) -> str | None:
    if choice in (None, "none", "auto", "required"):
        return None
    where = "tool_choice"
    if not isinstance(choice, dict):
        raise InvalidRequest(where, "has to be none, auto, required, or an object that names a function")
    if choice.get("type") != "function":
        raise unsupported(f"{where}.type", "only function is supported")
    function = choice.get("function")
    ignore_unknown(where, choice, ("type", "function"))
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function", "has to be an object with name")
    ignore_unknown(f"{where}.function", function, ("name",))
    return str(function["name"])


def _definition(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidRequest(where, "has to be an object with type and function")
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type", "only function is supported")
    ignore_unknown(where, tool, ("type", "function"))
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function", "has to be an object with name")
    ignore_unknown(f"{where}.function", function, _FUNCTION)
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"{where}.function.description", "has to be a string")
    if not isinstance(function.get("parameters"), dict | None):
        raise InvalidRequest(f"{where}.function.parameters", "has to be an object")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequest(f"{where}.function.strict", "has to be true or false")
    # `strict` is not shown to the model, and neither is what clients add for other servers.
    sent = {name: function[name] for name in _FUNCTION if name != "strict" and function.get(name) is not None}
    return {"type": "function", "function": sent}
