"""The middleware before vLLM's endpoints for audio, which take forms. Needs their parser, and no engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from outrider.vllm.middleware import Tenants
from starlette.responses import JSONResponse

pytestmark = pytest.mark.slow

FORM = 'Multipart/Form-Data; boundary="b"'


async def sent(content: str, content_type: str = FORM) -> tuple[httpx.Response, list[bytes]]:
    """The answer, and the bodies that have reached vLLM."""
    seen: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        # Where a body is refused it breaks off; what is answered then goes nowhere.
        if (message := await receive())["type"] == "http.request":
            seen.append(message["body"])
        await JSONResponse({})(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(Tenants(app)), base_url="http://vllm") as client:
        headers = {"content-type": content_type}
        return await client.post("/v1/audio/transcriptions", content=content.encode(), headers=headers), seen


def form(name: str) -> str:
    part = f'Content-Disposition: form-data; {name}\r\n\r\n{{"outrider_tenant": "gold"}}'
    return f"--b\r\n{part}\r\n--b--\r\n"


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (form('name="vllm_xargs"'), FORM),
        (form("name=vllm_xargs"), FORM),
        ("model=m&vllm%5Fxargs=%7B%7D", "application/x-www-form-urlencoded"),
    ],
)
async def test_a_client_names_no_tenant_in_a_form(content: str, content_type: str) -> None:
    answer, seen = await sent(content, content_type)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "vllm_xargs"
    assert not seen


@pytest.mark.parametrize("content", [form('name="model"'), form("name*=utf-8''vllm%5Fxargs"), "--b\r\nno form"])
async def test_another_form_reaches_vllm_as_it_is(content: str) -> None:
    answer, seen = await sent(content)
    assert answer.status_code == 200 and seen == [content.encode()]
