"""Structured output that costs much: lexers and parsers with many states, and expressions that compile for long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from outrider.gateway.tools.structured import Kind
from outrider.rpc.v1 import generation_pb2

NUM_GRAMMARS = 200


def hostile() -> Iterator[tuple[Kind, Any]]:
    """As many as NUM_GRAMMARS, all different."""
    for number in range(NUM_GRAMMARS // 4):
        yield "regex", rf"(.{{0,{200 + number}}}a){{2}}b"
        yield "regex", rf"(\w{{1,{20 + number}}} ){{1,50}}[\p{{Greek}}\p{{Han}}]{{3,30}}"
        fields = {f"{number}_{k}": {"type": "string", "pattern": f"^(.{{0,{20 + k}}}a){{2}}b$"} for k in range(100)}
        yield "json_schema", {"type": "object", "properties": fields}
        yield "grammar", f'start: e\ne: e e | "a" e | "({number}" e ")" | "b"'


def as_message(kind: Kind, value: Any) -> generation_pb2.StructuredOutput:
    """Not for a choice."""
    text = value if isinstance(value, str) else json.dumps(value)
    message = generation_pb2.StructuredOutput()
    setattr(message, kind, text)
    return message
