"""Writes the manual's reference of the gateway's HTTP API, and OpenAPI, from the classes that read requests.

conf.py calls it. What a field means stands on the page of the API; here is what is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.gateway.http.errors import STATUSES
from outrider.gateway.http.responses_request import ResponsesRequest
from outrider.gateway.http.schemas import Body, ChatRequest, CompletionRequest
from outrider.gateway.http.tokens import DetokenizeRequest, TokenizeRequest
from outrider.protocol.identity import package_version
from outrider.rpc.roles import ROUTES

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""What each route with a POST takes. The others have a GET."""

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
        }
    },
}


def openapi() -> dict[str, Any]:
    """As version 3.1 of the specification has it."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    for body in BODIES.values():
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[body.__name__] = schema
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider's gateway", "version": package_version()},
        "paths": {_path(route): _item(route) for route in ROUTES},
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _path(route: str) -> str:
    """Without Starlette's kinds of parameters."""
    return route.replace(":path}", "}")


def _item(route: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": _path(route).strip("/").replace("/", "_").replace("{name}", "name")}
    operation["responses"] = {"200": {"description": "What was asked for"}} | _failures()
    if not ROUTES[route].open:
        operation["security"] = [{"key": []}]
    if "{name" in route:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if (body := BODIES.get(route)) is None:
        return {"get": operation}
    operation["requestBody"] = {"required": True, "content": _json(f"#/components/schemas/{body.__name__}")}
    return {"post": operation}


def _failures() -> dict[str, Any]:
    statuses = sorted({status for status, _ in STATUSES.values()})
    kinds = {status: ", ".join(sorted({kind for s, kind in STATUSES.values() if s == status})) for status in statuses}
    error = _json("#/components/schemas/Error")
    return {str(status): {"description": kinds[status], "content": error} for status in statuses}


def _json(reference: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": reference}}}


def write_reference(page: Path, document: Path) -> None:
    """The page for people, and the document for tools."""
    document.parent.mkdir(exist_ok=True)
    document.write_text(json.dumps(openapi(), indent=2) + "\n")
    page.write_text("\n".join(_page()) + "\n")


def _page() -> Iterator[str]:
    yield from ("# HTTP reference", "")
    yield "Made from the classes that read requests. [API](api.md) says what the fields mean. The same for tools:"
    yield from ("<a href='openapi.json'>openapi.json</a>.", "", "| route | method | API key |", "|---|---|---|")
    for route, access in ROUTES.items():
        key = "none" if access.open else "asked for"
        yield f"| `{_path(route)}` | {'POST' if route in BODIES else 'GET'} | {key} |"
    yield from ("", "| status | type of the error |", "|---|---|")
    yield from (f"| {status} | {told['description']} |" for status, told in _failures().items())
    for route, body in BODIES.items():
        schema = body.model_json_schema()
        yield from ("", f"## {route}", "", "| field | type | default |", "|---|---|---|")
        for name, field in schema["properties"].items():
            default = "needed" if name in schema.get("required", ()) else f"`{json.dumps(field.get('default'))}`"
            yield f"| `{name}` | {_kind(field)} | {default} |"


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(one) for one in field["anyOf"] if one.get("type") != "null")
    if "$ref" in field:
        return "object"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"array of {_kind(field['items'])}" if field.get("items") else "array"
    return str(field.get("type", "any"))
