"""How a model is shown texts, tools, calls and results, and how it writes calls: found by trying its chat template.

Marked texts, tools and calls are rendered, and looked for in what comes of it. Rendering is an argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from outrider.gateway.fields import from_json
from outrider.gateway.tokenizer.rendering import Render, TemplateOutOfBounds
from outrider.gateway.tokenizer.template import TemplateError
from outrider.gateway.tools.parsers.formats import FORMATS
from outrider.gateway.tools.parsers.tool_calls import Delta

Messages = Sequence[Mapping[str, Any]]
Definitions = Sequence[Mapping[str, Any]]
_MAX_NAMES = 24
_OF_CALLS = ("tool_calls", "tool_call_id", "function_call")
"""Members of messages that are something else."""
_NAME = re.compile(r"\b(?=\w{0,40}(?:tool|function))[a-z_]\w{0,40}\b", re.IGNORECASE)

# As Hermes and Qwen 2.5 were trained: NousResearch/Hermes-Function-Calling.
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_FUNCTION, _PARAMETER, _VALUE, _RESULT, _CONTENT = (
    "marked_tool",
    "marked_key",
    "marked value",
    "marked result",
    "Marked.",
)
_ARGUMENTS = json.dumps({_PARAMETER: _VALUE})
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": "Marks.",
        "parameters": {
            "type": "object",
            "properties": {_PARAMETER: {"type": "string", "description": "A mark."}},
            "required": [_PARAMETER],
        },
    },
}
_ASKED: Messages = ({"role": "user", "content": "Hello"},)


@dataclass(frozen=True, slots=True)
class _Handing:
    """How a template is given the tools: by a variable, or by a member of the first message, which is the system's."""

    name: str = "tools"
    of_message: bool = False
    form: Callable[[Definitions], Any] = list

    def given(self, messages: Messages, tools: Definitions) -> tuple[Messages, Definitions, dict[str, Any]]:
        """Messages, tools and further variables."""
        if self == _AS_TOOLS:
            return messages, tools, {}
        if not self.of_message:
            return messages, (), {self.name: self.form(tools)}
        first, rest = ({"role": "system", "content": ""}, messages)
        if messages[0]["role"] == "system":
            first, rest = dict(messages[0]), messages[1:]
        return [{**first, self.name: self.form(tools)}, *rest], (), {}


def _functions(tools: Definitions) -> list[Any]:
    return [tool["function"] for tool in tools]


def _json(tools: Definitions) -> str:
    return json.dumps(_functions(tools), ensure_ascii=False)


_AS_TOOLS = _Handing()


@dataclass(frozen=True, slots=True)
class _Calling:
    """How it is given calls and their results."""

    as_text: bool = False
    """Arguments are JSON in a text, and no object."""
    named: bool = False
    """Results have the name of the function."""
    in_ids: bool = False
    """The id of a call names the function, as Kimi K2's do, and nothing else does."""
    alone: bool = False
    """A turn has one call: several become several turns, each with its result."""
    plain: bool = False
    """Calls and results become text, in the format of Hermes."""

    def given(self, messages: Messages) -> list[Mapping[str, Any]]:
        if self.plain:
            return [_plain(message) for message in messages]
        known: dict[str, tuple[str, str]] = {}
        made, num_calls = [], 0
        for message in _one_by_one(messages) if self.alone else messages:
            for call in message.get("tool_calls", ()):
                name = call["function"]["name"]
                known[call["id"]] = name, f"functions.{name}:{num_calls}" if self.in_ids else call["id"]
                num_calls += 1
            made.append(self._message(message, known))
        return made

    def _message(self, message: Mapping[str, Any], known: Mapping[str, tuple[str, str]]) -> Mapping[str, Any]:
        """`known`: the calls up to here, by id: the name of the function, and the id that the template is given."""
        if "tool_calls" in message:
            calls = [
                {**call, "id": known[call["id"]][1], "function": self._function(call["function"])}
                for call in message["tool_calls"]
            ]
            return {**message, "tool_calls": calls}
        if message.get("tool_call_id") not in known:
            return message
        name, answers = known[message["tool_call_id"]]
        return {**({"name": name} if self.named else {}), **message, "tool_call_id": answers}

    def _function(self, function: Mapping[str, Any]) -> dict[str, Any]:
        arguments = function["arguments"]
        if self.as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**function, "arguments": arguments if self.as_text else _object(arguments)}


_PLAIN = _Calling(plain=True)


def _one_by_one(messages: Messages) -> Iterator[Mapping[str, Any]]:
    waiting: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls", ())
        same = next((each for each in waiting if each["tool_calls"][0]["id"] == message.get("tool_call_id")), None)
        if same is not None:
            waiting.remove(same)
            yield same
        elif len(calls) > 1:
            yield from waiting
            waiting = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]
            waiting[0] = {**message, "tool_calls": calls[:1]}
            continue
        elif "tool_call_id" not in message:
            yield from waiting
            waiting = []
        yield message
    yield from waiting


def _object(arguments: Any) -> Any:
    """Those that are no object stay the text that the model has written."""
    if not isinstance(arguments, str):
        return arguments
    try:
        read = from_json(arguments or "{}")
    except ValueError:
        return arguments
    return read if isinstance(read, dict) else arguments


def _wrapped(messages: Messages) -> list[Mapping[str, Any]]:
    """The conversation with an object as the arguments of every call, for templates that read their members."""
    return [
        {**message, "tool_calls": [{**call, "function": _whole(call["function"])} for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _whole(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": {"arguments": arguments} if isinstance(arguments, str) else arguments}


def _with_description(messages: Messages, tools: Definitions) -> Messages:
    """The conversation with a system message about the tools."""
    described = _TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{described}"}, *messages[1:]]
    return [{"role": "system", "content": described}, *messages]


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    written = [_written(call["function"]) for call in message["tool_calls"]]
    parts = [message["content"], *(f"<tool_call>\n{each}\n</tool_call>" for each in written)]
    return {"role": "assistant", "content": "\n".join(filter(None, parts))}


def _written(function: Mapping[str, Any]) -> str:
    """The call as the model wrote it; arguments that are no JSON object are a text."""
    name, arguments = function["name"], _object(function["arguments"])
    if isinstance(arguments, str):
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ToolView:
    """What was found."""

    handing: _Handing | None = None
    """None: tools become a system message."""
    calling: _Calling = _PLAIN
    written_in: str = ""
    """One of FORMATS; empty if it is not known."""
    shows_tools: bool = True
    """Whether the model sees tools at all."""
    in_parts: frozenset[str] = frozenset()
    """Roles whose texts the template wants as lists of parts."""
    problem: str = ""
    """Why no conversation can be rendered."""
    remarks: tuple[str, ...] = field(default=())
    """For the operator."""

    def render(
        self,
        render: Render,
        messages: Messages,
        tools: Definitions = (),
        variables: Mapping[str, Any] | None = None,
        *,
        opens: bool = True,
    ) -> str:
        """Raises TemplateError."""
        if self.problem:
            raise TemplateError(self.problem)
        render = _with_parts(render, self.in_parts)
        messages, more = self.calling.given(messages), dict(variables or {})
        if tools and self.handing is None:
            messages, tools = _with_description(messages, tools), ()
        elif tools and self.handing is not None:
            messages, tools, given = self.handing.given(messages, tools)
            more |= given
        try:
            return render(messages, tools or None, more, opens=opens)
        except TemplateOutOfBounds:
            raise
        except TemplateError:
            whole = _wrapped(messages)
            if self.calling.as_text or whole == list(messages):
                raise
            return render(whole, tools or None, more, opens=opens)


def find_view(render: Render, source: str) -> ToolView:
    """Tries the template. `source`: its text, in which names of variables are looked for."""
    try:
        render(_ASKED)
    except TemplateOutOfBounds as error:
        return ToolView(problem=str(error), remarks=(f"chats are refused: {error}",))
    except TemplateError:
        # It may need what this conversation lacks.
        pass
    in_parts, hidden = _texts(render)
    if "user" in hidden:
        problem = "the model's chat template shows nothing of what a user says"
        return ToolView(problem=problem, remarks=(f"chats are refused: {problem}",))
    view = _find_tools(_with_parts(render, in_parts), source)
    remarks = [f"it shows nothing of what {role} messages say" for role in hidden]
    return replace(view, in_parts=in_parts, remarks=(*remarks, *view.remarks))


def _with_parts(render: Render, roles: frozenset[str]) -> Render:
    """Renders with the texts of these roles as lists of parts."""

    def given(message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message["role"] not in roles or not isinstance(text := message.get("content"), str):
            return message
        return {**message, "content": [{"type": "text", "text": text}] if text else []}

    def rendered(messages: Messages, *what: Any, **how: Any) -> str:
        return render(list(map(given, messages)), *what, **how)

    return rendered if roles else render


def _texts(render: Render) -> tuple[frozenset[str], list[str]]:
    """The roles whose texts are shown only as lists of parts, and those whose texts are not shown at all."""
    in_parts, hidden = frozenset[str](), []
    for role, before, after in (("user", (), ()), ("system", (), _ASKED), ("assistant", _ASKED, _ASKED)):
        conversation = [*before, {"role": role, "content": _CONTENT}, *after]
        # Results of tools are mostly written as what users say.
        as_parts = in_parts | ({role, "tool"} if role == "user" else {role})
        found = [_tried(partial(_with_parts(render, roles), conversation)) for roles in (in_parts, as_parts)]
        if any(_CONTENT in text for text in found):
            in_parts = in_parts if _CONTENT in found[0] else as_parts
        elif found[0]:
            hidden.append(role)
    return in_parts, hidden


def _find_tools(render: Render, source: str) -> ToolView:
    handing = next((each for each in _handings(source) if _shows(render, each)), None)
    prompt = _tried(lambda: ToolView(handing).render(render, _ASKED, [_TOOL]))
    if handing is not None:
        calling, turn = next(_callings(render, handing), (_PLAIN, ""))
        written_in = _format_of(turn, prompt)
        return ToolView(handing, calling, written_in, remarks=tuple(_remarks(calling, written_in)))
    if _FUNCTION not in prompt:
        return ToolView(written_in="hermes", shows_tools=False, remarks=("it shows no tools: they are refused",))
    return ToolView(written_in="hermes", remarks=("it shows no tools: they are described in a system message",))


def _remarks(calling: _Calling, written_in: str) -> Iterator[str]:
    if calling == _PLAIN:
        yield "it shows no calls, or no results; they are given to the model as texts"
    if not written_in:
        yield "how it writes calls is not known: requests with tools are refused; --tool-call-parser names its format"


def _handings(source: str) -> Iterator[_Handing]:
    """By the variable that all templates should have, else by any name in this one that may be of tools."""
    yield _AS_TOOLS
    names = [each for each in dict.fromkeys(["tools", "functions", *_NAME.findall(source)]) if each not in _OF_CALLS]
    for form, of_message, name in product((list, _functions, _json), (False, True), names[:_MAX_NAMES]):
        yield _Handing(name, of_message, form)


def _shows(render: Render, handing: _Handing) -> bool:
    text = _tried(lambda: ToolView(handing, _Calling()).render(render, _ASKED, [_TOOL]))
    # As JSON or in words, and not as a text within JSON, or as Python writes it.
    quoted = re.search(rf"(.?){_PARAMETER}(.?)", text, re.DOTALL)
    awry = quoted is not None and (quoted[2] == "\\" or "'" in quoted[1] + quoted[2])
    return _FUNCTION in text and (handing == _AS_TOOLS or not awry)


def _callings(render: Render, handing: _Handing) -> Iterator[tuple[_Calling, str]]:
    """Those in which the model sees calls and results, with the text of a turn that calls."""
    for num_calls, in_ids, named, as_text in product((2, 1), (False, True), (False, True), (False, True)):
        calling = _Calling(as_text, named, in_ids, alone=num_calls == 1)
        view = ToolView(handing, calling)

        def rendered(messages: Messages, opens: bool = False, view: ToolView = view) -> str:
            return _tried(lambda: view.render(render, messages, [_TOOL], opens=opens))

        calls = [
            {"id": f"call1234{i}", "type": "function", "function": {"name": _FUNCTION, "arguments": _ARGUMENTS}}
            for i in range(num_calls)
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": _RESULT} for call in calls]
        whole = rendered([*_ASKED, turn, *results], True)
        if min(whole.count(_VALUE), whole.count(_RESULT)) < num_calls:
            continue
        called = rendered([*_ASKED, turn]) or whole
        spoken = rendered([*_ASKED, {"role": "assistant", "content": _CONTENT}])
        before, _, after = spoken.rpartition(_CONTENT)
        same = next(
            (at for at, pair in enumerate(zip(before, called, strict=False)) if pair[0] != pair[1]), len(before)
        )
        if called.count(_FUNCTION, same) >= num_calls:
            yield calling, called[same:].removesuffix(after)


def _format_of(turn: str, prompt: str) -> str:
    """The format of the turn's calls; else the one of which the template tells the model. Empty if neither is known."""
    read = {name: found for name in FORMATS if (found := _read(name, turn)) is not None}
    marked = [name for name in read if not FORMATS[name].bare]
    hinted = [name for name, each in FORMATS.items() if each.hints and all(hint in prompt for hint in each.hints)]
    hinted.sort(key=lambda name: (FORMATS[name].bare, -sum(map(len, FORMATS[name].hints))))
    best = min(marked, key=lambda name: read[name], default="")
    return best or next(iter(hinted), "") or next(iter(read), "")


def _read(name: str, turn: str) -> int | None:
    """How many characters of the turn are no calls, as this format reads it; None if it reads none, or others."""
    parser = FORMATS[name].parser({_FUNCTION: _TOOL["function"]["parameters"]})
    whole = Delta.join([parser.push(turn), parser.finish(cut=False)])
    calls = [(each.name, json.loads(each.arguments)) for each in whole.calls]
    right = (_FUNCTION, {_PARAMETER: _VALUE})
    if not calls or any(call != right for call in calls) or len(calls) != turn.count(_VALUE):
        return None
    return len(whole.content)


def _tried(work: Callable[[], str]) -> str:
    """What it gives; empty if the template refuses it."""
    try:
        return work()
    except TemplateError:
        return ""
