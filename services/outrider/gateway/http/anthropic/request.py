"""`/v1/messages`: converts its requests into chats (Anthropic API reference, Messages)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from outrider.errors import InvalidRequest
from outrider.gateway.fields import ignored_of
from outrider.gateway.generation.requests import MAX_MESSAGES, ChatPrompt, Options, Prompt
from outrider.gateway.http.errors import HttpError, unsupported
from outrider.gateway.http.openai.foreign import UNSERVED
from outrider.gateway.http.openai.messages import message
from outrider.gateway.http.openai.schemas import Int, MessageBody, Strings, effort_of, flat_format
from outrider.gateway.http.openai.tools import tool_use
from outrider.gateway.tenants.quotas import prompt_tokens_of
from outrider.gateway.tools.structured import Structured
from outrider.gateway.tools.tools import ToolUse

Json = dict[str, Any]
_VERSION = "2023-06-01"
"""The first with named events. Later ones refuse more, and their answers have the same form."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_HOSTED = ("advisor", "code_execution", "mcp_toolset", "tool_search", "web_fetch", "web_search")
"""Tools that Anthropic's own servers run: the model is not told of them."""
_BLOCKS = {
    "text": ("type", "text"),
    "thinking": ("type", "thinking", "signature"),
    "redacted_thinking": ("type", "data"),
    "tool_use": ("type", "id", "name", "input"),
    "tool_result": ("type", "tool_use_id", "content", "is_error"),
}
"""The fields of each type of block."""
_OF_ROLE = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
_BILLING = "x-anthropic-billing-header"
"""With this begins a block of Claude Code's that differs in every request, and is not meant for the model."""


class CountTokensRequest(MessageBody):
    """The fields that the prompt comes from."""

    unserved: ClassVar[dict[str, tuple[Any, ...]]] = {name: UNSERVED[name] for name in UNSERVED if name != "system"} | {
        "container": (),
        "mcp_servers": ([],),
        "n": (1,),
        "prompt_logprobs": (),
        "response_format": (),
        "stop": (),
    }
    said: ClassVar[tuple[str, ...]] = (
        "betas",
        "cache_control",
        "context_management",
        "diagnostics",
        "inference_geo",
        "speed",
    )
    max_tokens_by_default: ClassVar[int | None] = None

    messages: list[Any]
    system: Any = None
    metadata: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None
    """Its name before `output_config.format`."""
    stop_sequences: Strings | None = None

    @classmethod
    def check_headers(cls, headers: Mapping[str, str]) -> None:
        version = headers.get("anthropic-version", _VERSION)
        if not _DATE.fullmatch(version) or version < _VERSION:
            raise HttpError(
                400, f"anthropic-version: {version[:40]!r} is not supported; it has to be {_VERSION} or later"
            )

    @property
    def num_tokens(self) -> float:
        """About how many tokens are read."""
        return prompt_tokens_of(len(str(self.messages)) + len(str(self.system)) + len(str(self.tools or "")))

    def client_name(self, field: str) -> str:
        plain = super().client_name(field)
        if plain == "stop" or plain.startswith("stop["):
            return plain.replace("stop", "stop_sequences", 1)
        return plain.replace(".function.parameters", ".input_schema").replace(".function", "")

    @property
    def effort(self) -> str | None:
        asked = effort_of("output_config.effort", (self.output_config or {}).get("effort"))
        return super().effort if asked is None else asked

    def to_prompts(self) -> list[Prompt]:
        return [self.to_chat()]

    def to_chat(self) -> ChatPrompt:
        """Raises InvalidRequest or HttpError."""
        self._over("output_config", self.output_config or {}, ("effort", "format"))
        messages = [message(where, each) for where, each in _merged(self._messages())]
        if messages and messages[-1]["role"] == "assistant":
            raise unsupported("messages", "ends with the assistant: an answer that is begun cannot be continued")
        variables = self._template_variables() or None
        return ChatPrompt(tuple(messages), tools=self.tool_use, variables=variables, reads_reasoning=True)

    @cached_property
    def tool_use(self) -> ToolUse | None:
        tools = [tool for i, given in enumerate(self.tools or ()) if (tool := self._tool(f"tools[{i}]", given))]
        choice, parallel = self.tool_choice, None
        if isinstance(choice, dict) and isinstance(choice.get("disable_parallel_tool_use"), bool):
            parallel = not choice["disable_parallel_tool_use"]
            choice = {name: value for name, value in choice.items() if name != "disable_parallel_tool_use"}
        return tool_use(tools, choice, parallel)

    def _formats(self) -> Iterator[Structured]:
        for where, asked in (
            ("output_config.format", (self.output_config or {}).get("format")),
            ("output_format", self.output_format),
        ):
            if asked is not None and (found := flat_format(where, asked)):
                yield found
        yield from super()._formats()

    def _options(self) -> Options:
        return replace(super()._options(), stop=tuple(self.stop_sequences or ()))

    def _over(self, where: str, given: Json, known: tuple[str, ...]) -> None:
        """Notes fields that are not looked at, each once: clients mark every block."""
        for place in ignored_of(where, given, known):
            if (name := place.removeprefix(f"{where}.")) not in self._ignored:
                self._ignored.append(name)

    def _tool(self, where: str, tool: Any) -> Json | None:
        """The tool in the form of a chat; None for one that is left out."""
        if not isinstance(tool, dict):
            raise InvalidRequest(where, "has to be an object")
        kind = tool.get("type") or "custom"
        if isinstance(kind, str) and kind.startswith(_HOSTED):
            self._ignored.append(where)
            return None
        if kind != "custom":
            raise unsupported(f"{where}.type", f"{str(kind)[:100]!r} is not supported, only custom is")
        for name in ("name", "input_schema"):
            if name not in tool:
                raise InvalidRequest(f"{where}.{name}", "is missing")
        self._over(where, tool, ("type", "name", "description", "input_schema", "strict"))
        function = {name: tool.get(name) for name in ("name", "description", "strict")}
        return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}

    def _messages(self) -> Iterator[tuple[str, Json]]:
        """Each with its place in the request."""
        if self.system is not None:
            texts = [block["text"] for _, block in self._blocks("system", self.system, "system")]
            if kept := [text for text in texts if not text.startswith(_BILLING)]:
                yield "system", {"role": "system", "content": "\n".join(kept)}
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            raise InvalidRequest("messages", f"{len(self.messages)} messages; 1 to {MAX_MESSAGES} are allowed")
        begun = False
        for i, given in enumerate(self.messages):
            where = f"messages[{i}]"
            role = given.get("role") if isinstance(given, dict) else None
            if not isinstance(role, str) or role not in _OF_ROLE:
                raise InvalidRequest(f"{where}.role", f"has to be one of {', '.join(_OF_ROLE)}")
            self._over(where, given, ("role", "content"))
            blocks = self._blocks(f"{where}.content", given.get("content"), role)
            begun |= role != "system"
            for said in _assistant(blocks) if role == "assistant" else _user(role, blocks, begun=begun):
                yield where, said

    def _blocks(self, where: str, content: Any, role: str) -> Iterator[tuple[str, Json]]:
        """The blocks with their places, checked."""
        if isinstance(content, str):
            yield where, {"type": "text", "text": content}
            return
        if not isinstance(content, list):
            raise InvalidRequest(where, "has to be a text or a list of blocks")
        for i, block in enumerate(content):
            place = f"{where}[{i}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if not isinstance(kind, str):
                raise InvalidRequest(f"{place}.type", "is missing")
            if kind not in _OF_ROLE.get(role, ("text",)):
                raise unsupported(f"{place}.type", f"{kind[:100]!r} is not supported in what the {role} says")
            self._over(place, block, _BLOCKS[kind])
            if kind == "tool_result":
                block = block | {"content": self._result(f"{place}.content", block.get("content"))}
            yield place, _checked(place, block)

    def _result(self, where: str, content: Any) -> str:
        blocks = self._blocks(where, "" if content is None else content, "tool")
        return "\n".join(block["text"] for _, block in blocks)


class MessagesRequest(CountTokensRequest):
    max_tokens: Int

    @property
    def token_limit(self) -> int | None:
        """None: where the context ends earlier, the answer does, and says so."""
        if self.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"has to be at least 1, got {self.max_tokens}")
        return None

    @property
    def default_max_tokens(self) -> int | None:
        return self.max_tokens


_NEEDED = {"text": "text", "thinking": "thinking", "tool_use": "name", "tool_result": "tool_use_id"}
"""The field of each type of block that has to be a text."""


def _checked(place: str, block: Json) -> Json:
    kind = block["type"]
    for name in (_NEEDED.get(kind), "id" if kind == "tool_use" else None):
        if name and not isinstance(block.get(name), str):
            raise InvalidRequest(f"{place}.{name}", "has to be a string")
    if kind == "tool_use" and not isinstance(block.get("input"), dict):
        raise InvalidRequest(f"{place}.input", "has to be an object")
    return block


def _user(role: str, blocks: Iterable[tuple[str, Json]], *, begun: bool) -> Iterator[Json]:
    """Results of tools are messages of their own. Many templates refuse a system message once the conversation has
    begun: it is then put into the user's turn, as Claude Code marks such texts there.
    """
    for _, block in blocks:
        if block["type"] == "tool_result":
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"]}
        elif role == "system" and begun:
            yield {"role": "user", "content": f"<system-reminder>\n{block['text']}\n</system-reminder>"}
        else:
            yield {"role": role, "content": block["text"]}


def _assistant(blocks: Iterable[tuple[str, Json]]) -> Iterator[Json]:
    for _, block in blocks:
        said: Json = {"role": "assistant", "content": ""}
        match block["type"]:
            case "text":
                said["content"] = block["text"]
            case "thinking":
                said["reasoning_content"] = block["thinking"]
            case "tool_use":
                function = {"name": block["name"], "arguments": block["input"]}
                said["tool_calls"] = [{"id": block["id"], "type": "function", "function": function}]
        yield said


def _merged(messages: Iterable[tuple[str, Json]]) -> Iterator[tuple[str, Json]]:
    """Joins what one side says in several blocks and messages: chat templates expect turns."""
    place, turn = "", list[Json]()
    for where, said in messages:
        if turn and (said["role"] != turn[0]["role"] or said["role"] == "tool"):
            yield place, _joined(turn)
            turn = []
        place = place if turn else where
        turn.append(said)
    if turn:
        yield place, _joined(turn)


def _joined(turn: Sequence[Json]) -> Json:
    texts = {
        name: "\n".join(filter(None, (said.get(name) for said in turn)))
        for name in ("content", "reasoning_content")
        if any(name in said for said in turn)
    }
    calls = [call for said in turn for call in said.get("tool_calls", ())]
    return turn[0] | texts | ({"tool_calls": calls} if calls else {})
