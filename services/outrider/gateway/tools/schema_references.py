"""References within a JSON schema, for a schema that becomes a part of another.

Each becomes a JSON pointer from the root of the whole. Ids and anchors go: other parts may have the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urljoin

# Keywords whose value has schemas by names that a client chose, and those whose value is no schema.
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
# Draft 4 wrote it without the dollar.
_IDS = ("$id", "id")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_NAMES = (*_IDS, *_ANCHORS)
_IN_FRAGMENTS = "~!$&'()*+,;=:@"


def moved(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The schema with its references changed for `place` in another schema, a JSON pointer with `#`."""
    move, root = _Move(), _Resource(place, "")
    move.find(schema, root, place)
    found: dict[str, Any] = move.of(schema, root, place)
    return found


@dataclass(frozen=True, slots=True)
class _Resource:
    """What references are relative to: the whole schema, or one in it that has an id."""

    place: str
    uri: str

    def of(self, schema: Mapping[str, Any], place: str) -> _Resource:
        """The resource of a schema in this one."""
        base = _id(schema).partition("#")[0]
        return _Resource(place, urljoin(self.uri, base)) if base else self


def at(schema: Any, reference: str) -> Any:
    """What a reference leads to within the whole schema, after `moved`; None for nothing."""
    if not reference.startswith("#"):
        return None
    for part in filter(None, reference[1:].split("/")):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        elif isinstance(schema, Mapping):
            schema = schema.get(key)
        else:
            return None
    return schema


def escaped(key: str) -> str:
    """A part of a JSON pointer (RFC 6901), as it is in a URI's fragment."""
    return quote(key.replace("~", "~0").replace("/", "~1"), safe=_IN_FRAGMENTS)


def _id(schema: Mapping[str, Any]) -> str:
    return next((schema[name] for name in _IDS if isinstance(schema.get(name), str)), "")


@dataclass(slots=True)
class _Move:
    _resources: dict[str, _Resource] = field(default_factory=dict)
    """By id."""
    _anchors: dict[tuple[_Resource, str], str] = field(default_factory=dict)
    """Places."""
    _dynamic: Counter[str] = field(default_factory=Counter)
    """How many schemas have each dynamic anchor."""

    def find(self, value: Any, resource: _Resource, place: str, *, by_name: bool = False) -> None:
        """Notes all ids and anchors. `by_name`: of a mapping from names to schemas."""
        if isinstance(value, list):
            for index, each in enumerate(value):
                self.find(each, resource, f"{place}/{index}")
        elif isinstance(value, Mapping):
            if not by_name:
                resource = self._noted(value, resource, place)
            for name, each in value.items():
                if by_name or name not in _DATA:
                    below = f"{place}/{escaped(name)}"
                    self.find(each, resource, below, by_name=not by_name and name in _BY_NAME)

    def _noted(self, schema: Mapping[str, Any], parent: _Resource, place: str) -> _Resource:
        resource = parent.of(schema, place)
        base, _, fragment = _id(schema).partition("#")
        for uri in (base, resource.uri):
            self._resources.setdefault(uri, resource)
        for anchor in (fragment, *(schema.get(name) for name in _ANCHORS)):
            if isinstance(anchor, str) and anchor:
                self._anchors.setdefault((resource, anchor), place)
        if isinstance(dynamic := schema.get("$dynamicAnchor"), str):
            self._dynamic[dynamic] += 1
        return resource

    def of(self, value: Any, resource: _Resource, place: str, *, by_name: bool = False) -> Any:
        """The value with its references changed. Arguments as of `find`."""
        if isinstance(value, list):
            return [self.of(each, resource, f"{place}/{index}") for index, each in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        if by_name:
            return {name: self.of(each, resource, f"{place}/{escaped(name)}") for name, each in value.items()}
        resource = resource.of(value, place)
        return {
            self._plain(name, each): self._keyword(self._plain(name, each), each, resource, f"{place}/{escaped(name)}")
            for name, each in value.items()
            if not (name in _NAMES and isinstance(each, str))
        }

    def _plain(self, name: str, value: Any) -> str:
        """The keyword. A dynamic reference is a plain one where it can lead to one place only."""
        if name == "$dynamicRef" and isinstance(value, str) and self._dynamic[value.rpartition("#")[2]] <= 1:
            return "$ref"
        return name

    def _keyword(self, name: str, value: Any, resource: _Resource, place: str) -> Any:
        if name == "$ref" and isinstance(value, str):
            return self._resolved(value, resource)
        return value if name in _DATA else self.of(value, resource, place, by_name=name in _BY_NAME)

    def _resolved(self, reference: str, resource: _Resource) -> str:
        """The reference itself where it leads to another document, or to nothing."""
        base, _, fragment = reference.partition("#")
        named: Sequence[str] = (urljoin(resource.uri, base), base) if base else ()
        found = next((self._resources[uri] for uri in named if uri in self._resources), None if base else resource)
        if found is None:
            return reference
        if not fragment or fragment[0] == "/":
            # Names of generic types have brackets, which encoders of schemas leave as they are.
            return found.place + quote(unquote(fragment), safe="/" + _IN_FRAGMENTS)
        return self._anchors.get((found, fragment), reference)
