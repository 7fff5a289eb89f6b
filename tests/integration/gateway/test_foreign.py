"""What browsers, languages with one kind of number, and clients of other servers send."""

from __future__ import annotations

import gzip
import itertools
import json
import tracemalloc
import zlib
from typing import Any

import httpx
import pytest
from outrider.gateway.config import GatewayLimits, HttpOptions, UnknownFields
from outrider.gateway.http.openai.foreign import HARMLESS_NAMES
from outrider.gateway.http.openai.schemas import Body, Int, Ints
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.rpc.access.roles import ROUTES

from tests.integration.gateway.conftest import prompt_of
from tests.integration.gateway.scripted_router import CONTEXT, MODEL, ScriptedRouter, saying, tiny_tokenizer_bytes

ORIGIN = "https://chat.example.com"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hm?"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "a"}
IGNORED = "x-outrider-ignored"
SHOWS = "{{ messages[0].content }} {{ enable_thinking }} {{ reasoning_effort }}"


@pytest.fixture
def router(template: str) -> ScriptedRouter:
    return ScriptedRouter(saying([40, 41, 2]), tokenizer=tiny_tokenizer_bytes(template))


async def answered(client: httpx.AsyncClient, fields: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    answer = await client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer


# Browsers


@pytest.mark.parametrize("options", [{"http": HttpOptions(cors_origins=(ORIGIN,))}])
async def test_a_page_may_ask_every_route_before_it_calls(http: httpx.AsyncClient) -> None:
    asked = {"origin": ORIGIN, "access-control-request-headers": "authorization,content-type,x-stainless-os"}
    for route, method in itertools.product(ROUTES, ("GET", "POST")):
        headers = asked | {"access-control-request-method": method}
        answer = await http.request("OPTIONS", route.replace("{name:path}", MODEL), headers=headers)
        assert answer.status_code == 200, route
        assert answer.headers["access-control-allow-origin"] == ORIGIN, route
        assert method in answer.headers["access-control-allow-methods"], route
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"], route
        stranger = await http.request("OPTIONS", route, headers=headers | {"origin": "https://other.example.com"})
        assert "access-control-allow-origin" not in stranger.headers, route


@pytest.mark.parametrize("options", [{"http": HttpOptions(cors_origins=(ORIGIN, "http://localhost:3000"))}])
async def test_a_page_reads_answers_streams_and_refusals(http: httpx.AsyncClient) -> None:
    http.headers["origin"] = ORIGIN
    answers = [
        await answered(http, TEXT),
        await answered(http, TEXT | {"stream": True}),
        await http.post("/v1/completions", json={"model": "nobody", "prompt": "a"}),
        await http.post("/v1/completions", content=b"{", headers={"content-type": "text/plain"}),
        await http.get("/v1/completions"),
        await http.get("/nowhere"),
    ]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == ORIGIN, answer.status_code
        assert answer.headers["access-control-expose-headers"] == "*"
    assert [answer.status_code for answer in answers] == [200, 200, 404, 415, 405, 404]


async def test_no_page_may_ask_by_default(http: httpx.AsyncClient) -> None:
    http.headers["origin"] = ORIGIN
    answer = await answered(http, TEXT)
    asked = await http.options("/v1/completions", headers={"access-control-request-method": "POST"})
    assert asked.status_code == 405
    for one in (answer, asked):
        assert not [name for name in one.headers if name.startswith("access-control")]


# Numbers


async def test_an_integer_may_be_written_as_a_float(http: httpx.AsyncClient, router: ScriptedRouter) -> None:
    floats = {"max_tokens": 2.0, "top_k": 5.0, "seed": 7.0, "n": 1.0, "stop_token_ids": [9.0, 8], "min_tokens": 1.0}
    masks = {"logit_bias": {"40.0": 1, "41": 2.0}, "allowed_token_ids": [40.0, 41.0, 2]}
    await answered(http, TEXT | floats | masks | {"prompt": [40.0, 41], "max_draft_tokens": 3.0})
    await answered(http, CHAT | {"max_completion_tokens": 2.0, "logprobs": False}, "/v1/chat/completions")
    await answered(http, {"model": MODEL, "input": "a", "max_output_tokens": 2.0}, "/v1/responses")
    tokens = await answered(http, {"tokens": [40.0, 41]}, "/detokenize")
    for field, value in {"max_tokens": 2.5, "stop_token_ids": [1.5], "top_k": "5", "prompt": [1.5]}.items():
        refused = await http.post("/v1/completions", json=TEXT | {field: value})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith(field)
    asked = router.requests[0]
    assert list(asked.prompt_token_ids) == [40, 41]
    assert (asked.stopping.max_new_tokens, asked.sampling.top_k, asked.sampling.seed) == (2, 5, 7)
    assert {8, 9} <= set(asked.stopping.stop_token_ids)
    assert dict(zip(asked.logits.bias_token_ids, asked.logits.biases, strict=True)) == {40: 1, 41: 2}
    assert sorted(asked.logits.allowed_token_ids) == [2, 40, 41]
    assert [each.stopping.max_new_tokens for each in router.requests[1:]] == [2, 2]
    assert tokens.json()["prompt"]


def _bodies(kind: type[Body]) -> list[type[Body]]:
    return [kind, *(below for each in kind.__subclasses__() for below in _bodies(each))]


@pytest.mark.parametrize("kind", _bodies(Body))
def test_no_field_of_a_body_takes_only_integers_without_a_point(kind: type[Body]) -> None:
    plain = {name for name, hint in kind.__annotations__.items() if str(hint).startswith(("int", "list[int]"))}
    assert not plain, f"to be {Int} or {Ints}"


async def test_a_limit_of_minus_one_is_what_the_context_holds(http: httpx.AsyncClient, router: ScriptedRouter) -> None:
    await answered(http, TEXT | {"max_tokens": -1})
    await answered(http, CHAT | {"max_completion_tokens": -1}, "/v1/chat/completions")
    await answered(http, {"model": MODEL, "input": "a", "max_output_tokens": -1}, "/v1/responses")
    assert (await http.post("/v1/completions", json=TEXT | {"max_tokens": -2})).status_code == 400
    for asked in router.requests:
        assert asked.stopping.max_new_tokens == CONTEXT - len(asked.prompt_token_ids)


# Fields


async def test_what_other_servers_have_and_changes_nothing_is_taken(http: httpx.AsyncClient) -> None:
    ollama = {"num_ctx": 4096, "num_gpu": 1}
    for fields in (
        dict.fromkeys(HARMLESS_NAMES, "x"),
        {"repeat_penalty": 1.0, "mirostat": 0, "enable_search": False, "top_a": 0, "options": ollama},
    ):
        answer = await answered(http, CHAT | fields, "/v1/chat/completions")
        assert IGNORED not in answer.headers
        await answered(http, TEXT | fields)
        await answered(http, {"model": MODEL, "input": "a"} | fields, "/v1/responses")


@pytest.mark.parametrize("options", [{"http": HttpOptions(unknown_fields=unknown)} for unknown in UnknownFields])
async def test_what_would_change_the_text_is_never_ignored(http: httpx.AsyncClient) -> None:
    changing: list[tuple[dict[str, Any], str]] = [
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"enable_search": True}, "enable_search"),
        ({"n_predict": 5}, "n_predict"),
        ({"options": {"temperature": 0}}, "options.temperature"),
        ({"temprature": 0}, "temprature"),
        ({"suffix": "x"}, "suffix"),
    ]
    for fields, param in changing:
        answer = await http.post("/v1/completions", json=TEXT | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("options", [{"http": HttpOptions(unknown_fields=UnknownFields.IGNORE)}])
async def test_the_answer_says_what_was_ignored(http: httpx.AsyncClient) -> None:
    strange = {"my_field": 1, "zwei\r\nx: y,": [2]}
    whole = await answered(http, TEXT | strange)
    streamed = await answered(http, TEXT | strange | {"stream": True})
    tokens = await answered(http, {"prompt": "a", "my_field": 1}, "/tokenize")
    refused = await http.post("/v1/completions", json=TEXT | strange | {"model": "nobody"})
    many = await http.post("/v1/completions", json=TEXT | {f"field{i}": 1 for i in range(100)})
    for answer in (whole, streamed, refused):
        assert answer.headers[IGNORED] == "my_field, zwei%0D%0Ax%3A%20y%2C"
    assert tokens.headers[IGNORED] == "my_field"
    assert many.status_code == 400


@pytest.mark.parametrize("template", [SHOWS])
async def test_the_switches_of_reasoning_reach_the_template(
    http: httpx.AsyncClient, router: ScriptedRouter, tokenizer: ModelTokenizer
) -> None:
    switches: list[tuple[dict[str, Any], str]] = [
        ({"enable_thinking": False}, "False "),
        ({"thinking": {"type": "disabled"}}, "False "),
        ({"thinking": {"type": "enabled", "budget_tokens": 64}}, "True "),
        ({"think": True}, "True "),
        ({"think": "high"}, " high"),
        ({"reasoning": {"enabled": False}}, "False "),
        ({"reasoning": {"effort": "low", "enabled": True}}, "True low"),
    ]
    for fields, shown in switches:
        await answered(http, CHAT | fields, "/v1/chat/completions")
        assert prompt_of(router.requests[-1], tokenizer) == f"Hm? {shown}"


async def test_a_budget_of_reasoning_is_not_kept_and_the_answer_says_so(http: httpx.AsyncClient) -> None:
    thinking = await answered(
        http, CHAT | {"thinking": {"type": "enabled", "budget_tokens": 64}}, "/v1/chat/completions"
    )
    reasoning = await answered(http, CHAT | {"reasoning": {"max_tokens": 64}}, "/v1/chat/completions")
    assert (thinking.headers[IGNORED], reasoning.headers[IGNORED]) == ("thinking.budget_tokens", "reasoning.max_tokens")


async def test_stream_options_without_a_stream_have_no_effect(http: httpx.AsyncClient) -> None:
    for stream in ({}, {"stream": False}):
        options = {"include_usage": True, "include_obfuscation": True}
        answer = await answered(http, TEXT | {"stream_options": options} | stream)
        assert answer.json()["usage"]["completion_tokens"] == 3


# Packed bodies

PACKED = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "GZIP": gzip.compress,
    "identity": bytes,
    "": bytes,
}


async def test_a_packed_body_is_unpacked(http: httpx.AsyncClient, router: ScriptedRouter) -> None:
    for length, (coding, packed) in enumerate(PACKED.items(), 1):
        headers = {"content-type": "application/json", "content-encoding": coding}
        body = packed(json.dumps(TEXT | {"max_tokens": length}).encode())
        answer = await http.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert router.requests[-1].stopping.max_new_tokens == length, coding


async def test_another_coding_is_refused_with_those_that_are_read(http: httpx.AsyncClient) -> None:
    for coding in ("br", "zstd", "gzip, gzip", "compress"):
        headers = {"content-type": "application/json", "content-encoding": coding}
        answer = await http.post("/v1/completions", content=b"x", headers=headers)
        assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate"), coding
        assert answer.json()["error"]["param"] == "Content-Encoding"


@pytest.mark.parametrize("options", [{"limits": GatewayLimits(max_body_bytes=1 << 20)}])
async def test_a_body_that_unpacks_without_end_is_a_413_that_takes_no_memory(http: httpx.AsyncClient) -> None:
    packing = zlib.compressobj(wbits=31)
    bomb = b"".join(packing.compress(bytes(1 << 20)) for _ in range(128)) + packing.flush()
    assert len(bomb) < 1 << 18
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    tracemalloc.start()
    answer = await http.post("/v1/completions", content=bomb, headers=headers)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.status_code == 413
    assert most < 16 << 20


_EMPTY = gzip.compress(b"{}")


async def test_a_body_that_is_not_what_it_says_is_a_400(http: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    for cut in (b"\x1f\x8b", _EMPTY[:-3], _EMPTY * 2, b"{}"):
        answer = await http.post("/v1/completions", content=cut, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Content-Encoding"), cut


# Metrics


@pytest.mark.parametrize("options", [{"http": HttpOptions(api_metrics=True)}])
async def test_the_api_port_has_the_metrics_of_vllm_if_asked(http: httpx.AsyncClient) -> None:
    before = (await http.get("/metrics")).text
    await answered(http, TEXT)
    after = (await http.get("/metrics")).text
    for name in ("running", "waiting"):
        assert f'vllm:num_requests_{name}{{engine="0",model_name="{MODEL}"}} 0.0' in before
    assert f'vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}} 3.0' in after
    assert "outrider_" not in after
    families = [line.split()[2] for line in after.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
