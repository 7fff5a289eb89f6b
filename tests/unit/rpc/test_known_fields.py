"""A field that this release does not know: refused from outside, ignored between our own."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from outrider.errors import InvalidRequest
from outrider.rpc.channel import create_channel
from outrider.rpc.interceptor import check_known
from outrider.rpc.server import create_server, serving
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import control_pb2, generation_pb2, generation_pb2_grpc, tenants_pb2

SERVICE = "outrider.rpc.v1.GenerationService"
UNKNOWN = b"\xc2\x3e\x01x"
"""Field 1000, a string."""


def test_it_is_named_by_its_place_and_number_however_deep_it_lies() -> None:
    message = generation_pb2.GenerateRequest(model="m", options=generation_pb2.GenerationOptions(logit_bias={7: 1.0}))
    message.chat.messages.add(role="user", content="hi")
    check_known(message)
    message.chat.messages.add().MergeFromString(UNKNOWN)
    with pytest.raises(InvalidRequest, match="field number 1000 is not known here") as caught:
        check_known(message)
    assert caught.value.field == "chat.messages[1]"
    tenants = control_pb2.PutTenantsRequest(tenants=[tenants_pb2.Tenant(name="t")])
    tenants.tenants[0].quota.MergeFromString(UNKNOWN)
    with pytest.raises(InvalidRequest) as caught:
        check_known(tenants)
    assert caught.value.field == "tenants[0].quota"


class Servicer(generation_pb2_grpc.GenerationServiceServicer):
    async def Generate(self, request: Any, context: Any) -> Any:
        return generation_pb2.GenerateResponse(text=request.model)


async def ask(strict: bool) -> Any:
    """With a field that nobody knows."""
    server = create_server(strict=[SERVICE] if strict else [])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Servicer(), server)
    async with serving(server, "127.0.0.1:0", services=[]) as life, create_channel(life.address) as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/Generate", response_deserializer=generation_pb2.GenerateResponse.FromString
        )
        return await call(generation_pb2.GenerateRequest(model="m").SerializeToString() + UNKNOWN)


async def test_a_server_for_clients_refuses_the_request_and_one_for_our_own_ignores_the_field() -> None:
    assert (await ask(strict=False)).text == "m"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(strict=True)
    error = from_rpc_error(caught.value)
    assert (error.code.name, error.reason, error.field) == ("INVALID_ARGUMENT", "UNKNOWN_FIELD", "request")
