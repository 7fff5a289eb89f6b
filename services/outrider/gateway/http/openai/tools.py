"""Reads and checks `tools`, `tool_choice` and `parallel_tool_calls` of OpenAI's API, and the older `functions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.errors import InvalidRequest
from outrider.gateway.fields import ignore_unknown
from outrider.gateway.http.errors import unsupported
from outrider.gateway.tools.tools import MAX_TOOLS, ToolUse

_FUNCTION = ("name", "description", "parameters", "strict")


def tool_use(
    tools: list[Any] | None, choice: Any, parallel: bool | None, places: Sequence[str] | None = None
) -> ToolUse | None:
    """None if no tool may be called. `places`: of the tools, if not those of a list. Raises InvalidRequest or
    HttpError, naming the field."""
    places = [f"tools[{i}]" for i in range(len(tools or ()))] if places is None else places
    definitions = tuple(_definition(where, tool) for where, tool in zip(places, tools or (), strict=True))
    choice = _plain(choice)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        names, choice = _allowed("tool_choice.allowed_tools", choice.get("allowed_tools"))
        definitions = _only(definitions, names)
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


def _plain(choice: Any) -> Any:
    """The choice in the form of chats, of one in the form of Anthropic, Mistral or Responses that says the same."""
    match choice:
        case "any" | {"type": "any"}:
            return "required"
        case {"type": "none" | "auto" | "required" as kind}:
            return kind
        case {"type": "function" | "tool", "name": str(name)} if "function" not in choice:
            return {"type": "function", "function": {"name": name}}
    return choice


def function_use(functions: list[Any], choice: Any) -> ToolUse | None:
    """The older form of tools. None if none may be called. Raises InvalidRequest, naming the field."""
    where = "function_call"
    definitions = tuple(_described(f"functions[{i}]", each) for i, each in enumerate(functions))
    match choice:
        case "none":
            return None
        case None | "auto":
            return ToolUse(definitions, parallel=False, legacy=True)
        case {"name": str(name)}:
            ignore_unknown(where, choice, ("name",))
            return ToolUse(definitions, "named", name, parallel=False, legacy=True)
    raise InvalidRequest(where, "has to be none, auto, or an object with name")


def _allowed(where: str, asked: Any) -> tuple[dict[str, str], str]:
    """The names of the tools that may be called, with the field of each, and the choice among them."""
    if not isinstance(asked, dict) or not isinstance(asked.get("tools"), list) or not asked["tools"]:
        raise InvalidRequest(where, "has to be an object with mode and tools")
    ignore_unknown(where, asked, ("mode", "tools"))
    if (mode := asked.get("mode")) not in ("auto", "required"):
        raise InvalidRequest(f"{where}.mode", "has to be auto or required")
    if len(asked["tools"]) > MAX_TOOLS:
        raise InvalidRequest(f"{where}.tools", f"{len(asked['tools'])} tools; at most {MAX_TOOLS} are allowed")
    names = {}
    for i, tool in enumerate(asked["tools"]):
        names[_function_of(f"{where}.tools[{i}]", tool)["name"]] = f"{where}.tools[{i}].function.name"
    return names, mode


def _only(definitions: tuple[dict[str, Any], ...], names: dict[str, str]) -> tuple[dict[str, Any], ...]:
    """The model is not shown what it may not call."""
    declared = {each["function"]["name"] for each in definitions}
    for name, where in names.items():
        if name not in declared:
            raise InvalidRequest(where, f"no tool is named {name[:100]!r}")
    return tuple(each for each in definitions if each["function"]["name"] in names)


def _named(choice: Any) -> str | None:
    if choice in (None, "none", "auto", "required"):
        return None
    where = "tool_choice"
    if not isinstance(choice, dict):
        raise InvalidRequest(where, "has to be none, auto, required, or an object that names a function")
    function = _function_of(where, choice)
    ignore_unknown(f"{where}.function", function, ("name",))
    return str(function["name"])


def _definition(where: str, tool: Any) -> dict[str, Any]:
    return _described(f"{where}.function", _function_of(where, tool))


def _function_of(where: str, tool: Any) -> dict[str, Any]:
    """The function, with a name, of a tool or of what refers to one."""
    if not isinstance(tool, dict):
        raise InvalidRequest(where, "has to be an object with type and function")
    if (kind := tool.get("type")) is None:
        raise InvalidRequest(f"{where}.type", "is missing; it has to be function")
    if kind != "function":
        raise unsupported(f"{where}.type", f"{str(kind)[:100]!r} is not supported, only function is")
    ignore_unknown(where, tool, ("type", "function"))
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function", "has to be an object with name")
    return function


def _described(where: str, function: Any) -> dict[str, Any]:
    """The definition, in the form of chat templates."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(where, "has to be an object with name")
    ignore_unknown(where, function, _FUNCTION)
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"{where}.description", "has to be a string")
    if not isinstance(function.get("parameters"), dict | None):
        raise InvalidRequest(f"{where}.parameters", "has to be an object")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequest(f"{where}.strict", "has to be true or false")
    # `strict` is not shown to the model, and neither is what clients add for other servers.
    sent = {name: function[name] for name in _FUNCTION if name != "strict" and function.get(name) is not None}
    return {"type": "function", "function": sent}
