"""A tenant's consent to samples comes from its record to the target, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
from outrider.errors import Code, OutriderError
from outrider.gateway.generation.requests import Generation, TokenPrompt
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import tenants_pb2

from tests.fakes import FakeTarget
from tests.integration.gateway.conftest import OpenGateway, gateway
from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter, echoing, routing
from tests.integration.router.conftest import Fleet

__all__ = ["gateway"]


@pytest.mark.parametrize("consent", sequence.SampleConsent.values())
async def test_the_target_hears_of_the_consent(fleet: Fleet, consent: Any) -> None:
    target = await fleet.target(FakeTarget())
    await fleet.start()
    await fleet.ask(fleet.request(samples=consent))
    assert [each.samples for each in target.opens] == [consent]


async def test_a_consent_that_does_not_exist_is_refused(fleet: Fleet) -> None:
    await fleet.target(FakeTarget())
    await fleet.start()
    with pytest.raises(OutriderError) as refused:
        await fleet.ask(fleet.request(samples=9))
    assert refused.value.code is Code.INVALID_ARGUMENT and refused.value.field == "samples"


@pytest.mark.parametrize("consent", sequence.SampleConsent.values())
async def test_a_gateway_sends_what_the_tenants_record_says(gateway: OpenGateway, consent: Any) -> None:
    router = ScriptedRouter(echoing)
    async with routing(router) as address, gateway(address) as running:
        tenant = tenants_pb2.Tenant(name="t", samples=consent)
        asked = [[Generation(MODEL, TokenPrompt([40, 41]))]]
        async with running.core.start(asked, default_max_tokens=4, tenant=tenant) as [answer]:
            assert [chunk async for chunk in answer.chunks]
    assert [each.samples for each in router.requests] == [consent]
