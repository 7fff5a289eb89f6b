"""Converts conversations of OpenAI's clients into the form of chat templates."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from outrider.errors import InvalidRequest
from outrider.gateway.fields import check_names
from outrider.gateway.http.errors import unsupported
from outrider.gateway.tools import MAX_TOOLS

# OpenAI's newer name for instructions above the user's; templates have only the older one.
_ROLES = {"developer": "system"}
_FIELDS = {
    "system": ("name",),
    "user": ("name",),
    # vLLM has used both names for reasoning.
    "assistant": ("name", "tool_calls", "reasoning_content", "reasoning"),
    "tool": ("name", "tool_call_id"),
}
# A message may consist of one of these alone.
_WITHOUT_CONTENT = ("tool_calls", "reasoning_content", "reasoning")
# Fields of our answers that a client may send back, with their empty values.
_EMPTY: dict[str, tuple[Any, ...]] = {"refusal": (), "audio": (), "annotations": ([],), "function_call": ()}


def message(where: str, given: dict[str, Any]) -> dict[str, Any]:
    """Raises InvalidRequest or HttpError, naming the field."""
    role = given.get("role")
    role = _ROLES.get(role, role) if isinstance(role, str) else role
    if role == "function":
        raise unsupported(f"{where}.role", "'function' messages are not supported; send role tool")
    if not isinstance(role, str) or role not in _FIELDS:
        raise InvalidRequest(f"{where}.role", "has to be system, developer, user, assistant or tool")
    read: dict[str, Any] = {"role": role}
    for name, value in given.items():
        if name in ("role", "content") or value is None or value in _EMPTY.get(name, ()):
            continue
        if name in _EMPTY:
            raise unsupported(f"{where}.{name}", "is not supported")
        if name not in _FIELDS[role] and not (name == "tool_calls" and value == []):
            known = any(name in names for names in _FIELDS.values())
            raise InvalidRequest(f"{where}.{name}", f"is not for role {role}" if known else "unknown field")
        if name == "tool_calls":
            if value:
                read[name] = _tool_calls(f"{where}.{name}", value)
        elif not isinstance(value, str):
            raise InvalidRequest(f"{where}.{name}", "has to be a string")
        else:
            read[name] = value
    if role == "tool" and "tool_call_id" not in read:
        raise InvalidRequest(f"{where}.tool_call_id", "is missing: the call that this is the answer to")
    if given.get("content") is None and not read.keys().isdisjoint(_WITHOUT_CONTENT):
        return read | {"content": ""}
    # A tool without a result.
    if role == "tool" and given.get("content") == []:
        return read | {"content": ""}
    return read | {"content": _content(f"{where}.content", given.get("content"))}


def prediction(given: Any) -> str:
    """OpenAI's predicted output. Raises InvalidRequest."""
    if given is None:
        return ""
    if not isinstance(given, dict) or given.get("type") != "content":
        raise InvalidRequest("prediction", "has to be an object with type content, and content")
    check_names("prediction", given, ("type", "content"))
    return _content("prediction.content", given.get("content"))


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(where, "has to be a string or a list of text parts")
    return "".join(_text_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _text_part(where: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(where, "has to be an object with type and text")
    if part.get("type") != "text":
        raise unsupported(f"{where}.type", "only text parts are supported")
    check_names(where, part, ("type", "text"))
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text", "has to be a string")
    return str(part["text"])


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(where, "has to be a list of calls")
    if len(calls) > MAX_TOOLS:
        raise InvalidRequest(where, f"{len(calls)} calls; at most {MAX_TOOLS} are allowed")
    return [_tool_call(f"{where}[{i}]", call) for i, call in enumerate(calls)]


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise InvalidRequest(where, "has to be an object with type function")
    check_names(where, call, ("id", "type", "function", "index"))
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function", "has to be an object with name and arguments")
    if not isinstance(call.get("id"), str):
        raise InvalidRequest(f"{where}.id", "has to be a string")
    arguments = _arguments(f"{where}.function.arguments", function.get("arguments"))
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _arguments(where: str, arguments: Any) -> dict[str, Any]:
    """The arguments as an object for the template; clients send JSON in a string. Handles truncated arguments."""
    if not isinstance(arguments, str):
        raise InvalidRequest(where, "has to be a string of JSON")
    try:
        read = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError as error:
        raise InvalidRequest(where, f"is not valid JSON: {error}") from error
    if not isinstance(read, dict):
        raise InvalidRequest(where, "has to be a JSON object")
    return read
