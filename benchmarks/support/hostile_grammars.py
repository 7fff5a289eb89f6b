"""Structured output that costs much: lexers and parsers with many states, and what is compiled for long or for ever."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from outrider.gateway.tools.structured import Kind
from outrider.rpc.v1 import generation_pb2

NUM_LARGE, NUM_ENDLESS = 200, 300
NUM_GRAMMARS = NUM_LARGE + NUM_ENDLESS
_SIZES = NUM_ENDLESS // 10
_PRIMES = [number for number in range(11, 400) if all(number % low for low in range(2, number))]


def hostile() -> Iterator[tuple[Kind, Any]]:
    """As many as NUM_GRAMMARS, all different; both kinds in turns."""
    compiled, endless = large(), _endless()
    for _ in range(NUM_GRAMMARS // 5):
        yield from (next(compiled), next(endless), next(compiled), next(endless), next(endless))


def large() -> Iterator[tuple[Kind, Any]]:
    """NUM_LARGE, each of which a process may compile."""
    for number in range(NUM_LARGE // 4):
        yield "regex", rf"(.{{0,{200 + number}}}a){{2}}b"
        yield "regex", rf"(\w{{1,{20 + number}}} ){{1,50}}[\p{{Greek}}\p{{Han}}]{{3,30}}"
        fields = {f"{number}_{k}": {"type": "string", "pattern": f"^(.{{0,{20 + k}}}a){{2}}b$"} for k in range(100)}
        yield "json_schema", {"type": "object", "properties": fields}
        yield "grammar", f'start: e\ne: e e | "a" e | "({number}" e ")" | "b"'


def _endless() -> Iterator[tuple[Kind, Any]]:
    """Ten kinds in sizes from small to such as no machine compiles."""
    for size in range(2, 2 + _SIZES):
        patterns = {"allOf": [{"type": "string", "pattern": f"(.|\\n)*a.{{{i}}}"} for i in range(size)]}
        yield "json_schema", {"title": f"patterns {size}"} | patterns
        yield "json_schema", {"type": "object", "properties": {"v": {"allOf": _multiples(size)}}, "required": ["v"]}
        branches = [
            {"anyOf": [{"properties": {f"{i}_{j}": {"type": "string"}}} for j in range(4)]} for i in range(size)
        ]
        yield "json_schema", {"type": "object", "allOf": branches}
        yield "grammar", "start: T\nT: " + " & ".join(f"/(.|\\n)*a.{{{i}}}/" for i in range(size))
        yield "grammar", f"start: T\nT: ~/(.|\\n)*(a|b)(.|\\n){{{size}}}/ & ~/(.|\\n)*(a|c)(.|\\n){{{size + 1}}}/"
        yield "regex", f"((a{{0,{5 * size}}}){{0,{5 * size}}}){{0,{5 * size}}}"
        yield "grammar", f'start: x{{0,{5 * size}}}\nx: y{{0,{5 * size}}}\ny: "a"{{0,{5 * size}}}'
        # The parser of JSON reads the letters, and a search of the text does not.
        yield "grammar", "start: %json " + re.sub('"(allOf|pattern)"', _spelled, json.dumps(patterns))
        yield "json_schema", {"type": "array", "contains": patterns, "minContains": min(64, 2 * size)}
        nested: dict[str, Any] = {"type": "string", "pattern": f"^(.{{0,{size}}}a){{9}}$"}
        for depth in range(4 * size):
            nested = {"type": "object", "patternProperties": {f"^{depth}(.*a){{2}}": nested}}
        yield "json_schema", nested


def _multiples(count: int) -> list[dict[str, Any]]:
    return [{"type": "integer", "multipleOf": prime} for prime in _PRIMES[:count]]


def _spelled(name: re.Match[str]) -> str:
    return f'"\\u{ord(name[1][0]):04x}{name[1][1:]}"'


def as_message(kind: Kind, value: Any) -> generation_pb2.StructuredOutput:
    """Not for a choice."""
    text = value if isinstance(value, str) else json.dumps(value)
    message = generation_pb2.StructuredOutput()
    setattr(message, kind, text)
    return message
