"""A gateway answers whatever it is sent, and knows whose fault it is: hundreds here, 10,000 of each in tests/soak."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from outrider.gateway.config import GatewayLimits

from tests.integration.gateway.conftest import OpenGateway
from tests.integration.gateway.malformed import answer_anything, bad_ends, grpc_messages, http_bodies, http_requests
from tests.integration.gateway.scripted_router import ScriptedRouter, routing, until

LIMITS = GatewayLimits(max_body_bytes=1 << 20)
# For heads and bodies that never come to their end.
SOON = replace(LIMITS, header_timeout_s=0.2, idle_timeout_s=0.2, body_timeout_s=0.2)


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter(answer_anything)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """To be asked before anything is closed: the router here shares the log, and tells of its stream's end."""
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_no_malformed_body_or_message_is_the_gateways_fault(
    gateway: OpenGateway, router: ScriptedRouter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.gateway.tenants.admission._REFUSALS", 1e6)
    async with routing(router) as address, gateway(address, limits=LIMITS) as running:
        ends = await http_bodies(running.http_address, 400, seed=1)
        ends += await grpc_messages(running.grpc_address, 300, seed=3)
        assert running.core.admission.running == 0
        errors = errors_in(caplog)
    assert not bad_ends(ends)
    assert not errors
    # They were malformed, but not all beyond recognition.
    for status, code in (("200", "OK"), ("400", "INVALID_ARGUMENT")):
        assert ends[f"/v1/completions {status}"] > 5
        assert ends[f"/v1/chat/completions {status}"] > 5
        assert ends[f"/outrider.rpc.v1.GenerationService/Generate {code}"] > 5


async def test_no_malformed_http_is_the_gateways_fault(
    gateway: OpenGateway, router: ScriptedRouter, caplog: pytest.LogCaptureFixture
) -> None:
    async with routing(router) as address, gateway(address, limits=SOON) as running:
        ends = await http_requests(running.http_address, 300, seed=2)
        await until(lambda: running.core.admission.running == 0)
        errors = errors_in(caplog)
    assert not bad_ends(ends)
    assert not errors
    assert ends["raw 200"] > 5 < ends["raw 400"]
