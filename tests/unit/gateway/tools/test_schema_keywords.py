"""Every keyword of JSON Schema 2020-12, as its own meta-schemas list them: what a grammar accepts is what jsonschema
calls valid, or the keyword is refused by name, or it is among those that the page on the API lists."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from outrider.errors import InvalidRequest
from outrider.gateway.tools.json_schema import prepare
from outrider.gateway.tools.parsers.formats import MARKERS
from outrider.gateway.tools.schema_keywords import ANNOTATIONS, UNENFORCED
from outrider.gateway.tools.structured import NamedMarks, Structured
from outrider.gateway.tools.tool_grammar import FreeCalls
from outrider.gateway.tools.tools import ToolUse

from tests.unit.gateway.tools.test_json_schema import accepts, takes

jsonschema = pytest.importorskip("jsonschema")
specifications = pytest.importorskip("jsonschema_specifications")
pytest.importorskip("llguidance")

_URI = "https://json-schema.org/draft/2020-12/meta/"
VOCABULARIES = ("core", "applicator", "unevaluated", "validation", "meta-data", "format-annotation", "content")
KEYWORDS = sorted(
    chain.from_iterable(specifications.REGISTRY.contents(_URI + name)["properties"] for name in VOCABULARIES)
)
A, TEXT, NUMBER = {"a": 1}, {"type": "string"}, {"type": "integer"}
OBJECT = {"type": "object", "properties": {"a": NUMBER, "b": TEXT}}
THREE = {"type": "object", "properties": {"a": NUMBER, "b": TEXT, "c": NUMBER}}
ARRAY = {"type": "array"}
# Schemas that need the keyword to tell what is valid.
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "$anchor": [{"$defs": {"n": NUMBER | {"$anchor": "n"}}, "$ref": "#n"}],
    "$defs": [{"$defs": {"n": NUMBER}, "$ref": "#/$defs/n"}],
    "$dynamicAnchor": [{"$defs": {"n": NUMBER | {"$dynamicAnchor": "n"}}, "$dynamicRef": "#n"}],
    "$dynamicRef": [
        {"$dynamicAnchor": "node", "type": "object", "properties": {"a": {"$dynamicRef": "#node"}}},
        {"$defs": {"n": NUMBER | {"$dynamicAnchor": "n"}}, "type": "array", "items": {"$dynamicRef": "#n"}},
    ],
    "$id": [{"$id": "https://a.example/", "$defs": {"n": NUMBER | {"$id": "n"}}, "$ref": "n"}],
    "$ref": [{"$defs": {"n": NUMBER}, "type": "array", "items": {"$ref": "#/$defs/n"}}],
    "additionalProperties": [OBJECT | {"additionalProperties": NUMBER}, OBJECT | {"additionalProperties": False}],
    "allOf": [{"allOf": [NUMBER, {"minimum": 2}]}],
    "anyOf": [{"anyOf": [NUMBER, {"type": "null"}]}],
    "const": [{"const": 1}, {"const": [1, "x"]}, {"const": A}, {"const": 2**53 + 1}, {"const": {"a": [2**60]}}],
    "contains": [
        ARRAY | {"contains": NUMBER},
        ARRAY | {"contains": {"const": 2}, "items": NUMBER},
        ARRAY | {"contains": NUMBER, "prefixItems": [TEXT], "items": {"type": ["integer", "null"]}},
        ARRAY | {"contains": NUMBER, "maxItems": 1},
        {"contains": NUMBER},
    ],
    "minContains": [ARRAY | {"contains": NUMBER, "minContains": 2.0}, ARRAY | {"contains": NUMBER, "minContains": 0}],
    "maxContains": [ARRAY | {"contains": NUMBER, "maxContains": 1}],
    "dependentRequired": [
        OBJECT | {"dependentRequired": {"a": ["b"]}},
        OBJECT | {"dependentRequired": {"a": ["b"], "b": ["a"]}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
    ],
    "dependentSchemas": [
        OBJECT | {"dependentSchemas": {"a": {"required": ["b"]}}},
        OBJECT | {"dependentSchemas": {"a": {"properties": {"b": {"const": "x"}}}}},
    ],
    "else": [{"if": NUMBER, "else": {"maxLength": 1}}],
    "if": [{"if": NUMBER, "then": {"minimum": 2}}],
    "then": [{"if": NUMBER, "then": {"minimum": 2}, "else": TEXT}],
    "enum": [{"enum": [1, "x", None]}, {"enum": [2**53 + 2, "x"]}],
    "exclusiveMaximum": [NUMBER | {"exclusiveMaximum": 2}],
    "exclusiveMinimum": [NUMBER | {"exclusiveMinimum": 1}],
    "format": [TEXT | {"format": name} for name in ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid")],
    "items": [ARRAY | {"items": NUMBER}],
    "maxItems": [ARRAY | {"maxItems": 1}, ARRAY | {"maxItems": 1.0}],
    "maxLength": [TEXT | {"maxLength": 1}, TEXT | {"maxLength": 1.0}],
    "maxProperties": [
        {"type": "object", "maxProperties": 1},
        OBJECT | {"maxProperties": 1},
        OBJECT | {"maxProperties": 1.0, "additionalProperties": True},
        THREE | {"maxProperties": 2},
        THREE | {"maxProperties": 2, "minProperties": 2, "required": ["b"]},
    ],
    "maximum": [NUMBER | {"maximum": 1}, NUMBER | {"maximum": 2**53 + 1}],
    "minItems": [ARRAY | {"minItems": 2}, ARRAY | {"minItems": 2.0}],
    "minLength": [TEXT | {"minLength": 2}, TEXT | {"minLength": 2.0}],
    "minProperties": [
        {"type": "object", "minProperties": 2},
        OBJECT | {"minProperties": 1},
        OBJECT | {"minProperties": 2.0},
        OBJECT | {"minProperties": 1, "additionalProperties": True},
        {"type": "object", "patternProperties": {"^c": NUMBER}, "properties": {"a": NUMBER}, "minProperties": 2},
        OBJECT | {"minProperties": 1, "allOf": [{"required": ["a"]}]},
    ],
    "minimum": [NUMBER | {"minimum": 2}, NUMBER | {"minimum": 2**53 + 1}],
    "multipleOf": [NUMBER | {"multipleOf": 2}],
    "not": [{"not": NUMBER}, OBJECT | {"not": {"required": ["a", "b"]}}],
    "oneOf": [{"oneOf": [NUMBER, TEXT]}, {"oneOf": [NUMBER, {"minimum": 2}]}],
    "pattern": [TEXT | {"pattern": "^x"}, TEXT | {"pattern": "(?!a)x"}],
    "patternProperties": [{"type": "object", "patternProperties": {"^a": NUMBER}, "additionalProperties": False}],
    "prefixItems": [ARRAY | {"prefixItems": [NUMBER, TEXT]}],
    "properties": [OBJECT],
    "propertyNames": [
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": NUMBER},
        {"type": "object", "propertyNames": {"enum": ["a", "c"]}},
        {"type": "object", "propertyNames": False},
        OBJECT | {"propertyNames": {"const": "a"}},
        OBJECT | {"propertyNames": {"pattern": "^b"}, "additionalProperties": True},
        {"propertyNames": {"not": {"const": "a"}}},
    ],
    "required": [OBJECT | {"required": ["a"]}],
    "type": [NUMBER, {"type": ["string", "null"]}],
    "unevaluatedItems": [
        ARRAY | {"prefixItems": [NUMBER], "unevaluatedItems": False},
        ARRAY | {"allOf": [{"prefixItems": [NUMBER]}], "unevaluatedItems": False},
    ],
    "unevaluatedProperties": [
        OBJECT | {"unevaluatedProperties": False},
        {"type": "object", "allOf": [OBJECT], "properties": {"c": NUMBER}, "unevaluatedProperties": False},
        {"$defs": {"o": OBJECT}, "type": "object", "$ref": "#/$defs/o", "unevaluatedProperties": False},
        {"type": "object", "anyOf": [OBJECT, {"properties": {"c": NUMBER}}], "unevaluatedProperties": False},
    ],
    "uniqueItems": [ARRAY | {"items": NUMBER, "uniqueItems": True}],
}
_VALUES: list[Any] = [None, True, 0, 1, 2, 3, 1.5, 2**53, 2**53 + 1, 2**53 + 2, 2**60, "", "x", "xx", "yx", "a"]
_VALUES += ["2026-01-31", "12:00:00Z", "2026-01-31T12:00:00Z", "a@b.example", "1.2.3.4", "::1", "1.2.3.256"]
_VALUES += ["6f1d2c3b-0000-4000-8000-000000000000", "2026-13-01", "25:00:00Z"]
INSTANCES: list[Any] = [
    *_VALUES,
    *([], [1], ["x"], [2], [1, 1], [1, 2], [2, 1], ["x", 1], [1, "x"], ["x", "x"], ["x", 1, None], [1, 2, 3]),
    *({}, A, {"b": "x"}, {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"c": 1}, {"a": 1, "c": 1}, {"a": "x"}, {"c": "x"}),
    *({"ab": 1}, {"b": "x", "c": 1}, {"a": {"a": {}}}, {"a": {"a": 1}}, {"a": [2**60]}, {"a": [2**60 + 1]}),
]


def _whole(schema: dict[str, Any], place: str) -> tuple[dict[str, Any], Any]:
    """The schema at a place of another, and how an instance is put there."""
    if place == "alone":
        return schema, lambda value: value
    root = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    schema = {name: value for name, value in schema.items() if name != "$defs"}
    if place == "in an object":
        return root | {"type": "object", "properties": {"v": schema}, "required": ["v"]}, lambda value: {"v": value}
    return root | {"type": "array", "items": schema, "minItems": 1}, lambda value: [value]


def _names(keyword: str, refused: InvalidRequest) -> bool:
    """Or the keyword that the example needs beside it."""
    return re.search(rf"{re.escape(keyword)}|contains|look-ahead|\bif\b|Properties", str(refused)) is not None


CASES = [(keyword, schema) for keyword in KEYWORDS for schema in EXAMPLES.get(keyword, ())]


def test_each_keyword_of_the_vocabularies_has_an_example_or_is_an_annotation() -> None:
    assert len(KEYWORDS) > 50
    assert set(KEYWORDS) == EXAMPLES.keys() | ANNOTATIONS


# The arguments of functions below are in an object.
@pytest.mark.parametrize(
    "place", ["alone", *(pytest.param(place, marks=pytest.mark.slow) for place in ("in an object", "in an array"))]
)
@pytest.mark.parametrize(("keyword", "schema"), CASES, ids=lambda one: one if isinstance(one, str) else "")
def test_with_strict_what_is_accepted_is_valid_or_the_keyword_is_named(
    keyword: str, schema: dict[str, Any], place: str
) -> None:
    if "$id" in json.dumps(schema) and place != "alone":
        return
    whole, put = _whole(schema, place)
    validator = jsonschema.Draft202012Validator(whole, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    asked = Structured("json_schema", whole, "field", strict=True)
    try:
        grammar = asked.to_grammar()
    except InvalidRequest as refused:
        assert _names(keyword, refused), refused
        assert refused.field == "field"
        return
    taken = [value for value in INSTANCES if takes(grammar, json.dumps(put(value)))]
    assert [value for value in taken if not validator.is_valid(put(value))] == []
    assert taken or not [value for value in INSTANCES if validator.is_valid(put(value))]


@pytest.mark.parametrize(("keyword", "schema"), CASES, ids=lambda one: one if isinstance(one, str) else "")
def test_without_strict_only_what_the_page_lists_lets_something_invalid_through(
    keyword: str, schema: dict[str, Any]
) -> None:
    asked = Structured("json_schema", schema, "field")
    try:
        grammar = asked.to_grammar()
    except InvalidRequest as refused:
        assert keyword in str(refused), "only numbers that would become others"
        return
    validator = jsonschema.Draft202012Validator(schema)
    wrong = [v for v in INSTANCES if takes(grammar, json.dumps(v)) and not validator.is_valid(v)]
    assert not wrong or keyword in _listed_as_unenforced(), wrong


@pytest.mark.parametrize("schema", [*EXAMPLES["minProperties"], *EXAMPLES["maxProperties"]])
def test_a_number_of_properties_keeps_no_object_of_that_number_away(schema: dict[str, Any]) -> None:
    grammar = Structured("json_schema", schema, "field").to_grammar()
    without = {name: value for name, value in schema.items() if name[3:] != "Properties"}
    freely = Structured("json_schema", without, "field").to_grammar()
    validator = jsonschema.Draft202012Validator(schema)
    valid = [value for value in INSTANCES if validator.is_valid(value) and takes(freely, json.dumps(value))]
    assert valid and [value for value in valid if not takes(grammar, json.dumps(value))] == []


def _listed_as_unenforced() -> set[str]:
    page = Path(__file__).parents[4].joinpath("docs", "api.md").read_text()
    [line] = re.findall(r"Not enforced: (.+?)\.\n", page, re.DOTALL)
    return set(re.findall(r"`([^`]+)`", line))


def test_the_page_lists_what_is_not_enforced_and_what_is_an_annotation() -> None:
    listed = _listed_as_unenforced()
    assert listed >= UNENFORCED - {"$recursiveRef", "dependencies"}
    page = Path(__file__).parents[4].joinpath("docs", "api.md").read_text()
    assert all(f"`{keyword}`" in page for keyword in ANNOTATIONS)


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS - {"$schema"}))
def test_an_annotation_says_nothing_about_what_is_valid(keyword: str) -> None:
    value = {"$vocabulary": {}, "contentSchema": NUMBER, "examples": [1]}.get(keyword, True)
    assert accepts(Structured("json_schema", TEXT | {keyword: value}, "field", strict=True), '"x"')


def test_numbers_that_would_become_others_are_refused_by_name_with_strict_and_without() -> None:
    for schema in ({"const": 2**53 + 1}, {"enum": ["a", {"b": [2**64]}]}, {"properties": {"a": {"const": -(2**60)}}}):
        for strict in (False, True):
            with pytest.raises(ValueError, match=r"const|enum"):
                prepare(schema, strict=strict)


@pytest.mark.parametrize("choice", ["auto", pytest.param("required", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("keyword", "schema"), CASES, ids=lambda one: one if isinstance(one, str) else "")
def test_the_arguments_of_a_strict_function_are_valid_or_the_keyword_is_named(
    keyword: str, schema: dict[str, Any], choice: Any
) -> None:
    parameters = {"type": "object", "properties": {"v": {}}, "required": ["v"]}
    whole, put = _whole(schema, "in an object") if "$id" not in json.dumps(schema) else (parameters, lambda v: {"v": v})
    function = {"type": "function", "function": {"name": "f", "parameters": whole}}
    use = ToolUse((function,), choice, strict=frozenset("f"))
    asked = FreeCalls(use, None, "tools") if choice == "auto" else use.structured()
    assert asked is not None
    try:
        grammar = asked.to_grammar(NamedMarks.of(_Texts(), MARKERS))
    except InvalidRequest as refused:
        assert refused.field is not None and refused.field.startswith("tools")
        assert _names(keyword, refused)
        return
    validator = jsonschema.Draft202012Validator(whole)
    for value in INSTANCES[::3]:
        call = json.dumps({"name": "f", "arguments": put(value)})
        text = f"<tool_call>\n{call}\n</tool_call>" if choice == "auto" else f"[{call}]"
        assert validator.is_valid(put(value)) or not takes(grammar, text), value


class _Texts:
    tool_format = "hermes"

    def mark(self, name: str) -> str:
        return f'"{name}"'
