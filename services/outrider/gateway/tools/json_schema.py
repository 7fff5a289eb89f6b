"""JSON schemas as llguidance takes them: objects closed, and without annotations that it refuses.

Knows JSON Schema 2020-12 and the drafts before it; not where a schema comes from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from outrider.gateway.tools.schema_keywords import UNENFORCED, inexact, rewritten, uncounted
from outrider.gateway.tools.schema_references import at, escaped, moved

BOUNDED_WHITESPACE = r"\n? {0,20}"
"""Bounded, because a model that may write any white space may do so up to max_tokens."""
# Where a schema has others: by name, in a list, or alone.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_ALONE = frozenset(
    {"items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else"}
    | {"unevaluatedItems", "unevaluatedProperties"}
)
# Of these, those that apply to the same value as the schema itself.
_IN_PLACE = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"})
_OPENERS = frozenset({"additionalProperties", "unevaluatedProperties"})
_MAY_BE_NULL = ("const", "default", "example")
"""Null is how encoders write any other keyword that was not given."""
_MAX_ROUNDS = 20
_MAX_FORMAT_CHARS = 100
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_MAX_BOUND = 2**53
"""The library makes an expression of a range, and fails for very large ones: those of 64 bits bound nothing."""
# What the library refuses in a pattern with one of these is another dialect's; without, the pattern is at fault.
_OF_DIALECTS = re.compile(r"\(\?|\\[A-Za-z0-9]|\[\^\]|\[[^\]]*\[|\{")


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """How JSON is written, and what is open in it."""

    whitespace: str = ""
    """A regular expression; empty for none."""
    gap: str = ""
    """A regular expression: what may follow each comma and colon."""
    closed: bool = True
    """Whether an object whose schema declares properties has only these, unless the schema says otherwise."""

    @property
    def options(self) -> dict[str, Any]:
        """For llguidance. Lenient: keywords that it does not know are ignored."""
        white = {"whitespace_pattern": self.whitespace} if self.whitespace else {"whitespace_flexible": False}
        separators = {"item_separator": "," + self.gap, "key_separator": ":" + self.gap}
        return {**separators, "coerce_one_of": True, "lenient": True, **white}


AS_TRAINED = JsonStyle(gap=" ?")
"""Models learn to write JSON with a space after each comma and colon. One that may not writes other values."""


def prepare(schema: Any, style: JsonStyle = AS_TRAINED, *, strict: bool = False) -> dict[str, Any]:
    """The schema as llguidance takes it, with its own `x-guidance` removed, and without formats that are annotations.
    Patterns that it cannot read (look-around) stay if `strict`. Raises ValueError that names what cannot be enforced:
    if `strict` all of it, otherwise only numbers that would become others."""
    schema = moved(schema if isinstance(schema, dict) else {"anyOf": [schema]}, "#")
    walk = _Walk(schema, style.closed, strict)
    for _ in range(_MAX_ROUNDS):
        found = walk.of(schema)
        if walk.found <= walk.open:
            break
        walk = _Walk(schema, style.closed, strict, walk.open | walk.found)
    else:
        walk = _Walk(schema, False, strict)
        found = walk.of(schema)
    if strict and walk.unenforced:
        raise ValueError(f"is strict, and no grammar enforces {', '.join(sorted(walk.unenforced))}")
    return found


@dataclass(slots=True)
class _Walk:
    """One pass over a schema.

    Several schemas may describe one object: `properties` beside `anyOf`, two of `allOf`, what a `$ref` beside them
    names. None of these may be closed, because each lacks the properties of the others.
    """

    root: Mapping[str, Any]
    closes: bool
    strict: bool
    open: frozenset[str] = frozenset()
    """Places of schemas that may not be closed, as JSON pointers, because a reference combines them with others."""
    found: set[str] = field(default_factory=set)
    """The places that this pass found to be combined."""
    unenforced: set[str] = field(default_factory=set)
    """The keywords that this pass left as they are."""

    def of(self, schema: dict[str, Any], place: str = "#", closes: bool = True) -> dict[str, Any]:
        schema = {name: value for name, value in schema.items() if value is not None or name in _MAY_BE_NULL}
        closes = closes and place not in self.open and _num_parts(schema) <= 1
        if not closes and isinstance(reference := schema.get("$ref"), str):
            self.found.add(reference)
        if name := inexact(schema):
            raise ValueError(f"{name}: numbers beyond 2^53 cannot be enforced exactly")
        declares = self.closes and closes and "properties" in schema and not schema.keys() & _OPENERS
        schema = rewritten(schema, declares, partial(at, self.root))
        self.unenforced |= schema.keys() & UNENFORCED
        if self.strict:
            self.unenforced |= {name for name in _BOUNDS if _is_beyond(schema.get(name))}
        else:
            schema = {name: value for name, value in schema.items() if name not in uncounted(schema, declares)}
        made = {
            name: self._value(name, value, f"{place}/{name}", closes or name not in _IN_PLACE)
            for name, value in schema.items()
            if self._keeps(name, value)
        }
        if declares and "additionalProperties" not in schema:
            made |= _undeclared(made) | {"additionalProperties": False}
        return _nullable(made)

    def _keeps(self, name: str, value: Any) -> bool:
        if name in ("format", "$schema"):
            return _is_known(name, value)
        if name in _BOUNDS and not self.strict:
            return not _is_beyond(value)
        return name != "x-guidance" and (name != "pattern" or self.strict or _is_readable(value))

    def _value(self, name: str, value: Any, place: str, closes: bool) -> Any:
        if name == "patternProperties" and isinstance(value, dict) and not self.strict:
            value = {pattern: each for pattern, each in value.items() if _is_readable(pattern)}
        if name in _NAMED and isinstance(value, dict):
            return {key: self._below(each, f"{place}/{escaped(key)}", closes) for key, each in value.items()}
        if name in _LISTED and isinstance(value, list):
            return [self._below(each, f"{place}/{index}", closes) for index, each in enumerate(value)]
        return self._below(value, place, closes) if name in _ALONE else value

    def _below(self, schema: Any, place: str, closes: bool) -> Any:
        return self.of(schema, place, closes) if isinstance(schema, dict) else schema


def _is_beyond(bound: Any) -> bool:
    return isinstance(bound, int | float) and abs(bound) > _MAX_BOUND


def _num_parts(schema: Mapping[str, Any]) -> int:
    """How many schemas describe the properties of the same object."""
    branches = [[schema[name]] for name in ("then", "else") if name in schema]
    branches += [list(schema[name]) for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    if isinstance(dependent := schema.get("dependentSchemas"), dict):
        branches.append(list(dependent.values()))
    every = schema["allOf"] if isinstance(schema.get("allOf"), list) else ()
    num_parts = ("properties" in schema) + ("$ref" in schema) + sum(map(_describes, every))
    return num_parts + sum(any(map(_describes, each)) for each in branches)


def _describes(schema: Any) -> bool:
    """Whether a schema may name properties."""
    return isinstance(schema, dict) and bool(schema.keys() & {"properties", "$ref", *_IN_PLACE})


def _undeclared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The properties with those that are only required: they may be anything."""
    declared, required = schema["properties"], schema.get("required")
    if not isinstance(declared, dict) or not isinstance(required, list) or "patternProperties" in schema:
        return {}
    return {"properties": declared | {name: {} for name in required if isinstance(name, str) and name not in declared}}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without OpenAPI 3.0's `nullable`, which says that the value may also be null."""
    if schema.get("nullable") is not True:
        return schema
    plain = {name: value for name, value in schema.items() if name != "nullable"}
    if isinstance(kind := schema.get("type"), str) and not schema.keys() & {"$ref", *_IN_PLACE}:
        return plain | {"type": [kind, "null"]}
    return {"anyOf": [plain, {"type": "null"}]}


def _is_known(name: str, value: Any) -> bool:
    """Whether a format can be enforced, and a dialect is known. Other formats are annotations, as the specification has
    it (2020-12, 7.2.1), and in other dialects the keywords that are enforced mean the same."""
    return isinstance(value, str) and len(value) <= _MAX_FORMAT_CHARS and _is_taken(name, value)


def _is_readable(value: Any) -> bool:
    """Whether the library reads the pattern. It reports anything but a text itself."""
    return not isinstance(value, str) or not _OF_DIALECTS.search(value) or _is_taken("pattern", value)


@lru_cache(maxsize=1024)
def _is_taken(keyword: str, value: str) -> bool:
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", keyword: value})
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
