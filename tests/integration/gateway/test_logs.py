"""What is logged of a request: one JSON object a line, its id, and neither its text nor its tokens."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from outrider.errors import OutriderError
from outrider.gateway.http.openai.shapes import CompletionShape
from outrider.rpc.v1 import router_pb2
from outrider.telemetry.logging import configure_logging

from tests.integration.gateway.conftest import OpenGateway
from tests.integration.gateway.scripted_router import ScriptedRouter, round_of, routing, saying

MARKER = "zebra-7319-quagga"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """All that is logged, at the lowest level."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    configure_logging("gateway", "json", level=logging.DEBUG, stream=stream)
    yield stream
    root.handlers[:] = handlers
    # Not `root.level`: loggers remember which levels they may log until the level is set.
    root.setLevel(level)


async def test_no_line_holds_a_prompt(gateway: OpenGateway, lines: io.StringIO) -> None:
    async def answer(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
        raise OutriderError(f"a fault that quotes {MARKER}")
        yield round_of([])

    async with routing(ScriptedRouter(answer)) as router, gateway(router) as started:
        url = f"http://{started.http_address}/v1/completions"
        async with httpx.AsyncClient(timeout=30) as http:
            for body in ({"prompt": MARKER, "max_tokens": 2}, {"prompt": MARKER, "stop": 7}, {"prompt": [MARKER]}):
                await http.post(url, json={"model": "tiny", **body})
            await http.post(url, content=f'{{"prompt": "{MARKER}'.encode())
    logged = lines.getvalue()
    assert "serving gRPC" in logged
    for line in logged.splitlines():
        assert {"ts", "level", "component", "message"} <= json.loads(line).keys()
    assert MARKER not in logged
    assert MARKER.encode().hex() not in logged


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_our_own_is_logged_with_the_request_and_its_tenant(
    gateway: OpenGateway, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(CompletionShape, "choice", broken)
    async with routing(ScriptedRouter(saying([40, 2]))) as router, gateway(router) as started:
        body = {"model": "tiny", "prompt": "a", "stream": stream}
        async with httpx.AsyncClient(timeout=30) as http:
            answer = await http.post(f"http://{started.http_address}/v1/completions", json=body)
    assert answer.status_code == 500
    [line] = [line for line in map(json.loads, lines.getvalue().splitlines()) if "request failed" in line["message"]]
    assert line["tenant"] == "default" and line["request_id"]
