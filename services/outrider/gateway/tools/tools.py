"""The tools of a request, and the grammar that forces a call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import InvalidRequest
from outrider.gateway.tools.schema_references import moved
from outrider.gateway.tools.structured import Structured
from outrider.limits import MAX_FUNCTION_NAME_CHARS
from outrider.options.logits import MAX_GRAMMAR_BYTES

MAX_TOOLS = 128
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and whether the model must call one."""

    definitions: tuple[Mapping[str, Any], ...]
    """In the form of chat templates: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    choice: Literal["auto", "required", "named"] = "auto"
    name: str = ""
    """Name of the tool, if `choice` is "named"."""
    parallel: bool = True
    """Whether one answer may have several calls."""
    strict: frozenset[str] = frozenset()
    """Names of tools whose arguments must match their schema, also when the model decides whether to call."""
    legacy: bool = False
    """Whether they are OpenAI's older `functions`, which are called by the answer's `function_call`."""

    @property
    def field(self) -> str:
        """The client's name of the tools."""
        return "functions" if self.legacy else "tools"

    def __post_init__(self) -> None:
        if not 1 <= len(self.definitions) <= MAX_TOOLS:
            raise InvalidRequest(self.field, f"{len(self.definitions)} tools; 1 to {MAX_TOOLS} are allowed")
        names = self.names
        for i, name in enumerate(names):
            if not 1 <= len(name) <= MAX_FUNCTION_NAME_CHARS:
                message = f"a name has 1 to {MAX_FUNCTION_NAME_CHARS} characters"
                raise InvalidRequest(self._name_field(i), message)
            if name in names[:i]:
                raise InvalidRequest(self._name_field(i), f"two tools are named {name[:100]!r}")
        if self.choice == "named" and self.name not in names:
            where = "function_call.name" if self.legacy else "tool_choice.function.name"
            raise InvalidRequest(where, f"no tool is named {self.name[:100]!r}")

    def _name_field(self, number: int) -> str:
        return f"{self.field}[{number}]" + (".name" if self.legacy else ".function.name")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each["function"]["name"] for each in self.definitions)

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Those of the arguments, by name."""
        functions = [each["function"] for each in self.definitions]
        return {each["name"]: each.get("parameters") or NO_PARAMETERS for each in functions}

    def structured(self) -> Structured | None:
        """The form of the answer: a list of `{"name", "arguments"}`, or, for a named tool, its arguments alone.

        None if the model decides itself whether to call.
        """
        if self.choice == "auto":
            return None
        # Before they are walked through, here and as a schema.
        if (num_chars := len(json.dumps(self.definitions))) > MAX_GRAMMAR_BYTES:
            message = f"{num_chars} characters; at most {MAX_GRAMMAR_BYTES} are allowed where a call is required"
            raise InvalidRequest(self.field, message)
        if self.choice == "named":
            [function] = [each["function"] for each in self.definitions if each["function"]["name"] == self.name]
            strict = self.name in self.strict
            return Structured("json_schema", function.get("parameters") or NO_PARAMETERS, self.field, strict=strict)
        calls = [call_schema(each["function"], f"#/items/anyOf/{i}") for i, each in enumerate(self.definitions)]
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        strict = self.strict.issuperset(self.names)
        return Structured(
            "json_schema", schema if self.parallel else schema | {"maxItems": 1}, self.field, strict=strict
        )


def call_schema(function: Mapping[str, Any], place: str, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The schema of a call, to be put at `place` in another schema. `parameters` replaces the function's own."""
    parameters = parameters or function.get("parameters") or NO_PARAMETERS
    arguments = moved(parameters, f"{place}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
