"""`/v1/responses`: converts its requests into chats.

The gateway stores no responses, so a reference to a stored one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

from outrider.errors import InvalidRequest
from outrider.gateway.fields import ignore_unknown
from outrider.gateway.generation.requests import MAX_MESSAGES, ChatPrompt, Prompt
from outrider.gateway.http.errors import unsupported
from outrider.gateway.http.openai.foreign import UNSERVED
from outrider.gateway.http.openai.messages import message
from outrider.gateway.http.openai.schemas import Int, MessageBody, Strings, flat_format
from outrider.gateway.http.openai.tools import tool_use
from outrider.gateway.tools.structured import Structured
from outrider.gateway.tools.tools import MAX_TOOLS, ToolUse

_TEXT_PARTS = ("input_text", "output_text", "text")
# Types of tools that OpenAI's servers run, as they begin: models without them are not told of them.
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp")
# Parts of items that no answer has here, so that there is nothing to include.
_NEVER_INCLUDED = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
)


class ResponsesRequest(MessageBody):
    unserved: ClassVar[dict[str, tuple[Any, ...]]] = UNSERVED | {
        "background": (False,),
        "background_options": (),
        "access_programs": (),
        "context_management": (),
        "conversation": (),
        "image": (),
        "max_tokens": (),
        "moderation": (),
        "n": (1,),
        "previous_response_id": (),
        "prompt": (),
        "prompt_logprobs": (),
        "response_format": (),
        "top_logprobs": (0,),
    }
    max_tokens_by_default: ClassVar[int | None] = None

    input: Any
    instructions: str | None = None
    max_output_tokens: Int | None = None
    text: Any = None
    include: Strings | None = None
    max_tool_calls: Int | None = None
    """Of OpenAI's own tools, which are not served."""
    truncation: Literal["auto", "disabled"] | None = None
    """With both, an input that does not fit is refused."""
    # What Codex says of itself.
    client_metadata: dict[str, Any] | None = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def field_names(self) -> dict[str, str]:
        return super().field_names | {"messages": "input", "max_tokens": "max_output_tokens"}

    @property
    def format(self) -> dict[str, Any]:
        return (self.text or {}).get("format") or {"type": "text"}

    def to_prompts(self) -> list[Prompt]:
        messages = list(_messages(self.input))
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        self._check_include()
        variables = self._template_variables() or None
        return [ChatPrompt(tuple(messages), tools=self.tool_use, variables=variables, reads_reasoning=True)]

    def _check_include(self) -> None:
        for i, name in enumerate(self.include or ()):
            if name not in _NEVER_INCLUDED:
                raise unsupported(f"include[{i}]", f"{name[:100]!r} is not supported")

    @cached_property
    def tool_use(self) -> ToolUse | None:
        tools = {where: _nested(where, tool) for where, tool in self._functions}
        return tool_use([*tools.values()], _nested_choice(self.tool_choice), self.parallel_tool_calls, [*tools])

    @cached_property
    def namespaces(self) -> Namespaces:
        return Namespaces([(where, tool) for where, tool in self._tools if _is_of(tool, "namespace")])

    @property
    def _functions(self) -> Iterator[tuple[str, Any]]:
        """The tools, with those of namespaces among them, and the place of each."""
        for where, tool in self._tools:
            if not _is_of(tool, "namespace"):
                yield where, tool
                continue
            for i, each in enumerate(_members(where, tool)):
                yield f"{where}.tools[{i}]", self.namespaces.flat(tool["name"], each)

    @cached_property
    def _tools(self) -> list[tuple[str, Any]]:
        """Without those that nobody here can run, which the answer names."""
        tools = [(f"tools[{i}]", tool) for i, tool in enumerate(self.tools or ())]
        hosted = [where for where, tool in tools if _is_of(tool, *_HOSTED)]
        self._ignored.extend(hosted)
        return [(where, tool) for where, tool in tools if where not in hosted]

    def _formats(self) -> Iterator[Structured]:
        if (found := self._of_format()) is not None:
            yield found
        yield from super()._formats()

    def _of_format(self) -> Structured | None:
        if self.text is None:
            return None
        if not isinstance(self.text, dict):
            raise InvalidRequest("text", "has to be an object with format")
        # `verbosity` is for OpenAI's own models.
        ignore_unknown("text", self.text, ("format", "verbosity"))
        return flat_format("text.format", self.format)


class Namespaces:
    """Groups of functions. To the model they are plain functions, whose names have the group's before them."""

    def __init__(self, groups: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Each with its place."""
        names = [(str(group["name"]), each) for where, group in groups for each in _members(where, group)]
        self._of = {flat_name(group, each["name"]): (group, each["name"]) for group, each in names if _is_named(each)}
        """Namespace and name, by the name that the model knows."""

    @staticmethod
    def flat(namespace: str, tool: Any) -> Any:
        return tool | {"name": flat_name(namespace, tool["name"])} if _is_named(tool) else tool

    def called(self, name: str) -> dict[str, str]:
        """The fields of a call that say what is called."""
        namespace, own = self._of.get(name, ("", name))
        return {"name": own, "namespace": namespace} if namespace else {"name": own}


def _is_named(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("name"), str)


def flat_name(namespace: Any, name: Any) -> str:
    return f"{namespace}{'' if str(namespace).endswith('__') else '__'}{name}" if namespace else str(name)


def _is_of(tool: Any, *kinds: str) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith(kinds)


def _members(where: str, tool: Mapping[str, Any]) -> list[Any]:
    ignore_unknown(where, tool, ("type", "name", "description", "tools"))
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequest(f"{where}.name", "has to be a string")
    if not isinstance(tool.get("tools"), list):
        raise InvalidRequest(f"{where}.tools", "has to be a list of functions")
    members: list[Any] = tool["tools"]
    if len(members) > MAX_TOOLS:
        raise InvalidRequest(f"{where}.tools", f"{len(members)} tools; at most {MAX_TOOLS} are allowed")
    return members


def _nested_choice(choice: Any) -> Any:
    if not isinstance(choice, dict) or (kind := choice.get("type")) not in ("function", "allowed_tools"):
        return choice
    inner = {name: value for name, value in choice.items() if name != "type"}
    if isinstance(allowed := inner.get("tools"), list):
        inner["tools"] = [_nested(f"tool_choice.tools[{i}]", tool) for i, tool in enumerate(allowed)]
    return {"type": kind, kind: inner}


def _nested(where: str, tool: Any) -> Any:
    """The tool in the form of a chat; here the function's fields are flat."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    if not isinstance(tool.get("name"), str):
        raise InvalidRequest(f"{where}.name", "has to be a string")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _messages(given: Any) -> Iterable[dict[str, Any]]:
    if isinstance(given, str):
        yield message("input", {"role": "user", "content": given})
        return
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input", "has to be a text or a list of items")
    if len(given) > MAX_MESSAGES:
        raise InvalidRequest("input", f"{len(given)} items; at most {MAX_MESSAGES} are allowed")
    assistant: dict[str, Any] = {}
    """One turn of the assistant, whose reasoning, text and calls are separate items here."""
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise InvalidRequest(where, "has to be an object")
        added = _item(where, item)
        if added.get("role") == "assistant" and not (assistant.get("content") and added.get("content")):
            assistant = _joined(assistant, added)
            continue
        if assistant:
            yield message(where, assistant)
        assistant = added if added.get("role") == "assistant" else {}
        if not assistant:
            yield message(where, added)
    if assistant:
        yield message("input", assistant)


def _joined(turn: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    calls = [*turn.get("tool_calls", ()), *added.get("tool_calls", ())]
    thoughts = [said["reasoning_content"] for said in (turn, added) if said.get("reasoning_content")]
    joined = turn | {name: value for name, value in added.items() if value} | ({"tool_calls": calls} if calls else {})
    joined |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    # A turn with only reasoning, because it was cut off, has no text.
    return {"content": "" if "reasoning_content" in joined else None} | joined


def _item(where: str, item: dict[str, Any]) -> dict[str, Any]:
    """The item as a message of a chat, or a part of one."""
    kind = item.get("type") or "message"
    given = {name: value for name, value in item.items() if name not in ("type", "id", "status") and value is not None}
    match kind:
        case "message":
            if given.get("tool_calls"):
                raise InvalidRequest(f"{where}.tool_calls", "unknown field; calls are items of type function_call")
            given["content"] = _content(f"{where}.content", given.get("content"))
            return given
        case "function_call":
            _check(where, given, ("call_id", "name", "arguments", "namespace"))
            function = {"name": flat_name(given.get("namespace"), given["name"]), "arguments": given["arguments"]}
            return {"role": "assistant", "tool_calls": [{"id": given["call_id"], "function": function}]}
        case "function_call_output":
            _check(where, given, ("call_id", "output"))
            output = given["output"]
            if not isinstance(output, str | list):
                raise InvalidRequest(f"{where}.output", "has to be a string or a list of text parts")
            content = output if isinstance(output, str) else _content(f"{where}.output", output)
            return {"role": "tool", "tool_call_id": given["call_id"], "content": content}
        case "reasoning":
            name = "content" if given.get("content") else "summary"
            parts = given.get(name) or []
            if not isinstance(parts, list):
                raise InvalidRequest(f"{where}.{name}", "has to be a list of parts")
            texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
            return {"role": "assistant", "reasoning_content": "\n".join(texts)}
        case _:
            raise unsupported(f"{where}.type", f"{json.dumps(kind)[:100]} is not supported")


def _check(where: str, given: dict[str, Any], names: tuple[str, ...]) -> None:
    ignore_unknown(where, given, names)
    for name in names:
        if name != "namespace" and name not in given:
            raise InvalidRequest(f"{where}.{name}", "is missing")


def _content(where: str, content: Any) -> Any:
    """The content in the form of a chat."""
    if not isinstance(content, list):
        return content
    parts = []
    for i, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
            parts.append({"type": "text", "text": part.get("text")})
        elif isinstance(part, dict) and part.get("type") == "refusal":
            parts.append({"type": "refusal", "refusal": part.get("refusal")})
        elif isinstance(part, dict):
            raise unsupported(f"{where}[{i}].type", "only text parts are supported")
        else:
            parts.append(part)
    return parts
