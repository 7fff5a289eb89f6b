"""The middleware under Starlette, as vLLM adds it: the tenant is the operator's word, never the client's."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from outrider.vllm.middleware import Tenants
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

KEYS = {"tenants": {"gold": {"keys": [hashlib.sha256(b"sk-gold").hexdigest()]}}}
HEADER = {"tenant_header": "X-Tenant"}
PATH = "/v1/chat/completions"


async def echo(request: Request) -> JSONResponse:
    body = await request.body()
    assert int(request.headers.get("content-length", len(body))) == len(body)
    return JSONResponse({"got": await request.json()})


async def raw(request: Request) -> Response:
    return Response(await request.body())


def served(config: dict[str, Any], endpoint: Any = echo) -> Starlette:
    app = Starlette(routes=[Route("/{path:path}", endpoint, methods=["POST", "GET"])])
    app.state.args = SimpleNamespace(additional_config={"outrider": config})
    app.add_middleware(Tenants)
    return app


async def post(config: dict[str, Any], path: str = PATH, **request: Any) -> httpx.Response:
    transport = httpx.ASGITransport(served(config))
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
        return await client.post(path, **request)


async def got(config: dict[str, Any], path: str = PATH, **request: Any) -> Any:
    response = await post(config, path, **request)
    assert response.status_code == 200, response.text
    return response.json()["got"]


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer sk-gold"}, {"x-api-key": "sk-gold"}])
async def test_a_key_names_its_tenant(headers: dict[str, str]) -> None:
    found = await got(KEYS, headers=headers, json={"messages": [], "vllm_xargs": {"own": 1}})
    assert found == {"messages": [], "vllm_xargs": {"own": 1, "outrider_tenant": "gold"}}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
        "/invocations",
        "/x/v1/completions",
    ],
)
async def test_every_endpoint_that_generates_is_told(path: str) -> None:
    found = await got(KEYS, path, headers={"x-api-key": "sk-gold"}, json={})
    assert found["vllm_xargs"] == {"outrider_tenant": "gold"}


async def test_token_in_token_out_is_told_in_its_own_field() -> None:
    sampling = {"extra_args": {"outrider": {"committed": 9}, "outrider_tenant": "gold"}}
    found = await got(HEADER, "/inference/v1/generate", headers={"x-tenant": "a"}, json={"sampling_params": sampling})
    assert found["sampling_params"] == {"extra_args": {"outrider_tenant": "a"}}


async def test_a_trusted_header_names_the_tenant_and_a_key_does_not() -> None:
    both = {"x-tenant": "blue", "authorization": "Bearer sk-gold"}
    assert (await got(KEYS | HEADER, headers=both, json={}))["vllm_xargs"] == {"outrider_tenant": "blue"}


@pytest.mark.parametrize("config", [KEYS, HEADER, {}])
@pytest.mark.parametrize("path", [PATH, "/v1/some/later/endpoint"])
async def test_what_a_client_writes_is_dropped(config: dict[str, Any], path: str) -> None:
    written = {"outrider_tenant": "gold", "outrider": "x", "own": 1, "max_draft_tokens": 2}
    found = await got(config, path, headers={"authorization": "Bearer sk-wrong"}, json={"vllm_xargs": written})
    assert found["vllm_xargs"] == {"own": 1, "max_draft_tokens": 2}


async def test_a_header_that_is_not_trusted_says_nothing() -> None:
    assert await got(KEYS, headers={"x-tenant": "gold"}, json={"a": 1}) == {"a": 1}


@pytest.mark.parametrize("wanted", [True, 1, "yes"])
async def test_a_receipt_is_refused_by_name(wanted: object) -> None:
    response = await post(KEYS, json={"messages": [], "receipt": wanted})
    assert response.status_code == 400 and response.json()["error"]["param"] == "receipt"
    assert await got(KEYS, json={"receipt": False}) == {"receipt": False}


async def test_of_a_name_that_is_given_twice_no_copy_gets_through() -> None:
    body = b'{"vllm_xargs": {"outrider_tenant": "gold"}, "vllm_xargs": {"outrider_tenant": "gold"}}'
    assert await got(KEYS, content=body) == {"vllm_xargs": {}}


@pytest.mark.parametrize("cap", ["4", -1, True, 1.5, None])
async def test_a_cap_that_is_no_count_is_refused_by_name(cap: object) -> None:
    response = await post(KEYS, json={"vllm_xargs": {"max_draft_tokens": cap}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "vllm_xargs.max_draft_tokens"
    assert response.json()["error"]["message"].startswith("vllm_xargs.max_draft_tokens: ")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_object_reaches_vllm_as_it_is(body: bytes) -> None:
    seen: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])
        await JSONResponse({})(scope, receive, send)

    made = Tenants(app)
    state = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(additional_config={})))

    async def with_app(scope: Any, receive: Any, send: Any) -> None:
        await made({**scope, "app": state}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(with_app), base_url="http://vllm") as client:
        assert (await client.post(PATH, content=body)).status_code == 200
    assert seen == [body]


GOLD = {"outrider_tenant": "gold"}


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b" { } \n",
        b'{"a": {}}',
        b'{"a": "}"}',
        b'{"a": "{", "price": 1.50}',
        b'\xef\xbb\xbf{"a": 1}',
        '{"prompt": "caf\u00e9 \u4e2d"}'.encode(),
        b'{"prompt": "caf\\u00e9 \\u4e2d"}',
        *(json.dumps({"prompt": "x", "n": 1}).encode(code) for code in ("utf-16", "utf-16-le", "utf-32")),
        *(json.dumps({"vllm_xargs": {name: 1}}).encode() for name in ("own", "outrider_tenant")),
        rb'{"vllm_\u0078args": {"outrider_tenant": "blue"}}',
        rb'{"vllm_xargs": {"outrider_\u0074enant": "blue"}}',
    ],
)
async def test_a_body_has_its_tenant_and_is_otherwise_the_same(body: bytes) -> None:
    sent = json.loads(body)
    own = {name: value for name, value in sent.get("vllm_xargs", {}).items() if name != "outrider_tenant"}
    assert await got(KEYS, headers={"x-api-key": "sk-gold"}, content=body) == sent | {"vllm_xargs": own | GOLD}
    without = await got(KEYS, content=body)
    assert without == (sent | {"vllm_xargs": own} if "vllm_xargs" in sent else sent)


@pytest.mark.parametrize("body", [b"", b"[1]", b"}", b'{"a"}', b'{"a":"}', b'{"a": 1} x', b'{"a": 1,}', b'"}"'])
async def test_what_is_no_object_does_not_become_one(body: bytes) -> None:
    transport = httpx.ASGITransport(served(KEYS, raw))
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
        found = (await client.post(PATH, headers={"x-api-key": "sk-gold"}, content=body)).content
    try:
        assert json.loads(found) == json.loads(body)
    except ValueError:
        with pytest.raises(ValueError):
            json.loads(body)


async def test_a_body_that_says_nothing_of_ours_is_not_parsed() -> None:
    body = b'{"price":  1.500, "price": 2}'
    transport = httpx.ASGITransport(served(KEYS, raw))
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
        assert (await client.post(PATH, content=body)).content == body
        told = (await client.post(PATH, headers={"x-api-key": "sk-gold"}, content=body)).content
    assert told == body[:-1] + b',"vllm_xargs": {"outrider_tenant": "gold"}}'


async def test_the_body_of_a_request_that_is_refused_by_its_key_is_not_read() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)

    async def receive() -> Any:
        pytest.fail("the body is read")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await Tenants(app)({"type": "http", "method": "POST", "path": PATH, "headers": []}, receive, send)
    assert sent[0]["status"] == 401


async def test_a_refusal_is_the_only_answer() -> None:
    """Whatever the application makes of a body that breaks off."""

    async def fails(request: Request) -> Response:
        try:
            return await raw(request)
        except Exception:
            return JSONResponse({}, status_code=500)

    for endpoint in (raw, fails):
        transport = httpx.ASGITransport(served(KEYS, endpoint), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            assert (await client.post(PATH, json={"receipt": True})).status_code == 400
