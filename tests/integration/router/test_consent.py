"""A tenant's consent to samples comes from its record to the target, and nothing else does."""

from __future__ import annotations

from outrider.gateway.generation.requests import Generation, TokenPrompt
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import tenants_pb2

from tests.fakes import FakeTarget
from tests.integration.gateway.conftest import OpenGateway, gateway
from tests.integration.gateway.scripted_router import MODEL, ScriptedRouter, echoing, routing
from tests.integration.router.conftest import Fleet

__all__ = ["gateway"]


CONSENTS = sequence.SampleConsent.values()


async def test_the_target_hears_of_the_consent(fleet: Fleet) -> None:
    target = await fleet.target(FakeTarget())
    await fleet.start()
    for consent in CONSENTS:
        await fleet.ask(fleet.request(samples=consent, max_new_tokens=1))
    assert [each.samples for each in target.opens] == CONSENTS


async def test_a_gateway_sends_what_the_tenants_record_says(gateway: OpenGateway) -> None:
    router = ScriptedRouter(echoing)
    async with routing(router) as address, gateway(address) as running:
        asked = [[Generation(MODEL, TokenPrompt([40, 41]))]]
        for consent in CONSENTS:
            tenant = tenants_pb2.Tenant(name="t", samples=consent)
            async with running.core.start(asked, default_max_tokens=4, tenant=tenant) as [answer]:
                assert [chunk async for chunk in answer.chunks]
    assert [each.samples for each in router.requests] == CONSENTS
