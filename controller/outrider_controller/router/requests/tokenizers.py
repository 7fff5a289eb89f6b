"""Passes a model's tokenizer from a target to a gateway. Keeps none: gateways cache them by their hash."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from outrider.errors import NotFound, Unavailable
from outrider.rpc.v1 import target_pb2, target_pb2_grpc

from outrider_controller.router.fleet.fleet import Fleet

_TIMEOUT_S = 60.0


async def tokenizer_chunks(fleet: Fleet, model: str, sha256: str) -> AsyncIterator[bytes]:
    """From the first live target that has it. Raises NotFound when none has, Unavailable if that target breaks off."""
    for target in fleet.targets.values():
        if target.up and target.info.model == model and target.info.tokenizer_sha256 == sha256:
            break
    else:
        raise NotFound(f"no live target of {model[:200]!r} has this tokenizer", field="tokenizer_sha256")
    setup = fleet.link_setup
    # A separate connection, so that it does not delay the commits on the target's stream.
    async with setup.connect(target.address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        request = target_pb2.TargetServiceGetTokenizerRequest()
        try:
            async for part in stub.GetTokenizer(request, timeout=_TIMEOUT_S, metadata=setup.credential):
                yield part.chunk
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the target broke off: {error.details() or error.code().name}") from error
