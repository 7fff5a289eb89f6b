"""vLLM's gRPC engine service, asked by the stubs of its own package."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from outrider.errors import Code, OutriderError
from outrider.gateway.server import RunningGateway
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.access.roles import CALLS
from outrider.rpc.channel import create_channel
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import router_pb2, sequence_pb2
from tokenizers import Tokenizer

from tests.integration.gateway.conftest import OpenGateway
from tests.integration.gateway.scripted_router import (
    CONTEXT,
    EOS,
    MODEL,
    VOCAB,
    ScriptedRouter,
    echoing,
    logprob,
    round_of,
    routing,
    saying,
    until,
)

pytest.importorskip("smg_grpc_proto")

from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

PROMPT = [10, 11, 12]
IDS = [70, 71, 72, 73, 74, 75, EOS]
Sampling = vllm.SamplingParams


def asking(params: Any = None, *, stream: bool = True, name: str = "", **more: Any) -> Any:
    return vllm.GenerateRequest(
        request_id=name,
        tokenized=vllm.TokenizedInput(original_text="abc", input_ids=PROMPT),
        sampling_params=params or Sampling(max_tokens=20),
        stream=stream,
        **more,
    )


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter(saying(IDS, size=3))


@pytest.fixture
def serve(gateway: OpenGateway, router: ScriptedRouter) -> Any:
    @asynccontextmanager
    async def served() -> AsyncIterator[tuple[RunningGateway, Any]]:
        async with (
            routing(router) as address,
            gateway(address, vllm_engine_model=MODEL) as running,
            create_channel(running.grpc_address) as channel,
        ):
            yield running, vllm_engine_pb2_grpc.VllmEngineStub(channel)

    return served


async def failure(call: Any) -> OutriderError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call if not hasattr(call, "__aiter__") else [message async for message in call]
    return from_rpc_error(caught.value)


async def test_chunks_are_what_is_new_and_the_last_message_is_the_whole_answer(serve: Any) -> None:
    async with serve() as (_, stub):
        messages = [message async for message in stub.Generate(asking())]
        [whole] = [message async for message in stub.Generate(asking(stream=False))]
    chunks = [message.chunk for message in messages[:-1]]
    assert [list(chunk.token_ids) for chunk in chunks] == [IDS[:3], IDS[3:6], IDS[6:]]
    assert [chunk.completion_tokens for chunk in chunks] == [3, 3, 1]
    for complete in (messages[-1].complete, whole.complete):
        assert list(complete.output_ids) == IDS
        assert complete.finish_reason == "stop"
        assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (3, 7, 3)
        assert (complete.spec_draft_tokens, complete.spec_accepted_tokens) == (4, 4)
        # At its end-of-text token: no stop of the request's own.
        assert complete.WhichOneof("matched_stop") is None


async def test_every_parameter_reaches_the_router(serve: Any, router: ScriptedRouter) -> None:
    params = Sampling(
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=1.5,
        max_tokens=20,
        min_tokens=2,
        stop_token_ids=[72],
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        include_stop_str_in_output=True,
        stop=["never"],
        n=2,
        seed=-7,
        logit_bias={70: 2.0},
        truncate_prompt_tokens=2,
        grammar_from_first_token=True,
    )
    async with serve() as (_, stub):
        messages = [message async for message in stub.Generate(asking(params, stream=False, data_parallel_rank=0))]
    assert [message.complete.index for message in messages] == [0, 1]
    assert [message.complete.matched_token_id for message in messages] == [72, 72]
    assert [list(message.complete.output_ids) for message in messages] == [IDS[:3]] * 2
    first, second = router.requests
    assert list(first.prompt_token_ids) == PROMPT[-2:]
    assert first.sampling == sequence_pb2.Sampling(temperature=0.5, top_p=0.75, top_k=40, min_p=0.25, seed=2**64 - 7)
    assert second.sampling.seed == 2**64 - 6
    assert first.seeded
    assert first.stopping == sequence_pb2.Stopping(max_new_tokens=20, stop_token_ids=[EOS, 72])
    logits = first.logits
    assert (logits.presence_penalty, logits.frequency_penalty, logits.repetition_penalty) == (0.25, 0.5, 1.5)
    assert logits.min_tokens == 2
    assert (list(logits.bias_token_ids), list(logits.biases)) == ([70], [2.0])


async def test_what_is_unset_or_0_is_vllms_default(serve: Any, router: ScriptedRouter) -> None:
    async with serve() as (_, stub):
        async for _ in stub.Generate(vllm.GenerateRequest(text="abc")):
            pass
    [request] = router.requests
    assert request.sampling == sequence_pb2.Sampling(temperature=1.0, top_p=1.0)
    assert not request.seeded
    assert not request.HasField("logits")
    assert not request.HasField("logprobs")
    assert request.stopping.max_new_tokens == CONTEXT - len(request.prompt_token_ids)


async def test_the_stop_string_that_ended_an_answer_is_named(serve: Any, tokenizer: ModelTokenizer) -> None:
    text = tokenizer.decode(IDS[:-1])
    params = Sampling(stop=["zzz", text[3:5]], skip_special_tokens=True)
    async with serve() as (_, stub):
        [whole] = [message async for message in stub.Generate(asking(params, stream=False))]
    assert whole.complete.matched_stop_str == text[3:5]
    assert list(whole.complete.output_ids) == IDS[:5]


async def test_logprobs_of_answer_and_prompt_are_each_as_many_as_asked(serve: Any, router: ScriptedRouter) -> None:
    router.script = echoing
    params = Sampling(max_tokens=2, logprobs=1, prompt_logprobs=2)
    async with serve() as (_, stub):
        chunks = [message.chunk async for message in stub.Generate(asking(params)) if message.HasField("chunk")]
        [whole] = [message.complete async for message in stub.Generate(asking(params, stream=False))]
        bare = Sampling(max_tokens=2, prompt_logprobs=0)
        [prompt_only] = [message.complete async for message in stub.Generate(asking(bare, stream=False))]
    assert router.requests[0].logprobs == sequence_pb2.LogprobsOptions(num_top=2, prompt=True)
    for output in (whole.output_logprobs, chunks[0].output_logprobs):
        assert output.token_ids[0] == 12
        assert output.token_logprobs[0] == pytest.approx(logprob(12))
        assert list(output.top_logprobs[0].token_ids) == [13]
    assert list(whole.output_logprobs.token_ids) == [12, 11]
    for prompt in (whole.input_logprobs, chunks[0].input_logprobs):
        assert list(prompt.token_ids) == PROMPT
        assert [each.HasField("value") for each in prompt.token_logprobs] == [False, True, True]
        assert prompt.token_logprobs[2].value == pytest.approx(logprob(12))
        assert [list(each.token_ids) for each in prompt.top_logprobs] == [[], [12, 13], [13, 14]]
    assert not chunks[1].HasField("input_logprobs")
    assert not prompt_only.HasField("output_logprobs")
    assert len(prompt_only.input_logprobs.token_logprobs) == 3
    assert not prompt_only.input_logprobs.top_logprobs


CONSTRAINTS = {
    "json_schema": {"json_schema": '{"type": "integer"}'},
    "json_object": {"json_object": True},
    "regex": {"regex": "[0-9]+"},
    "grammar": {"grammar": 'start: "a" | "b"'},
    "choice": {"choice": vllm.ChoiceConstraint(choices=["yes", "no"])},
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
async def test_a_constraint_becomes_a_grammar(serve: Any, router: ScriptedRouter, kind: str) -> None:
    pytest.importorskip("llguidance")
    async with serve() as (_, stub):
        async for _ in stub.Generate(asking(Sampling(**CONSTRAINTS[kind]))):
            pass
    assert router.requests[0].logits.grammar


REFUSED: dict[str, Any] = {
    "kv_transfer_params": {"kv_transfer_params": vllm.KvTransferParams(remote_host="a")},
    "kv_transfer_params_json": {"kv_transfer_params_json": "{}"},
    "mm_inputs": {"mm_inputs": vllm.MultimodalInputs()},
    "extra_mm_inputs": {"extra_mm_inputs": [vllm.MultimodalInputs()]},
    "media_refs": {"media_refs": vllm.MediaRefs()},
    "data_parallel_rank": {"data_parallel_rank": 1},
    "sampling_params.structural_tag": {"params": Sampling(structural_tag="{}")},
    "sampling_params.json_object": {"params": Sampling(json_object=False)},
    "sampling_params.json_schema": {"params": Sampling(json_schema="{")},
    "sampling_params.logprobs": {"params": Sampling(logprobs=-1)},
    "sampling_params.prompt_logprobs": {"params": Sampling(prompt_logprobs=-1)},
    "sampling_params.skip_special_tokens": {"params": Sampling(stop=["a"])},
    "sampling_params.truncate_prompt_tokens": {"params": Sampling(truncate_prompt_tokens=-1)},
    "sampling_params.n": {"params": Sampling(n=129)},
    "sampling_params.temperature": {"params": Sampling(temperature=-1)},
    "sampling_params.max_tokens": {"params": Sampling(max_tokens=CONTEXT)},
    "sampling_params.logit_bias": {"params": Sampling(logit_bias={-1: 1.0})},
    "sampling_params.stop_token_ids[0]": {"params": Sampling(stop_token_ids=[VOCAB])},
}


@pytest.mark.parametrize("path", REFUSED)
async def test_what_cannot_be_done_is_refused_by_its_path(serve: Any, router: ScriptedRouter, path: str) -> None:
    async with serve() as (_, stub):
        error = await failure(stub.Generate(asking(**REFUSED[path])))
    assert error.field == path
    assert error.code in (Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED)
    assert not router.requests


async def test_a_request_without_a_prompt_and_one_with_an_unknown_field_are_refused(serve: Any) -> None:
    newer = asking()
    newer.sampling_params.MergeFromString(b"\xf8\x7f\x01")
    async with serve() as (_, stub):
        empty = await failure(stub.Generate(vllm.GenerateRequest()))
        unknown = await failure(stub.Generate(newer))
    assert empty.field == "input"
    assert (unknown.field, unknown.reason) == ("sampling_params", "UNKNOWN_FIELD")


def test_every_field_of_the_protocol_is_served_or_refused() -> None:
    """A newer package may have more of them: then this says which."""
    served = {
        "GenerateRequest": {"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"},
        "SamplingParams": {
            *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
            *("max_tokens", "min_tokens", "stop", "stop_token_ids", "skip_special_tokens", "ignore_eos", "n", "seed"),
            *("spaces_between_special_tokens", "include_stop_str_in_output", "logprobs", "prompt_logprobs"),
            *("logit_bias", "truncate_prompt_tokens", "grammar_from_first_token"),
            *("json_schema", "regex", "grammar", "json_object", "choice"),
        },
    }
    refused = {path.removeprefix("sampling_params.").removesuffix("[0]") for path in REFUSED}
    for message in (vllm.GenerateRequest, vllm.SamplingParams):
        fields = {each.name for each in message.DESCRIPTOR.fields}
        assert fields == served[message.DESCRIPTOR.name] | (fields & refused)


def test_who_may_make_each_call_is_declared_and_of_no_call_besides() -> None:
    [service] = vllm.DESCRIPTOR.services_by_name.values()
    calls = {f"/{service.full_name}/{method.name}" for method in service.methods}
    assert calls == {call for call in CALLS if call.startswith("/vllm.")}


async def endless(request: router_pb2.RouteRequest) -> AsyncIterator[router_pb2.RouteResponse]:
    yield round_of([70])
    await asyncio.Event().wait()


async def test_an_aborted_request_ends_as_such_and_no_other_does(serve: Any, router: ScriptedRouter) -> None:
    router.script = endless
    async with serve() as (running, stub):
        calls = [stub.Generate(asking(name=name)) for name in ("one", "two")]
        for call in calls:
            assert list((await call.read()).chunk.token_ids) == [70]
        doubled = await failure(stub.Generate(asking(name="one")))
        await stub.Abort(vllm.AbortRequest(request_ids=["one", "unknown"]))
        last = await calls[0].read()
        assert await calls[0].read() is grpc.aio.EOF
        assert (last.complete.finish_reason, list(last.complete.output_ids)) == ("abort", [70])
        await until(lambda: router.num_running == 1)
        assert running.core.admission.running == 1
        calls[1].cancel()
        await until(lambda: not running.core.admission.running)
    assert doubled.reason == "REQUEST_ID_IN_USE"


async def test_it_tells_of_the_model_the_server_and_its_load(serve: Any, router: ScriptedRouter) -> None:
    async with serve() as (running, stub):
        await until(lambda: bool(running.core.catalog.ready))
        health = await stub.HealthCheck(vllm.HealthCheckRequest())
        model = await stub.GetModelInfo(vllm.GetModelInfoRequest())
        router.script = endless
        call = stub.Generate(asking())
        await call.read()
        server = await stub.GetServerInfo(vllm.GetServerInfoRequest())
        loads = await stub.GetLoads(vllm.GetLoadsRequest())
        call.cancel()
    assert (health.healthy, health.message) == (True, "")
    assert (model.served_model_name, model.max_context_length, model.vocab_size) == (MODEL, CONTEXT, VOCAB)
    assert model.is_generation
    assert list(model.eos_token_ids) == [EOS]
    assert (server.active_requests, server.data_parallel_size, server.is_paused) == (1, 1, False)
    assert [load.num_running_reqs for load in loads.loads] == [1]


async def test_the_tokenizer_can_be_loaded_from_what_is_sent(serve: Any, tokenizer: ModelTokenizer) -> None:
    async with serve() as (_, stub):
        chunks = [chunk async for chunk in stub.GetTokenizer(common.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [*[""] * (len(chunks) - 1), hashlib.sha256(data).hexdigest()]
    files = zipfile.ZipFile(io.BytesIO(data))
    loaded = Tokenizer.from_buffer(files.read("tokenizer.json"))
    assert loaded.encode("Grüße, 世界!").ids == tokenizer.encode("Grüße, 世界!")
    assert json.loads(files.read("generation_config.json")) == {"eos_token_id": [EOS]}


@pytest.mark.parametrize("name", ["Embed", "FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"])
async def test_a_call_that_is_not_served_is_refused_by_name(serve: Any, name: str) -> None:
    requests = {
        "Embed": vllm.EmbedRequest(),
        "FlushCache": common.FlushCacheRequest(),
        "StartProfile": common.StartProfileRequest(),
        "StopProfile": common.StopProfileRequest(),
        "SubscribeKvEvents": common.SubscribeKvEventsRequest(),
    }
    async with serve() as (_, stub):
        error = await failure(getattr(stub, name)(requests[name]))
    assert (error.code, error.field) == (Code.UNIMPLEMENTED, name)


async def test_a_gateway_that_is_no_engine_does_not_know_the_service(
    gateway: OpenGateway, router: ScriptedRouter
) -> None:
    async with (
        routing(router) as address,
        gateway(address) as running,
        create_channel(running.grpc_address) as channel,
    ):
        error = await failure(vllm_engine_pb2_grpc.VllmEngineStub(channel).HealthCheck(vllm.HealthCheckRequest()))
    assert error.code == Code.UNIMPLEMENTED
