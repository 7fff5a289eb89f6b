"""A tokenizer on its way from a target through a router."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import grpc
import pytest
from outrider.protocol.tokenizers import sha256_of
from outrider.rpc.v1 import router_pb2
from outrider.target.grammars.tokenizer import read_tokenizer

from tests.fakes import FakeTarget


def asked(model: str, sha256: str) -> router_pb2.GetTokenizerRequest:
    return router_pb2.GetTokenizerRequest(model=model, tokenizer_sha256=sha256)


async def received(stub: Any, request: router_pb2.GetTokenizerRequest) -> bytes:
    return b"".join([part.chunk async for part in stub.GetTokenizer(request)])


async def test_a_router_passes_on_what_a_target_sends_in_chunks(fleet: Any) -> None:
    data = random.Random(0).randbytes(3 << 20)
    target = await fleet.target(FakeTarget(tokenizer_sha256=sha256_of(data)))
    target.tokenizer = data
    await fleet.start()
    (model,) = (await fleet.stub.ListModels(router_pb2.ListModelsRequest())).models
    assert model.tokenizer_sha256 == sha256_of(data)
    assert await received(fleet.stub, asked(model.model, sha256_of(data))) == data
    for wrong in (asked("another", sha256_of(data)), asked(model.model, "0" * 64)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await received(fleet.stub, wrong)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_real_target_sends_what_its_lease_names(real_fleet: Any, tiny: Path) -> None:
    (model,) = (await real_fleet.stub.ListModels(router_pb2.ListModelsRequest())).models
    assert model.tokenizer_sha256 == sha256_of(read_tokenizer(tiny))
    assert await received(real_fleet.stub, asked(model.model, model.tokenizer_sha256)) == read_tokenizer(tiny)
