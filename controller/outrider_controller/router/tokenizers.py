"""A model's tokenizer, passed on from a target to a gateway. Keeps nothing: gateways keep them by their hash."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from outrider.errors import NotFound, Unavailable
from outrider.rpc.v1 import target_pb2, target_pb2_grpc

from outrider_controller.router.fleet import Fleet

_TIMEOUT_S = 60.0


async def tokenizer_chunks(fleet: Fleet, model: str, sha256: str) -> AsyncIterator[bytes]:
    """From the first live target that has it. Raises NotFound where none has, Unavailable where that one breaks off."""
    for target in fleet.targets.values():
        if target.up and target.info.model == model and target.info.tokenizer_sha256 == sha256:
            break
    else:
        raise NotFound(f"no live target of {model[:200]!r} has this tokenizer", field="tokenizer_sha256")
    # A connection of its own: the target's other one carries what people wait for.
    async with fleet.connect(target.address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        request = target_pb2.TargetServiceGetTokenizerRequest()
        try:
            async for part in stub.GetTokenizer(request, timeout=_TIMEOUT_S, metadata=fleet.credential):
                yield part.chunk
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the target broke off: {error.details() or error.code().name}") from error
