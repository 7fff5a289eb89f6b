"""The middleware among vLLM's own: vLLM checks an API key before a body is read, and a refusal names its field."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

PATH = "/v1/completions"


def served() -> FastAPI:
    app = FastAPI()

    @app.post(PATH)
    async def completions(request: Request) -> Any:
        return await request.json()

    every = ["*"]
    args: Any = SimpleNamespace(
        allowed_origins=every,
        allow_credentials=False,
        allowed_methods=every,
        allowed_headers=every,
        api_key=["sk-server"],
        enable_request_id_headers=True,
        middleware=["outrider.vllm.middleware.Tenants"],
        additional_config={"outrider": {"tenant_header": "x-tenant"}},
    )
    app.state.args = args
    init_entrypoints_middleware(args, app, ("generate",))
    return app


@pytest.mark.parametrize(("key", "status", "num_read"), [("sk-server", 200, 1), ("sk-wrong", 401, 0)])
async def test_vllm_checks_the_key_before_a_body_is_read(key: str, status: int, num_read: int) -> None:
    read = []

    async def body() -> Any:
        read.append(None)
        yield b'{"prompt": "x"}'

    headers = {"authorization": f"Bearer {key}", "x-tenant": "gold", "content-type": "application/json"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served()), base_url="http://vllm") as client:
        reply = await client.post(PATH, headers=headers, content=body())
        refused = await client.post(PATH, headers=headers, json={"receipt": True})
    assert (reply.status_code, len(read)) == (status, num_read)
    if status == 200:
        assert reply.json() == {"prompt": "x", "vllm_xargs": {"outrider_tenant": "gold"}}
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "receipt")
