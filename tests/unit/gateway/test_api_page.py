"""docs/api.md names every field that is served, and every one that is refused, over HTTP and over gRPC."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import jsonschema
import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses
from outrider.gateway.http.anthropic.request import CountTokensRequest, MessagesRequest
from outrider.gateway.http.openai.foreign import HARMLESS, HARMLESS_NAMES
from outrider.gateway.http.openai.responses_request import ResponsesRequest
from outrider.gateway.http.openai.schemas import Body, ChatRequest, CompletionRequest, GenerationBody
from outrider.rpc.access.roles import ROUTES
from outrider.rpc.v1 import generation_pb2

from docs import http_reference

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
BODIES: dict[str, type[GenerationBody]] = {
    "completions": CompletionRequest,
    "chat": ChatRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}
CLIENTS = {
    "completions": completions.CompletionCreateParamsBase,
    "chat": chats.CompletionCreateParamsBase,
    "responses": responses.ResponseCreateParamsBase,
}


def refused_row(endpoint: str) -> set[str]:
    section = PAGE.partition("## Refused by name")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith(("| all |", f"| {endpoint} |"))]
    return set(re.findall(r"`([a-z_]+)`", "\n".join(rows)))


@pytest.mark.parametrize("endpoint", BODIES)
def test_every_field_is_on_the_page(endpoint: str) -> None:
    body = BODIES[endpoint]
    served = set(body.model_fields) - set(body.unserved)
    assert not {name for name in served if f"`{name}`" not in PAGE and f"`{name}." not in PAGE} - {"model", "stream"}
    assert set(body.unserved) <= refused_row(endpoint)


def test_what_is_taken_for_the_sake_of_other_servers_is_on_the_page() -> None:
    section = PAGE.partition("## Taken, and without effect")[2].partition("\n## ")[0]
    for server, names in HARMLESS.items():
        [row] = [line for line in section.splitlines() if line.startswith(f"| {server} |")]
        assert set(re.findall(r"`([a-z_]+)`", row)) == set(names)
    assert not HARMLESS_NAMES & {name for body in BODIES.values() for name in (*body.model_fields, *body.unserved)}


@pytest.mark.parametrize("endpoint", CLIENTS)
def test_every_parameter_of_the_stock_client_is_served_or_refused_by_name(endpoint: str) -> None:
    body = BODIES[endpoint]
    assert set(CLIENTS[endpoint].__annotations__) <= set(body.model_fields) | set(body.unserved)


@pytest.mark.parametrize("kind", ["message_create_params", "message_count_tokens_params"])
def test_every_parameter_of_anthropics_client_is_taken_or_refused_by_name(kind: str) -> None:
    params = import_module(f"{pytest.importorskip('anthropic').__name__}.types.{kind}")
    base = getattr(params, "MessageCreateParamsBase", None) or params.MessageCountTokensParams
    body = MessagesRequest if kind == "message_create_params" else CountTokensRequest
    fields = {name for name in base.__annotations__ if name not in ("user_profile_id", "workspace_id")}  # Headers.
    assert fields <= {*body.model_fields, *body.unserved, *body.said}
    assert {name for name in body.said if f"`{name}`" not in PAGE} == set()


def test_openapi_has_every_route_and_takes_what_the_gateway_takes() -> None:
    document = http_reference.openapi()
    assert document["paths"].keys() == {route.replace(":path", "") for route in ROUTES}
    posted = {path for path, item in document["paths"].items() if "post" in item}
    app_routes = {route for route, body in http_reference.BODIES.items() if issubclass(body, Body)}
    assert posted == app_routes
    schema = {**document["components"]["schemas"]["ChatRequest"], "components": document["components"]}
    judge = jsonschema.Draft202012Validator(schema)
    assert judge.is_valid({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True})
    assert not judge.is_valid({"messages": []})
    assert not judge.is_valid({"model": "m", "messages": [], "temperatur": 1})


def test_every_option_over_grpc_is_on_the_page() -> None:
    names = {field.name for field in generation_pb2.GenerationOptions.DESCRIPTOR.fields}
    assert not {name for name in names if f"`{name}`" not in PAGE}
