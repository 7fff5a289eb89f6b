"""Schemas as clients send them: what a grammar of them accepts, judged by jsonschema and by the texts themselves."""

from __future__ import annotations

import contextlib
import json
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import pytest
from outrider.errors import InvalidRequest
from outrider.gateway.tools.json_schema import prepare
from outrider.gateway.tools.structured import Structured, from_response_format, from_structured_outputs
from outrider.gateway.tools.tools import ToolUse, call_schema

jsonschema = pytest.importorskip("jsonschema")
llguidance = pytest.importorskip("llguidance")

BYTES = llguidance.LLTokenizer("byte")
TEXT = {"type": "string"}
NUMBER = {"type": "integer"}


def accepts(structured: Structured, text: str) -> bool:
    """Whether the grammar takes the whole text as an answer."""
    return takes(structured.to_grammar(), text)


def takes(grammar: str, text: str) -> bool:
    """Whether a grammar takes the whole text."""
    matcher = _matcher(grammar).deep_copy()
    return bool(matcher.consume_tokens(BYTES.tokenize_str(text)) and matcher.is_accepting())


@lru_cache(4)
def _matcher(grammar: str) -> Any:
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def of(schema: Any, strict: bool = False) -> Structured:
    found = from_response_format({"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}})
    assert found is not None
    return found


def calls_of(*functions: dict[str, Any]) -> Structured:
    """The form of an answer that has to call these functions."""
    form = ToolUse(tuple({"type": "function", "function": each} for each in functions), "required").structured()
    assert form is not None
    return form


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "annotation",
    [
        {"format": "password"},
        {"format": "binary"},
        {"format": "x-no-format-of-anybody"},
        {"title": "A", "description": "b", "default": "c", "examples": ["d"], "deprecated": True, "readOnly": True},
        {"contentEncoding": "base64", "contentMediaType": "image/png"},
        {"x-order": 1, "example": "e", "nullable": True, "$comment": "f"},
    ],
)
def test_annotations_are_annotations(annotation: dict[str, Any], strict: bool) -> None:
    assert accepts(of(an_object(a=TEXT | annotation), strict), '{"a":"anything"}')


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = an_object(format=TEXT, pattern=TEXT, properties=an_object(not_=NUMBER), **{"x-guidance": TEXT})
    text = '{"format":"password","pattern":"(?!a)","properties":{"not_":1},"x-guidance":"a"}'
    assert accepts(of(schema, strict=True), text)


UNENFORCED = [
    ("not", {"not": {"const": "a"}}),
    ("uniqueItems", {"type": "array", "items": TEXT, "uniqueItems": True}),
    ("contains", {"type": "array", "contains": TEXT, "maxContains": 1}),
    ("if", {"if": TEXT, "then": {"minLength": 3}}),
    ("propertyNames", {"type": "object", "propertyNames": {"not": {"const": "a"}}}),
    ("minimum", {"type": "integer", "minimum": 2**53 + 1}),
    ("oneOf", {"oneOf": [an_object(a=TEXT), an_object(b=TEXT)]}),
    ("look-ahead", TEXT | {"pattern": "^(?!a)b"}),
]


A, AB, ABZ = {"a": "x"}, {"a": "x", "b": 1}, {"a": "x", "b": 1, "z": 2}
A_DEF = {"$defs": {"a": an_object(a=TEXT)}}
# Schema, then answers that it takes and that it does not take.
CLOSED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "declared": (an_object(a=TEXT, b=NUMBER), [A, AB], [ABZ]),
    "none declared": ({"type": "object"}, [A, ABZ], []),
    "an empty list of them": (an_object(), [{}], [A]),
    "opened": (an_object(a=TEXT) | {"additionalProperties": True}, [A, ABZ], []),
    "opened for numbers": (an_object(a=TEXT) | {"additionalProperties": NUMBER}, [A, ABZ], [{"a": "x", "z": "y"}]),
    "nested": (an_object(n=an_object(a=TEXT)), [{"n": A}], [{"n": AB}]),
    "in a list": ({"type": "array", "items": an_object(a=TEXT)}, [[A, A]], [[AB]]),
    "alternatives": ({"anyOf": [an_object(a=TEXT), an_object(b=NUMBER)]}, [A, {"b": 1}], [AB]),
    "nullable": ({"anyOf": [an_object(a=TEXT), {"type": "null"}]}, [A, None], [AB]),
    "referred to": (A_DEF | {"$ref": "#/$defs/a"}, [A], [AB]),
    "together": ({"allOf": [an_object(a=TEXT), an_object(b=NUMBER) | {"required": ["b"]}]}, [AB], [A]),
    "inherited": (A_DEF | {"allOf": [{"$ref": "#/$defs/a"}, an_object(b=NUMBER)]}, [AB], [{"a": 1}]),
    "beside a reference": (A_DEF | {"$ref": "#/$defs/a"} | an_object(b=NUMBER), [AB], [{"a": 1}]),
    "needed in turns": (
        an_object(a=TEXT, b=NUMBER) | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [A, AB],
        [{"z": 1}],
    ),
    "by pattern": (an_object(a=TEXT) | {"patternProperties": {"^z": NUMBER}}, [{"a": "x", "z": 2}], [AB]),
    "recursive": (
        {"$defs": {"n": an_object(a=TEXT, n={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"},
        [{"a": "x", "n": A}],
        [{"n": AB}],
    ),
}


@pytest.mark.parametrize("kind", CLOSED)
def test_objects_with_declared_properties_are_closed_unless_the_schema_opens_them(kind: str) -> None:
    schema, taken, refused = CLOSED[kind]
    for answer in taken:
        jsonschema.validate(answer, schema)
        assert accepts(of(schema), json.dumps(answer, separators=(",", ":"))), answer
    for answer in refused:
        assert not accepts(of(schema), json.dumps(answer, separators=(",", ":"))), answer


def test_the_switches_of_vllm_open_objects_and_allow_white_space() -> None:
    schema, spaced = an_object(a=TEXT), '{\n  "a": "x"\n}'
    compact = from_structured_outputs({"json": schema})
    assert accepts(compact, '{"a":"x"}') and not accepts(compact, spaced) and not accepts(compact, '{"b":1}')
    assert accepts(from_structured_outputs({"json": schema, "disable_any_whitespace": False}), spaced)
    assert accepts(from_structured_outputs({"json": schema, "disable_additional_properties": False}), '{"b":1}')
    assert accepts(from_structured_outputs({"json": schema, "whitespace_pattern": " "}), '{ "a": "x" }')
    with pytest.raises(InvalidRequest, match="true or false"):
        from_structured_outputs({"json": schema, "disable_any_whitespace": "no"})


def test_a_property_that_is_only_required_may_be_anything() -> None:
    schema = an_object(z=TEXT, a=NUMBER) | {"required": ["b"]}
    assert accepts(of(schema), '{"z":"c","a":1,"b":[1]}')
    assert not accepts(of(schema), '{"z":"c","a":1}')
    assert not accepts(of(schema), '{"b":1,"c":1}')


REFERENCE = {"$ref": "#/$defs/A"}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "schema", [an_object(b=NUMBER), REFERENCE, {"allOf": [REFERENCE]}, {"type": ["object"], "anyOf": [REFERENCE]}]
)
def test_nullable_of_openapi_allows_null(schema: dict[str, Any], strict: bool) -> None:
    whole = an_object(a=schema | {"nullable": True}) | {"$defs": {"A": an_object(b=NUMBER)}}
    assert accepts(of(whole, strict), '{"a":{"b":1}}')
    assert accepts(of(whole, strict), '{"a":null}')
    assert not accepts(of(whole, strict), '{"a":1}')
    closed = an_object(a=schema | {"nullable": False}) | {"$defs": {"A": an_object(b=NUMBER)}}
    assert not accepts(of(closed, strict), '{"a":null}')


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dialect", ["https://json-schema.org/draft-07/schema#", "https://spec.openapis.org/oas/3.1/x"])
def test_a_schema_may_name_any_dialect(dialect: str, strict: bool) -> None:
    schema = an_object(a=NUMBER) | {"$schema": dialect}
    assert accepts(of(schema, strict), '{"a":1}')
    assert not accepts(of(schema, strict), '{"a":"b"}')


@pytest.mark.parametrize("pattern", [r"^(a)\1$", r"\ba\b", r"^[^]*$", r"\Aa\Z", "^{a}$", "^[[]$"])
def test_patterns_of_other_dialects_are_annotations_unless_strict(pattern: str) -> None:
    schema = an_object(a=TEXT | {"pattern": pattern})
    assert accepts(of(schema), '{"a":"anything"}')
    with pytest.raises(InvalidRequest):
        of(schema, strict=True).to_grammar()


@pytest.mark.parametrize("pattern", ["([", "a)", "*"])
def test_a_pattern_that_is_none_in_any_dialect_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest):
        of(an_object(a=TEXT | {"pattern": pattern})).to_grammar()


def test_what_strict_refuses_is_named_once() -> None:
    with pytest.raises(InvalidRequest) as refused:
        of({"type": "array", "uniqueItems": True}, strict=True).to_grammar()
    assert str(refused.value).count("response_format") == 1


@pytest.mark.parametrize(
    "parameters",
    [
        {"$id": "https://example.com/s.json", "definitions": {"A": NUMBER}} | an_object(a={"$ref": "#/definitions/A"}),
        {"$defs": {"A": NUMBER | {"$anchor": "number"}}} | an_object(a={"$ref": "#number"}),
        {"$defs": {"A": NUMBER | {"$id": "A"}}} | an_object(a={"$ref": "A"}),
        an_object(a=NUMBER, b={"$ref": "#"}),
        an_object(**{"$id": NUMBER, "a": {"$ref": "#/properties/$id"}}),
    ],
)
def test_references_of_a_tools_parameters_are_followed_in_each_form(parameters: dict[str, Any]) -> None:
    structured = calls_of({"name": "first"}, {"name": "f", "parameters": parameters})
    assert accepts(structured, '[{"name":"f","arguments":{"a":1}}]')
    assert not accepts(structured, '[{"name":"f","arguments":{"a":"b"}}]')


@pytest.mark.parametrize("name", ["", "#", "#a", "s.json", "https://example.com/s.json#"])
@pytest.mark.parametrize("keyword", ["$id", "id"])
def test_tools_may_have_the_same_id(keyword: str, name: str) -> None:
    tools = [
        {"name": tool, "parameters": {keyword: name, "$defs": {"A": kind}} | an_object(a=REFERENCE, b={"$ref": "#"})}
        for tool, kind in (("f", NUMBER), ("g", TEXT))
    ]
    structured = calls_of(*tools)
    for tool, text in (("f", '"g"'), ("g", "1")):
        assert not accepts(structured, f'[{{"name":"{tool}","arguments":{{"a":{text}}}}}]')
    assert accepts(structured, '[{"name":"f","arguments":{"a":1,"b":{"a":2}}},{"name":"g","arguments":{"a":"b"}}]')


@pytest.mark.parametrize(
    ("named", "reference"),
    [
        ({"$anchor": "same"}, "#same"),
        ({"$id": "#same"}, "#same"),
        ({"$id": "same"}, "same"),
        ({"$id": "https://a.example/same"}, "https://a.example/same"),
        ({"$id": "https://a.example/same", "$anchor": "here"}, "https://a.example/same#here"),
    ],
)
def test_tools_may_use_the_same_names_within_their_schemas(named: dict[str, Any], reference: str) -> None:
    tools = [
        {"name": tool, "parameters": {"$defs": {"A": named | kind}} | an_object(a={"$ref": reference})}
        for tool, kind in (("f", NUMBER), ("g", TEXT))
    ]
    structured = calls_of(*tools)
    assert accepts(structured, '[{"name":"f","arguments":{"a":1}},{"name":"g","arguments":{"a":"b"}}]')
    for tool, text in (("f", '"b"'), ("g", "1")):
        assert not accepts(structured, f'[{{"name":"{tool}","arguments":{{"a":{text}}}}}]')


def test_a_reference_in_a_part_with_an_id_is_relative_to_that_part() -> None:
    inner = {"$id": "inner", "$defs": {"A": TEXT}} | an_object(a={"$ref": "#/$defs/A"}, b={"$ref": "/outer#/$defs/A"})
    parameters = {"$id": "https://a.example/outer", "$defs": {"A": NUMBER}} | an_object(inner=inner)
    jsonschema.validate({"inner": {"a": "x", "b": 1}}, parameters)
    form = calls_of({"name": "f", "parameters": parameters})
    assert accepts(form, '[{"name":"f","arguments":{"inner":{"a":"x","b":1}}}]')
    assert not accepts(form, '[{"name":"f","arguments":{"inner":{"a":1}}}]')
    assert not accepts(form, '[{"name":"f","arguments":{"inner":{"b":"x"}}}]')


def test_a_keyword_that_is_null_was_not_given() -> None:
    """Encoders of several languages write it so, as in the schemas of MCP servers."""
    schema = an_object(a=TEXT | {"format": None, "enum": None}, b={"const": None}) | {"required": None, "$defs": None}
    assert accepts(of(schema), '{"a":"x","b":null}')
    assert not accepts(of(schema), '{"b":1}')
    assert accepts(of({"type": "object", "properties": None}, strict=True), "{}")
    assert not accepts(of(an_object(a=TEXT) | {"additionalProperties": None}), '{"c":1}')


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        an_object(a=TEXT) | {"propertyNames": {"pattern": 5}},
        an_object(a=TEXT) | {"propertyNames": {"maxLength": 10**30}},
        an_object(a=TEXT) | {"minProperties": 10**20},
    ],
)
def test_a_keyword_with_an_impossible_value_is_refused_or_left_out(schema: Any, strict: bool) -> None:
    with contextlib.suppress(InvalidRequest):
        of(schema, strict).to_grammar()


@pytest.mark.parametrize("name", ["Page[User]", "List<Of A>", "a/b", "50%", "é", "a~b"])
@pytest.mark.parametrize("encoded", [False, True])
def test_a_definition_may_have_any_name(name: str, encoded: bool) -> None:
    pointer = name.replace("~", "~0").replace("/", "~1")
    # A percent sign that is meant itself is always encoded.
    pointer = quote(pointer) if encoded else pointer.replace("%", "%25")
    reference = {"$ref": f"#/$defs/{pointer}"}
    schema = {"$defs": {name: an_object(a=NUMBER)}, "allOf": [reference, an_object(b=reference)]}
    jsonschema.validate({"a": 1, "b": {"a": 1}}, schema)
    assert accepts(of(schema), '{"a":1,"b":{"a":1}}')
    assert not accepts(of(schema), '{"a":1,"b":{"a":"x"}}')


@pytest.mark.parametrize(("named", "reference"), [({"$anchor": "base"}, "#base"), ({"$id": "base"}, "base")])
def test_what_a_name_refers_to_may_be_combined_with_others(named: dict[str, Any], reference: str) -> None:
    schema = {"$defs": {"A": named | an_object(a=NUMBER)}, "allOf": [{"$ref": reference}, an_object(b=TEXT)]}
    jsonschema.validate({"a": 1, "b": "x"}, schema)
    assert accepts(of(schema), '{"a":1,"b":"x"}')
    assert not accepts(of(schema), '{"a":"x","b":"x"}')


def test_data_that_looks_like_a_schema_stays_what_it_is() -> None:
    data = {"$ref": "#/$defs/A", "$id": "x", "$anchor": "y"}
    parameters = an_object(
        **{"a": {"const": data}, "const": {"$ref": "#/$defs/A"}, "$ref": NUMBER, "default": NUMBER | {"default": data}}
    ) | {"$defs": {"A": NUMBER}, "examples": [data]}
    made = call_schema({"name": "f"}, "#/anyOf/3", parameters)["properties"]["arguments"]
    at = "#/anyOf/3/properties/arguments"
    assert made["properties"]["a"] == {"const": data} and made["examples"] == [data]
    assert made["properties"]["default"] == NUMBER | {"default": data}
    assert made["properties"]["const"] == {"$ref": f"{at}/$defs/A"} and made["properties"]["$ref"] == NUMBER


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_of_64_bits_bound_nothing(kind: str) -> None:
    bounded = {"type": kind, "minimum": -(2**63), "maximum": 2**63 - 1}
    assert accepts(of(an_object(a=bounded)), '{"a":-5}')
    assert not accepts(of(an_object(a=bounded | {"minimum": 0})), '{"a":-5}')
    assert accepts(of(an_object(a={"type": "number", "minimum": 0.1, "exclusiveMaximum": 1e308})), '{"a":5.5}')


@pytest.mark.parametrize("required", [[["a"]], [1], {"a": 1}])
def test_a_faulty_list_of_required_names_is_refused(required: Any) -> None:
    with pytest.raises(InvalidRequest):
        of(an_object(a=TEXT) | {"required": required}).to_grammar()


def test_a_schema_may_be_true() -> None:
    assert accepts(of(True), "[1,{}]")


def test_thousands_of_texts_are_one_choice() -> None:
    texts = [f"choice number {number}" for number in range(2001)] + ['with "quotes"\n', "日本"]
    structured = Structured("choice", texts, "x")
    for text in texts[::500] + texts[-2:]:
        assert accepts(structured, text)
    assert not accepts(structured, "choice number 2001")


def test_a_chain_of_references_is_prepared_in_time() -> None:
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, an_object(a=TEXT)]} for i in range(300)}
    assert prepare({"$defs": chain | {"d300": an_object(a=TEXT)}, "$ref": "#/$defs/d0"})
