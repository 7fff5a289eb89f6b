"""Writes the manual's reference of the gateway's HTTP API, and OpenAPI: from the classes that read requests, and from
schemas of answers, against which tests hold real ones.

conf.py calls it. What a field means stands on the page of the API; here is what is taken and what comes back.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.gateway.http.anthropic.request import CountTokensRequest, MessagesRequest
from outrider.gateway.http.errors import MESSAGES, STATUSES
from outrider.gateway.http.openai.responses_request import ResponsesRequest
from outrider.gateway.http.openai.schemas import Body, ChatRequest, CompletionRequest
from outrider.gateway.http.tokens import DetokenizeRequest, TokenizeRequest
from outrider.protocol.identity import package_version
from outrider.rpc.access.roles import ROUTES

sys.path.insert(0, str(Path(__file__).parent))
from http_responses import SCHEMAS, STREAMED, WHOLE

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
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
_MESSAGE_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"enum": ["error"]},
        "error": {"type": "object", "properties": {name: {"type": "string"} for name in ("type", "message")}},
    },
}


def openapi() -> dict[str, Any]:
    """As version 3.1 of the specification has it."""
    schemas: dict[str, Any] = {"Error": _ERROR, "MessageError": _MESSAGE_ERROR, **SCHEMAS}
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
    operation["responses"] = {"200": _answer(route)} | _failures(route)
    if not ROUTES[route].open:
        operation["security"] = [{"key": []}]
    if "{name" in route:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if (body := BODIES.get(route)) is None:
        return {"get": operation}
    operation["requestBody"] = {"required": True, "content": _json(_schema(body.__name__))}
    return {"post": operation}


def _answer(route: str) -> dict[str, Any]:
    if route not in WHOLE:
        return {"description": "Prometheus' text format", "content": {"text/plain": {}}}
    content = _json(_schema(WHOLE[route]))
    if (event := STREAMED.get(route)) is None:
        return {"description": WHOLE[route], "content": content}
    # OpenAPI 3.1 knows no events: the schema is that of the data of each.
    content |= {"text/event-stream": {"schema": {"$ref": _schema(event)}}}
    end = "" if route in ("/v1/responses", MESSAGES) else " and [DONE] after the last"
    return {"description": f"{WHOLE[route]}; with stream, a {event} as the data of each event{end}", "content": content}


def _schema(name: str) -> str:
    return f"#/components/schemas/{name}"


def _failures(route: str = "") -> dict[str, Any]:
    statuses = sorted({status for status, _ in STATUSES.values()})
    kinds = {status: ", ".join(sorted({kind for s, kind in STATUSES.values() if s == status})) for status in statuses}
    error = _json(_schema("MessageError" if route.startswith(MESSAGES) else "Error"))
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
    yield "What requests take is made from the classes that read them. [API](api.md) says what the fields mean."
    yield from ("The same for tools: <a href='openapi.json'>openapi.json</a>.", "")
    yield from ("| route | method | API key |", "|---|---|---|")
    for route, access in ROUTES.items():
        key = "none" if access.open else "asked for"
        yield f"| `{_path(route)}` | {'POST' if route in BODIES else 'GET'} | {key} |"
    yield from ("", "| status | type of the error |", "|---|---|")
    yield from (f"| {status} | {failure['description']} |" for status, failure in _failures().items())
    for route, body in BODIES.items():
        schema = body.model_json_schema()
        yield from ("", f"## {route}", "", "| field | type | default |", "|---|---|---|")
        for name, field in schema["properties"].items():
            default = "needed" if name in schema.get("required", ()) else f"`{json.dumps(field.get('default'))}`"
            yield f"| `{name}` | {_kind(field)} | {default} |"

    yield from ("", "## Answers", "", "| route | answer | with `stream`, data of each event |", "|---|---|---|")
    for route, name in WHOLE.items():
        event = _link(STREAMED[route]) if route in STREAMED else ""
        yield f"| `{_path(route)}` | {_link(name)} | {event} |"
    yield from ("", "The last event of completions is `[DONE]`. One that fails after its first token ends with an")
    yield "event whose data is the body of an error; of `/v1/responses` and `/v1/messages` it is one of type `error`."
    for name, schema in SCHEMAS.items():
        yield from ("", f"### {name}", "", "| field | type | always there |", "|---|---|---|")
        yield from _fields(schema)


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _fields(schema: dict[str, Any], above: str = "") -> Iterator[str]:
    """With those of the objects inside. What has a name of its own is told there."""
    for name, field in schema.get("properties", {}).items():
        yield f"| `{above}{name}` | {_shown(field)} | {'yes' if name in schema['required'] else 'no'} |"
        yield from _fields(field, f"{above}{name}.")
    if "items" in schema:
        yield from _fields(schema["items"], f"{above.removesuffix('.')}[].")
    for one in schema.get("anyOf", ()):
        if kinds := one.get("properties", {}).get("type", {}).get("enum"):
            yield f"| **{kinds[0]}** | | |"
        yield from _fields(one, above)


def _shown(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return _link(field["$ref"].rpartition("/")[2])
    if field.get("type") == "array" and "$ref" in field["items"]:
        return f"array of {_shown(field['items'])}"
    if "anyOf" in field:
        return " or ".join(map(_shown, field["anyOf"]))
    return _kind(field)


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(one) for one in field["anyOf"] if one.get("type") != "null")
    if "$ref" in field:
        return "object"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"array of {_kind(field['items'])}" if field.get("items") else "array"
    kinds = field.get("type", "any")
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
