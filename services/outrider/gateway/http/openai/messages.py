"""Converts conversations of OpenAI's clients into the form of chat templates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from outrider.errors import InvalidRequest
from outrider.gateway.fields import check_names, ignore_unknown
from outrider.gateway.http.errors import unsupported

# OpenAI's newer name for instructions above the user's; templates have only the older one.
_ROLES = {"developer": "system"}
_FIELDS = {
    "system": ("name",),
    "user": ("name",),
    # vLLM has used both names for reasoning.
    "assistant": ("name", "tool_calls", "reasoning_content", "reasoning", "refusal"),
    "tool": ("name", "tool_call_id"),
}
# Fields of OpenAI's answers that mean something, which cannot be told to the model.
_UNSERVED = ("audio",)
# The field with the text of a part, by its type: also with the types of Responses, which clients send back to chats.
_TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Parts of an answer that are reasoning, by type, and the field with their text. Others wrote them for themselves.
_THOUGHTS = {"thinking": "thinking", "reasoning": "text", "redacted_thinking": "text"}
_MAX_CALLS = 8192
"""More than an answer has room for: what a model has written must be taken back."""
_KNOWN = (
    "role",
    "content",
    "function_call",
    *dict.fromkeys(name for names in _FIELDS.values() for name in names),
    *_UNSERVED,
)


def message(where: str, given: dict[str, Any]) -> dict[str, Any]:
    """Raises InvalidRequest or HttpError, naming the field."""
    role = given.get("role")
    role = _ROLES.get(role, role) if isinstance(role, str) else role
    if role == "function":
        role, given = "tool", _as_tool(where, given)
    elif role == "assistant" and given.get("function_call"):
        given = _with_call(where, given)
    if not isinstance(role, str) or role not in _FIELDS:
        raise InvalidRequest(f"{where}.role", "has to be system, developer, user, assistant, tool or function")
    ignore_unknown(where, given, _KNOWN)
    read: dict[str, Any] = {"role": role}
    for name in _KNOWN[2:]:
        if not _says_nothing(role, name, given.get(name)):
            read[name] = _field(f"{where}.{name}", role, name, given[name])
    if role == "tool" and "tool_call_id" not in read:
        raise InvalidRequest(f"{where}.tool_call_id", "is missing: the call that this is the answer to")
    content = given.get("content")
    if role == "assistant" and isinstance(content, list):
        content, thought = _without_reasoning(_without_calls(content, read.get("tool_calls", ())))
        read = thought | read
    # An answer may have no text, and a tool no result.
    if (role == "assistant" and content is None) or (role in ("assistant", "tool") and content == []):
        content = read.get("refusal", "")
    if role == "tool" and "content" in given and content is None:
        content = ""
    read.pop("refusal", None)
    return read | {"content": _content(f"{where}.content", content)}


def _as_tool(where: str, given: dict[str, Any]) -> dict[str, Any]:
    """The older form of a message with role tool."""
    if not isinstance(name := given.get("name"), str):
        raise InvalidRequest(f"{where}.name", "is missing: the function that this is the answer of")
    return given | {"tool_call_id": _id_of(name)}


def _with_call(where: str, given: dict[str, Any]) -> dict[str, Any]:
    """An answer with the older form of one call."""
    place = f"{where}.function_call"
    if given.get("tool_calls"):
        raise InvalidRequest(place, "cannot be combined with tool_calls")
    function = _function(place, given["function_call"])
    call = {"id": _id_of(function["name"]), "type": "function", "function": function}
    return {name: value for name, value in given.items() if name != "function_call"} | {"tool_calls": [call]}


def _id_of(name: str) -> str:
    """An id for the call of a function and its answer, which have none of their own. Mistral's templates accept only
    ids of nine characters."""
    return hashlib.blake2b(name.encode(errors="replace")).hexdigest()[:9]


def _says_nothing(role: str, name: str, value: Any) -> bool:
    """Clients that have one type for all messages send empty fields of other roles too."""
    return value is None or value in ([], {}) or (value == "" and name not in _FIELDS[role])


def _without_reasoning(parts: list[Any]) -> tuple[list[Any], dict[str, str]]:
    """The parts of an answer without those of its reasoning, and the reasoning."""
    texts = [text for each in parts if isinstance(text := _thought(each), str)]
    # A text in its place, so that errors number the parts as they were sent.
    rest = [each if _thought(each) is None else "" for each in parts]
    return rest, {"reasoning_content": "\n".join(texts)} if texts else {}


def _thought(part: Any) -> str | Literal[False] | None:
    """The text of a part that is reasoning; False without one, None of any other part."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _THOUGHTS:
        return None
    text = part.get(_THOUGHTS[kind])
    return text if isinstance(text, str) else False


def _without_calls(parts: list[Any], calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The parts without those that are calls in Anthropic's form, and which `tool_calls` has too."""
    ids = {call["id"] for call in calls}
    return ["" if _is_call(part) and str(part.get("id")) in ids else part for part in parts]


def _is_call(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "tool_use"


def _field(where: str, role: str, name: str, value: Any) -> Any:
    if name in _UNSERVED:
        raise unsupported(where, "is not supported")
    if name not in _FIELDS[role]:
        raise InvalidRequest(where, f"is not for role {role}")
    if name == "tool_calls":
        return _tool_calls(where, value)
    if not isinstance(value, str):
        raise InvalidRequest(where, "has to be a string")
    return value


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
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(where, "has to be an object with type and text")
    kind = part.get("type")
    name = _TEXT_OF.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise unsupported(f"{where}.type", "only text parts are supported")
    ignore_unknown(where, part, ("type", name))
    if not isinstance(part.get(name), str):
        raise InvalidRequest(f"{where}.{name}", "has to be a string")
    return str(part[name])


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(where, "has to be a list of calls")
    if len(calls) > _MAX_CALLS:
        raise InvalidRequest(where, f"{len(calls)} calls; at most {_MAX_CALLS} are allowed")
    return [_tool_call(f"{where}[{i}]", call) for i, call in enumerate(calls)]


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type") not in (None, "function"):
        raise InvalidRequest(where, "has to be an object with type function")
    ignore_unknown(where, call, ("id", "type", "function", "index"))
    function = _function(f"{where}.function", call.get("function"))
    if not isinstance(call.get("id"), str):
        raise InvalidRequest(f"{where}.id", "has to be a string")
    return {"id": call["id"], "type": "function", "function": function}


def _function(where: str, function: Any) -> dict[str, Any]:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(where, "has to be an object with name and arguments")
    ignore_unknown(where, function, ("name", "arguments"))
    return {"name": function["name"], "arguments": _arguments(f"{where}.arguments", function.get("arguments"))}


def _arguments(where: str, arguments: Any) -> dict[str, Any] | str:
    """As they came: JSON that the model wrote, which its template is given as an object or as this text."""
    if arguments is None or isinstance(arguments, dict):
        return arguments or {}
    if not isinstance(arguments, str):
        raise InvalidRequest(where, "has to be a string of JSON")
    return arguments or "{}"
