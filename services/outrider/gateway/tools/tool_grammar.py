"""Grammars, in llguidance's notation, for answers in which the model decides itself whether to call tools.

They bound the text or JSON next to the calls, and the arguments of calls to strict functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidRequest, NotSupported
from outrider.gateway.tools.json_schema import AS_TRAINED, JsonStyle, prepare
from outrider.gateway.tools.parsers.formats import MARKERS
from outrider.gateway.tools.parsers.json_calls import HERMES_MARKS
from outrider.gateway.tools.parsers.reasoning import CLOSE, OPEN, Thought
from outrider.gateway.tools.structured import Grammatical, Marks, Structured, check_enforceable, checked_grammar
from outrider.gateway.tools.tools import ToolUse, call_schema

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class FreeCalls(Grammatical):
    """Any number of calls (one if parallel calls are not allowed), or the answer in their place.

    Only for Hermes's format, whose marks distinguish a call from everything else.
    """

    use: ToolUse
    answer: Structured | None
    """The form of an answer without calls. None: any text, which calls may follow."""
    field: str

    @property
    def num_chars(self) -> int:
        answer = 0 if self.answer is None else self.answer.num_chars
        return answer + len(json.dumps(self.use.definitions))

    def to_grammar(self, marks: Marks) -> str:
        """Raises InvalidRequest with the fault, or NotSupported, as for other formats."""
        if marks.tool_format != "hermes":
            what = "strict functions need" if self.answer is None else "together with tools it needs"
            message = f"{what} a model that writes calls as hermes, not {marks.tool_format or 'in an unknown way'}"
            raise NotSupported(self.field, message)
        check_strict(self.use)
        begin, end = map(marks.mark, HERMES_MARKS)
        lines = [f"call: GAP body GAP {end} GAP", f"body: %json {json.dumps(self._body())}", r"GAP: /[\n ]{0,4}/"]
        if self.answer is not None:
            number = "+" if self.use.parallel else ""
            lines += [f"start: ({begin} call){number} | answer", f"answer: {self._answer(self.answer)}"]
        elif begin.startswith('"'):
            # Lazy: the mark always begins a call and is never text.
            lines += ["start: (lead call)* TEXT", rf"lead[lazy]: /(.|\n)*{HERMES_MARKS[0]}/", r"TEXT: /(.|\n)*/"]
        else:
            lines += [f"start: TEXT ({begin} call TEXT)*", r"TEXT: /(.|\n)*/"]
        return checked_grammar("\n".join(lines), self.field)

    def _body(self) -> dict[str, Any]:
        functions = [each["function"] for each in self.use.definitions]
        of_each = [
            call_schema(each, f"#/anyOf/{i}", None if each["name"] in self.use.strict else _ANY_OBJECT)
            for i, each in enumerate(functions)
        ]
        return _styled({"anyOf": of_each}, AS_TRAINED, self.field)

    def _answer(self, answer: Structured) -> str:
        if answer.kind != "json_schema":
            raise NotSupported(answer.field, f"{answer.kind} cannot be combined with tools; a JSON schema can")
        if answer.strict:
            check_enforceable(answer.value, answer.field)
        return f"%json {json.dumps(_styled(answer.value, answer.style, answer.field))}"


def _styled(schema: Any, style: JsonStyle, where: str) -> dict[str, Any]:
    try:
        return prepare(schema, style) | {"x-guidance": style.options}
    except ValueError as error:
        raise InvalidRequest(where, str(error)) from error


def check_strict(use: ToolUse) -> None:
    """Raises InvalidRequest for a strict function whose parameters have a keyword that no grammar enforces."""
    for number, each in enumerate(use.definitions):
        function = each["function"]
        if function["name"] in use.strict and "parameters" in function:
            check_enforceable(function["parameters"], f"{use.field}[{number}].function.parameters")


def of_tools(use: ToolUse, answer: Structured | None) -> Grammatical | None:
    """The form of the answer. A required call is the whole answer, so `answer` does not count then."""
    if use.choice != "auto":
        return use.structured()
    if answer is not None:
        return FreeCalls(use, answer, answer.field)
    return FreeCalls(use, None, use.field) if use.strict else None


_GAP = r"GAP: /[\n ]{0,4}/"


def after_thought(grammar: str, marks: Marks, thought: Thought) -> str:
    """A grammar, in llguidance's notation, with `grammar` after the reasoning. `grammar` itself without reasoning."""
    if thought is Thought.NONE:
        return grammar
    start = "thought GAP @answer" if thought is Thought.OPEN else f"({marks.mark(OPEN)} thought GAP)? @answer"
    lark = "\n".join([f"start: {start}", *_thought(marks), _GAP])
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": lark}, {**_parsed(grammar), "name": "answer"}]})


def _thought(marks: Marks) -> list[str]:
    """The rules of the reasoning, up to its end."""
    close = marks.mark(CLOSE)
    if close.startswith('"'):
        # Lazy: the first `</think>` ends it.
        return [rf"thought[lazy]: /(.|\n)*{CLOSE.replace('/', chr(92) + '/')}/"]
    # Reasoning may mention tool calls, whose marks are tokens and not text.
    others = [marks.mark(name) for name in MARKERS if name != CLOSE and name.startswith("<")]
    mentioned = " | ".join(name for name in others if not name.startswith('"'))
    text = f"TEXT (({mentioned}) TEXT)*" if mentioned else "TEXT"
    return [f"thought: {text} {close}", r"TEXT: /(.|\n)*/"]


def _parsed(grammar: str) -> dict[str, Any]:
    """Parses a grammar of llguidance, which is JSON or only Lark's notation."""
    if grammar.startswith("{"):
        [found] = json.loads(grammar)["grammars"]
        return dict(found)
    return {"lark_grammar": grammar}
