"""Where traces come from: the routers, through the control plane; and the gateway for what tokens stand for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import grpc
from outrider.rpc.access.roles import bearer
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import control_pb2, generation_pb2_grpc
from outrider.rpc.v1 import generation_pb2 as generation
from outrider.rpc.v1 import trace_pb2 as trace

from outrider_controller.cli.client import MAX_DETOKENIZED
from outrider_controller.cli.clusters.contexts import api_key
from outrider_controller.cli.clusters.control import call_control, gateway_channel
from outrider_controller.cli.output import note
from outrider_controller.cli.show.trace.tokens import TokenBytes

_TIMEOUT_S = 5.0
_PREFIXES = ("chatcmpl-", "cmpl-")


def request_id_of(given: str) -> str:
    """The id as routers know it, from the id of an OpenAI answer, of a gRPC answer, or an x-request-id."""
    for prefix in _PREFIXES:
        given = given.removeprefix(prefix)
    return given


async def fetch(control: str, request_id: str) -> list[trace.RequestTrace]:
    """Every router's part of the request, in the order of the answer. Raises CommandError when there is none."""
    asked = control_pb2.ControlServiceGetTraceRequest(request_id=request_id)
    return list((await call_control(control, lambda stub: stub.GetTrace(asked))).traces)


@dataclass(slots=True)
class Dictionary:
    """What tokens stand for, asked of a gateway as they come. Without one tokens keep their ids."""

    gateway: str
    table: dict[int, bytes] = field(default_factory=dict)
    _gave_up: bool = False

    async def look_up(self, model: str, token_ids: Collection[int]) -> TokenBytes:
        unknown = sorted(set(token_ids) - self.table.keys())
        if unknown and not self._gave_up:
            try:
                async with gateway_channel(self.gateway) as channel:
                    for start in range(0, len(unknown), MAX_DETOKENIZED):
                        await self._ask(channel, model, unknown[start : start + MAX_DETOKENIZED])
            except grpc.RpcError as error:
                self._gave_up = True
                note(f"gateway at {self.gateway}: {from_rpc_error(error)}; tokens are shown by their ids")
        return self.table

    async def _ask(self, channel: grpc.aio.Channel, model: str, token_ids: Sequence[int]) -> None:
        request = generation.DetokenizeRequest(model=model, token_ids=token_ids)
        answer = await generation_pb2_grpc.GenerationServiceStub(channel).Detokenize(
            request, timeout=_TIMEOUT_S, metadata=bearer(api_key(self.gateway))
        )
        self.table.update(zip(token_ids, answer.tokens, strict=True))
