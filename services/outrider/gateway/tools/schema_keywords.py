"""What becomes of each keyword of JSON Schema 2020-12: enforced, written as keywords that are, or not enforced.

llguidance enforces most. Some others are written here as keywords that it enforces. Knows one schema at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

ANNOTATIONS = frozenset(
    {"$schema", "$vocabulary", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly"}
    | {"writeOnly", "contentEncoding", "contentMediaType", "contentSchema"}
)
"""They say nothing about what is valid (2020-12 Validation, 8 and 9)."""
UNENFORCED = frozenset(
    {"not", "if", "then", "else", "uniqueItems", "maxContains", "contains", "propertyNames", "dependentRequired"}
    | {"dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"}
)
"""Where one of these is left, it could not be written otherwise."""
_IN_PLACE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"})
_NOTHING_IF_FALSE = ("uniqueItems", "not")
_MAX_EXACT = 2**53
_COUNTS = frozenset({"Items", "Length", "Properties", "Contains"})
_OF_NAMES = frozenset(
    {"type", "pattern", "minLength", "maxLength", "enum", "const", "title", "description", "$comment"}
)


def inexact(schema: Mapping[str, Any]) -> str:
    """The keyword of this schema with a number that the library would take for another; empty if there is none."""
    values = [*([schema["const"]] if "const" in schema else []), *_listed(schema.get("enum"))]
    return next(("const" if "const" in schema else "enum" for value in values if any(_large(value))), "")


def _large(value: Any) -> Iterator[bool]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _large(each)
    elif isinstance(value, int | float) and abs(value) > _MAX_EXACT:
        yield True


def rewritten(schema: Mapping[str, Any], closed: bool) -> dict[str, Any]:
    """The schema with its keywords written as those that the library enforces, where that is possible. `closed`: it has
    no other properties than those it declares."""
    kept = {name: value for name, value in schema.items() if value is not False or name not in _NOTHING_IF_FALSE}
    made = {name: _as_count(value) if name[3:] in _COUNTS else value for name, value in kept.items()}
    _unevaluated(made)
    _named(made, closed)
    if made.get("minProperties") == 0:
        del made["minProperties"]
    return made


def _as_count(value: Any) -> Any:
    """2.0 is an integer (2020-12 Core, 4.2.3), which the library does not know."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _named(made: dict[str, Any], closed: bool) -> None:
    names = made.get("propertyNames")
    if names is False:
        names = {"enum": []}
    if names is True:
        del made["propertyNames"]
    if not isinstance(names, Mapping) or names.keys() - _OF_NAMES or "patternProperties" in made:
        return
    if names.get("type", "string") != "string":
        return
    declared, others = made.get("properties", {}), made.get("additionalProperties", not closed)
    listed = _listed(names.get("enum")) if "enum" in names else [names["const"]] if "const" in names else None
    lengths = f"{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}"
    expressions = [rf"^(.|\n){lengths}$"] if names.keys() & {"minLength", "maxLength"} else []
    expressions += [names["pattern"]] if "pattern" in names else []
    if not isinstance(declared, Mapping) or len(expressions) + (listed is not None) > 1:
        return
    try:
        fits = _fits(listed, expressions)
        kept = {name: each if fits(name) else False for name, each in declared.items()}
    except re.error:
        return
    del made["propertyNames"]
    if kept:
        made["properties"] = kept
    if others is False or (listed is None and not expressions):
        return
    if listed is None:
        made |= {"patternProperties": {expressions[0]: others}, "additionalProperties": False}
    else:
        more = {name: others for name in listed if isinstance(name, str) and name not in kept}
        made |= {"properties": kept | more, "additionalProperties": False}


def uncounted(schema: Mapping[str, Any], closed: bool) -> set[str]:
    """The keywords by which the library would count no properties, or those that nobody declared alone."""
    counts = {name: schema[name] for name in ("minProperties", "maxProperties") if schema.get(name) is not None}
    declared, required = schema.get("properties", ()), _listed(schema.get("required"))
    closed = (closed or schema.get("additionalProperties") is False) and "patternProperties" not in schema
    optional = isinstance(declared, Mapping) and any(name not in required for name in declared)
    if not schema.keys() & _IN_PLACE and (not optional or (closed and all(count == 1 for count in counts.values()))):
        return set()
    return set(counts)


def _fits(listed: Sequence[Any] | None, expressions: Sequence[str]) -> Callable[[str], bool]:
    compiled = [re.compile(each) for each in expressions]
    return lambda name: (listed is None or name in listed) and all(each.search(name) for each in compiled)


def _unevaluated(made: dict[str, Any]) -> None:
    """Where no part of the schema describes the same value, all that is not declared is unevaluated."""
    if "unevaluatedItems" in made and not made.keys() & (_IN_PLACE | {"contains"}):
        others = made.pop("unevaluatedItems")
        if not isinstance(made.get("items"), list):
            made.setdefault("items", others)
        elif "additionalItems" not in made:
            made["additionalItems"] = others
    if made.get("unevaluatedProperties") is True:
        del made["unevaluatedProperties"]
    if "unevaluatedProperties" in made and not made.keys() & _IN_PLACE:
        made.setdefault("additionalProperties", made.pop("unevaluatedProperties"))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
