"""What becomes of each keyword of JSON Schema 2020-12: enforced, written as keywords that are, or not enforced.

llguidance enforces most. Others are written here as keywords that it enforces; what is then accepted is valid, though
not everything valid is accepted: an array's contained items come first, for example. Knows one schema at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from math import prod
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
_MAX_CONDITIONS = 4
"""Each doubles what the library makes of an object."""
_MAX_CONTAINED = 64
_MAX_WAYS = 32
"""In which an object may have as many properties as it has to."""
_COUNTS = frozenset({"Items", "Length", "Properties", "Contains"})
_OF_NAMES = frozenset(
    {"type", "pattern", "minLength", "maxLength", "enum", "const", "title", "description", "$comment"}
)
Resolve = Callable[[str], Any]


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


def rewritten(schema: Mapping[str, Any], closed: bool, resolve: Resolve) -> dict[str, Any]:
    """The schema with its keywords written as those that the library enforces, where that is possible. `closed`: it has
    no other properties than those it declares. `resolve`: what a reference leads to, or None."""
    kept = {name: value for name, value in schema.items() if value is not False or name not in _NOTHING_IF_FALSE}
    made = {name: _as_count(value) if name[3:] in _COUNTS else value for name, value in kept.items()}
    _unevaluated(made, resolve)
    _conditions(made)
    _contained(made)
    _named(made, closed)
    _numbered(made, closed)
    return made


def _as_count(value: Any) -> Any:
    """2.0 is an integer (2020-12 Core, 4.2.3), which the library does not know."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _conditions(made: dict[str, Any]) -> None:
    """Of `dependentRequired` and `dependentSchemas`; `dependencies` was both."""
    names = [name for name in ("dependentRequired", "dependentSchemas", "dependencies") if name in made]
    every = [item for name in names for item in _items(made[name])]
    if not 1 <= len(every) <= _MAX_CONDITIONS or not all(isinstance(made[name], Mapping) for name in names):
        return
    parts = []
    for name, then in every:
        # Open, because other parts of the schema describe the same object.
        needs = {"required": [name, *(then if isinstance(then, list) else [])], "additionalProperties": True}
        also = [] if isinstance(then, list) else [{"additionalProperties": True} | then if _is_object(then) else then]
        parts.append(
            {"anyOf": [{"properties": {name: False}, "additionalProperties": True}, {"allOf": [needs, *also]}]}
        )
    for name in names:
        del made[name]
    made["allOf"] = [*_listed(made.get("allOf")), *parts]


def _contained(made: dict[str, Any]) -> None:
    """The contained items come first, after those that have their places."""
    if "contains" not in made:
        made.pop("minContains", None)
        return
    count, most = made.get("minContains", 1), made.get("maxItems")
    # As older drafts wrote places, and as this one does.
    older = isinstance(made.get("items"), list)
    first = made["items"] if older else _listed(made.get("prefixItems"))
    rest = made.get("additionalItems" if older else "items", True)
    if "maxContains" in made or not isinstance(count, int) or not 0 <= count <= _MAX_CONTAINED:
        return
    if isinstance(most, int) and len(first) + count > most:
        return
    contains = made["contains"]
    each = contains if rest is True else {"allOf": [contains, rest]}
    for name in ("contains", "minContains", "prefixItems"):
        made.pop(name, None)
    if count:
        # As older drafts wrote it, which the library reads in each of them.
        made |= {"items": [*first, *[each] * count], "additionalItems": rest}
        least = made.get("minItems", 0)
        made["minItems"] = max(least if isinstance(least, int) else 0, len(first) + count)
    elif first:
        made |= {"items": first, "additionalItems": rest}


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
    except (re.error, TypeError, OverflowError):
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


def _numbered(made: dict[str, Any], closed: bool) -> None:
    """As which optional properties there are, where the library does not count them. It counts those of an object
    without optional ones, and up to one of a closed object."""
    if made.get("minProperties") == 0:
        del made["minProperties"]
    declared, required = made.get("properties", {}), _listed(made.get("required"))
    counts = {name: made[name] for name in ("minProperties", "maxProperties") if isinstance(made.get(name), int)}
    closed = (closed or made.get("additionalProperties") is False) and "patternProperties" not in made
    if not isinstance(declared, Mapping) or not closed or all(count == 1 for count in counts.values()):
        return
    optional = [name for name, each in declared.items() if name not in required and each is not False]
    least, most = counts.get("minProperties", 0) - len(required), counts.get("maxProperties", 2**53) - len(required)
    choices = [combinations(optional, min(least, len(optional) + 1))] if least > 0 else []
    choices += [combinations(optional, len(optional) - most)] if 0 <= most < len(optional) else []
    ways = [list(islice(each, _MAX_WAYS + 1)) for each in choices]
    if most < 0 or not all(ways) or prod(map(len, ways)) > _MAX_WAYS:
        return
    for name in counts:
        del made[name]
    needs = [{"required": list(names)} for names in ways[0]] if least > 0 else []
    lacks = [{"properties": dict.fromkeys(names, False)} for names in ways[-1]] if most < len(optional) else []
    parts = [{"anyOf": [each | {"additionalProperties": True} for each in part]} for part in (needs, lacks) if part]
    made["allOf"] = [*_listed(made.get("allOf")), *parts]


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


def _unevaluated(made: dict[str, Any], resolve: Resolve) -> None:
    if "unevaluatedItems" in made and not made.keys() & (_IN_PLACE | {"contains"}):
        others = made.pop("unevaluatedItems")
        if not isinstance(made.get("items"), list):
            made.setdefault("items", others)
        elif "additionalItems" not in made:
            made["additionalItems"] = others
    if "unevaluatedProperties" not in made:
        return
    others = made["unevaluatedProperties"]
    if others is True or not made.keys() & _IN_PLACE:
        del made["unevaluatedProperties"]
        if others is not True:
            made.setdefault("additionalProperties", others)
        return
    names = _all_names(made, resolve, 0)
    if others is False and names is not None:
        del made["unevaluatedProperties"]
        part = {"properties": dict.fromkeys(names, True), "additionalProperties": False}
        made["allOf"] = [*_listed(made.get("allOf")), part]


def _all_names(schema: Any, resolve: Resolve, depth: int) -> list[str] | None:
    """The properties that a schema evaluates, whatever the object; None if that depends, or cannot be said."""
    if schema is True or depth > 16:
        return [] if schema is True else None
    unclear = _IN_PLACE - {"$ref", "allOf"} | {"additionalProperties", "patternProperties", "$dynamicRef"}
    if not _is_object(schema) or schema.keys() & unclear or (depth and "unevaluatedProperties" in schema):
        return None
    below = [*_listed(schema.get("allOf")), *([resolve(schema["$ref"])] if isinstance(schema.get("$ref"), str) else [])]
    found = list(schema.get("properties", {}))
    for each in below:
        if (names := _all_names(each, resolve, depth + 1)) is None:
            return None
        found += names
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else []


def _is_object(schema: Any) -> bool:
    return isinstance(schema, Mapping)
