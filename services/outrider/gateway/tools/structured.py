"""Structured output: converts clients' options into a grammar, or refuses them with the name of the field."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from outrider.errors import InvalidRequest, NotSupported
from outrider.gateway.fields import check_names, from_json
from outrider.gateway.tools.json_schema import AS_TRAINED, BOUNDED_WHITESPACE, JsonStyle, prepare
from outrider.options.logits import MAX_GRAMMAR_BYTES

Kind = Literal["json_schema", "regex", "choice", "grammar"]
_KINDS_OF_VLLM = ("json", "json_object", "regex", "choice", "grammar")
_STYLE_OF_VLLM = {
    "disable_any_whitespace": bool,
    "disable_additional_properties": bool,
    "whitespace_pattern": str,
    # There is one library, and none to fall back to.
    "disable_fallback": bool,
}
GUIDED: dict[str, Kind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class Marks(Protocol):
    """What a grammar needs to know of a model's answers. A ModelTokenizer knows it."""

    @property
    def tool_format(self) -> str: ...

    def mark(self, name: str) -> str: ...


@dataclass(frozen=True, slots=True)
class NamedMarks:
    """The same without a tokenizer."""

    tool_format: str
    names: Mapping[str, str]

    @classmethod
    def of(cls, marks: Marks, names: Iterable[str]) -> NamedMarks:
        return cls(marks.tool_format, {name: marks.mark(name) for name in names})

    def mark(self, name: str) -> str:
        return self.names[name]


class Grammatical(ABC):
    """The form that the whole answer must have, from any of the options."""

    __slots__ = ()
    field: str
    """The client's name of it."""

    @property
    @abstractmethod
    def num_chars(self) -> int:
        """About as many characters as the grammar has."""

    @abstractmethod
    def to_grammar(self, marks: Marks) -> str:
        """The grammar in llguidance's notation. Raises InvalidRequest or NotSupported."""


@dataclass(frozen=True, slots=True)
class Structured(Grammatical):
    """A schema, an expression, a list or a grammar."""

    kind: Kind
    value: Any
    """A JSON schema, a regular expression, a list of texts, or a grammar in Lark's or llama.cpp's notation."""
    field: str
    """The client's name of it."""
    style: JsonStyle = AS_TRAINED
    strict: bool = False
    """Whether a schema with a keyword that cannot be enforced is refused. Otherwise the keyword is ignored."""

    def __post_init__(self) -> None:
        kinds = {"json_schema": dict | bool, "regex": str, "choice": list, "grammar": str}
        if not isinstance(self.value, kinds[self.kind]):
            names = {"json_schema": "an object", "regex": "a string", "choice": "a list", "grammar": "a string"}
            raise InvalidRequest(self.field, f"has to be {names[self.kind]}")
        if self.kind == "choice" and not (self.value and all(isinstance(one, str) and one for one in self.value)):
            raise InvalidRequest(self.field, "has to be a list of texts")
        if self.num_chars > MAX_GRAMMAR_BYTES // 2:
            raise InvalidRequest(
                self.field, f"{self.num_chars} characters; at most {MAX_GRAMMAR_BYTES // 2} are allowed"
            )

    @property
    def num_chars(self) -> int:
        return len(self.value) if isinstance(self.value, str) else len(json.dumps(self.value))

    def to_grammar(self, marks: Marks | None = None) -> str:
        """The grammar, which has no marks."""
        try:
            from llguidance import LLMatcher, grammar_from
        except ImportError as error:
            raise NotSupported(self.field, "structured output needs the extra `structured`") from error
        if self.kind == "json_schema" and self.strict:
            check_enforceable(self.value, self.field)
        try:
            if self.kind == "json_schema":
                schema, overrides = json.dumps(prepare(self.value, self.style, strict=self.strict)), self.style.options
                grammar = LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
            elif self.kind == "choice":
                # As one terminal: the library follows thousands of texts in its lexer, and few in its parser.
                texts = " | ".join(map(json.dumps, self.value))
                grammar = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
            else:
                grammar = grammar_from(self.kind, self.value)
        except ValueError as error:
            raise InvalidRequest(self.field, str(error)) from error
        return checked_grammar(str(grammar), self.field)


def checked_grammar(grammar: str, where: str) -> str:
    """Returns `grammar`. Raises InvalidRequest with its fault, NotSupported without the library."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise NotSupported(where, "structured output needs the extra `structured`") from error
    if fault := LLMatcher.validate_grammar(grammar):
        raise InvalidRequest(where, fault)
    return grammar


def check_enforceable(schema: Any, where: str) -> None:
    """Raises InvalidRequest that names the first keywords of the schema that no grammar enforces."""
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(prepare(schema, strict=True)))
    except ValueError as error:
        raise InvalidRequest(where, str(error)) from error
    if fault := LLMatcher.validate_grammar(grammar):
        raise InvalidRequest(where, f"is strict and cannot be enforced: {fault}")


def from_response_format(response_format: Any) -> Structured | None:
    """OpenAI's `response_format`. Raises InvalidRequest."""
    where = "response_format"
    if not isinstance(response_format, dict):
        raise InvalidRequest(where, "has to be an object with type")
    response_format = {name: value for name, value in response_format.items() if value is not None}
    match response_format.get("type"):
        case "text":
            check_names(where, response_format, ("type",))
            return None
        case "json_object":
            check_names(where, response_format, ("type",))
            return Structured("json_schema", {"type": "object"}, where)
        case "json_schema":
            check_names(where, response_format, ("type", "json_schema"))
            described = response_format.get("json_schema")
            if not isinstance(described, dict) or "schema" not in described:
                raise InvalidRequest(f"{where}.json_schema", "has to be an object with schema")
            check_names(f"{where}.json_schema", described, ("name", "description", "schema", "strict"))
            strict = described.get("strict") is True
            return Structured("json_schema", described["schema"], f"{where}.json_schema.schema", strict=strict)
        case _:
            raise InvalidRequest(f"{where}.type", "has to be text, json_object or json_schema")


def from_structured_outputs(structured_outputs: Any) -> Structured:
    """vLLM's `structured_outputs`. Raises InvalidRequest."""
    where = "structured_outputs"
    if not isinstance(structured_outputs, dict):
        raise InvalidRequest(where, "has to be an object")
    given = {name: value for name, value in structured_outputs.items() if value is not None}
    check_names(where, given, (*_KINDS_OF_VLLM, *_STYLE_OF_VLLM))
    style = _style(where, {name: given.pop(name) for name in _STYLE_OF_VLLM if name in given})
    if len(given) != 1:
        raise InvalidRequest(where, "has to have one of json, json_object, regex, choice and grammar")
    [(name, value)] = given.items()
    if name == "json_object":
        if value is not True:
            raise InvalidRequest(f"{where}.json_object", "has to be true")
        return Structured("json_schema", {"type": "object"}, f"{where}.json_object", style)
    if name == "json":
        return Structured("json_schema", parsed_schema(value, f"{where}.json"), f"{where}.json", style)
    return Structured(name, value, f"{where}.{name}")


def _style(where: str, given: Mapping[str, Any]) -> JsonStyle:
    """vLLM's options of how JSON is written."""
    for name, value in given.items():
        if not isinstance(value, kind := _STYLE_OF_VLLM[name]):
            raise InvalidRequest(f"{where}.{name}", "has to be a string" if kind is str else "has to be true or false")
    any_white = not given.get("disable_any_whitespace", True)
    white = given.get("whitespace_pattern", BOUNDED_WHITESPACE if any_white else "")
    gap = "" if white or "disable_any_whitespace" in given else AS_TRAINED.gap
    return JsonStyle(white, gap, given.get("disable_additional_properties", True))


def from_guided(name: str, value: Any) -> Structured:
    """vLLM's older `guided_*` fields. Raises InvalidRequest."""
    kind = GUIDED[name]
    return Structured(kind, parsed_schema(value, name) if kind == "json_schema" else value, name)


def parsed_schema(schema: Any, where: str) -> Any:
    """The schema as JSON. Like vLLM it also accepts text."""
    if not isinstance(schema, str):
        return schema
    try:
        # This parser bounds the depth, as for a body.
        return from_json(schema)
    except ValueError as error:
        raise InvalidRequest(where, f"is not valid JSON: {error}") from error
