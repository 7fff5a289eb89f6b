"""Receipts: `outrider verify` finds true answers of every mode of a request equal, and names what differs in others."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from outrider.gateway.config import GatewayConfig, GatewayLimits
from outrider.gateway.server import RunningGateway, running
from outrider.protocol.receipts import checked
from outrider.rpc.v1 import generation_pb2, receipt_pb2, router_pb2
from outrider_controller.cli.ask.verify import first_difference
from outrider_controller.cli.client import Gateway, GatewayAnswer

from tests.integration.router.test_receipts import KEY, gateway
from tests.integration.router.test_receipts import verified as verified_at

__all__ = ["gateway"]

Json = dict[str, Any]
PROMPT = "Why is the sky blue?"
SAMPLINGS: dict[str, Json] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 2**53 + 1},
    "unseeded": {"temperature": 0.9},
}
LETTERS = list(range(100, 126))
BREAKS = [13, 16]
"""Of line feed and carriage return."""
QUICK: dict[str, Json] = {"n": {"n": 2, "allowed_token_ids": [*BREAKS, *LETTERS]}}
SLOW: dict[str, Json] = {
    "many stop tokens": {"stop_token_ids": list(range(300, 364))},
    "min_tokens": {"min_tokens": 30, "stop": ["e"]},
    "lists of numbers": {"structured_outputs": {"regex": r"\[[1-9]{3,9}, [1-9]{3,9}\]"}},
    "plain": {},
    "stop strings": {"stop": ["e", "th", "\n"]},
    "penalties": {"frequency_penalty": 0.3, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    "top": {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "bias": {"logit_bias": {"101": 3.5}, "bad_words": ["a"]},
    "json": {"response_format": {"type": "json_object"}},
    "schema": {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}}},
    "prediction": {"prediction": {"type": "content", "content": "Because the sky is blue."}},
    "ignore_eos": {"ignore_eos": True},
}
ROUTES: dict[str, tuple[Json, str, list[str]]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": PROMPT}], "logprobs": True}, "max_tokens", []),
    "/v1/completions": ({"prompt": PROMPT, "logprobs": 2}, "max_tokens", ["--raw"]),
    "/v1/responses": ({"input": PROMPT}, "max_output_tokens", []),
}
"""The prompt and options of its own, how it names the limit, and how `verify` is told of the prompt."""
LACKS = {"/v1/completions": {"prediction"}, "/v1/responses": {"n", "response_format", "prediction", "stop"}}


async def verified(gateway: RunningGateway, receipt: str, prompt: str, *more: str) -> str:
    return await verified_at(gateway.grpc_address, receipt, prompt, None, *more)


async def asked(gateway: RunningGateway, route: str, body: Json) -> list[tuple[str, str]]:
    """The text and the receipt of each answer."""
    body = {"model": "tiny", "receipt": True, "speculation": "on", **body}
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.post(f"http://{gateway.http_address}{route}", json=body)
    assert response.status_code == 200, response.text
    if route == "/v1/responses":
        answer = response.json()
        # A text that ends at once is no item.
        said = "".join(part["text"] for item in answer["output"] for part in item["content"])
        return [(said, answer["receipt"])]
    if not body.get("stream"):
        choices = response.json()["choices"]
        said = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
        return list(zip((each or "" for each in said), (each["receipt"] for each in choices), strict=True))
    texts: dict[int, str] = {}
    receipts: dict[int, str] = {}
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            index, piece = choice["index"], choice.get("delta", {}).get("content") or choice.get("text") or ""
            texts[index] = texts.get(index, "") + piece
            receipts |= {index: choice["receipt"]} if choice.get("receipt") else {}
    return [(texts[index], receipts[index]) for index in sorted(texts)]


@pytest.mark.parametrize(
    "modes", [pytest.param(QUICK, id="quick"), pytest.param(SLOW, id="others", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "sampling", ["unseeded", *(pytest.param(each, marks=pytest.mark.slow) for each in ("greedy", "seeded"))]
)
async def test_the_text_of_every_mode_is_equal_as_an_argument_and_in_a_file(
    gateway: RunningGateway, tmp_path: Path, modes: dict[str, Json], sampling: str
) -> None:
    # Two pieces, or three.
    max_tokens = 24 if modes is QUICK else 40
    for (mode, options), (route, (own, limit, how)) in itertools.product(modes.items(), ROUTES.items()):
        if options.keys() & LACKS.get(route, set()):
            continue
        # A quick run streams one route, and not the other.
        both = modes is SLOW and route != "/v1/responses"
        for stream in (False, True) if both else (route == "/v1/completions",):
            body = own | options | SAMPLINGS[sampling] | {limit: max_tokens, "stream": stream}
            answers = await asked(gateway, route, body)
            assert len(answers) == options.get("n", 1)
            for text, receipt in answers:
                (tmp_path / "text").write_bytes(text.encode())
                # An argument that begins so names a file.
                direct = [] if text.startswith("@") else ["--output", text]
                for output in ([], direct, ["--output", f"@{tmp_path / 'text'}"]):
                    found = await verified(gateway, receipt, PROMPT, *how, *output)
                    assert found.startswith("equal: "), (mode, route, stream, output, found)


PARTS = [{"type": "text", "text": "Why is "}, {"type": "text", "text": "it blue?"}]
AS_ASKED: dict[str, tuple[str, Json, list[str], str]] = {
    "echoed": ("/v1/completions", {"prompt": PROMPT, "echo": True}, ["--raw"], PROMPT),
    "echoed tokens": ("/v1/completions", {"prompt": [104, 105, 195], "echo": True}, [], "[104, 105, 195]"),
    "parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PARTS}]},
        [],
        json.dumps([{"role": "user", "content": PARTS}]),
    ),
}


@pytest.mark.parametrize("mode", AS_ASKED)
async def test_a_prompt_and_a_text_are_equal_as_they_were_sent_and_came(
    gateway: RunningGateway, tmp_path: Path, mode: str
) -> None:
    route, body, how, prompt = AS_ASKED[mode]
    body = body | {"max_tokens": 20, "allowed_token_ids": LETTERS, "ignore_eos": True}
    [(text, receipt)] = await asked(gateway, route, body)
    (tmp_path / "text").write_bytes(text.encode())
    output = ["--output", f"@{tmp_path / 'text'}"]
    assert (await verified(gateway, receipt, prompt, *how, *output)).startswith("equal: 20 tokens")
    (tmp_path / "text").write_bytes(f"{text[:-1]}!".encode())
    assert "token 19 of the output" in await verified(gateway, receipt, prompt, *how, *output)


async def generated(gateway: RunningGateway, prompt: list[int], resume: list[int], **options: Any) -> GatewayAnswer:
    options = {"max_tokens": 40, "receipt": True, "speculation": router_pb2.SPECULATION_MODE_ON} | options
    request = generation_pb2.GenerateRequest(
        model="tiny",
        tokens=generation_pb2.TokenPrompt(token_ids=prompt),
        options=generation_pb2.GenerationOptions(**options),
        resume_token_ids=resume,
    )
    async with Gateway(gateway.grpc_address) as stub:
        return await stub.answer(request, 60)


def content(receipt: str) -> receipt_pb2.Receipt:
    return checked(receipt, KEY.private.public_key())


async def test_fewer_requests_at_once_than_pieces_are_enough(real_fleet: Any) -> None:
    listen = {"listen_grpc": "127.0.0.1:0", "listen_http": "127.0.0.1:0", "limits": GatewayLimits(max_running=1)}
    config = GatewayConfig(**listen, routers=(real_fleet.router.address,), receipt_key=KEY)
    async with running(config) as gateway:
        answer = await generated(gateway, [40, 41, 42], [], temperature=0, ignore_eos=True)
        output = json.dumps(list(answer.token_ids))
        assert (await verified(gateway, answer.receipt, "[40, 41, 42]", "--output", output)).startswith("equal: ")


async def test_pieces_of_an_answer_with_a_least_length_are_equal(gateway: RunningGateway) -> None:
    answer = await generated(gateway, [40, 41, 42], [], temperature=1.0, min_tokens=33, ignore_eos=False)
    output = json.dumps(list(answer.token_ids))
    assert (await verified(gateway, answer.receipt, "[40, 41, 42]", "--output", output)).startswith("equal: ")


@pytest.mark.parametrize(
    ("resume", "stop", "resumed", "generated_tokens"),
    [([104, 105], [], 2, 38), ([104, 105, 106, 107], [105], 2, 0), ([104] * 40, [], 40, 0)],
    ids=["continued", "ended within what came", "as long as allowed"],
)
async def test_a_resumed_answer_is_equal_with_the_count_of_tokens_that_are_in_it(
    gateway: RunningGateway, resume: list[int], stop: list[int], resumed: int, generated_tokens: int
) -> None:
    answer = await generated(gateway, [40, 41], resume, temperature=0, ignore_eos=True, stop_token_ids=stop)
    assert content(answer.receipt).resumed_tokens == resumed
    output = json.dumps([*resume[:resumed], *answer.token_ids])
    found = await verified(gateway, answer.receipt, "[40, 41]", "--output", output)
    assert found.startswith(f"equal: {generated_tokens} tokens after {resumed} "), found
    assert "prompt is not that" in await verified(gateway, answer.receipt, "[40, 42]", "--output", output)


async def test_a_stop_string_in_the_reasoning_or_the_calls_of_an_answer_does_not_end_its_replay(
    gateway: RunningGateway,
) -> None:
    answer = await generated(gateway, [40, 41], [], temperature=0, ignore_eos=True, allowed_token_ids=LETTERS)
    signed = content(answer.receipt)
    # As of such an answer: the string was asked for, is in the text, and ended nothing.
    signed.stop[:] = [answer.text[3:5]]
    receipt, output = KEY.sign(signed), json.dumps(list(answer.token_ids))
    assert (await verified(gateway, receipt, "[40, 41]")).startswith("equal: ")
    assert (await verified(gateway, receipt, "[40, 41]", "--output", output)).startswith("equal: ")


async def test_each_part_of_an_answer_of_two_revisions_is_compared_with_its_own(gateway: RunningGateway) -> None:
    answer = await generated(gateway, [40, 41], [], temperature=0, ignore_eos=True)
    signed = content(answer.receipt)
    [own] = signed.model_revisions
    output = json.dumps(list(answer.token_ids))
    for revisions, outcome in (([own, own], "equal: "), ([own, f"{own}-other"], f"is of revision {own}-other")):
        signed.model_revisions[:] = revisions
        signed.revision_starts[:] = [0, 17]
        receipt = KEY.sign(signed)
        assert outcome in await verified(gateway, receipt, "[40, 41]", "--output", output)
        assert outcome in await verified(gateway, receipt, "[40, 41]")


async def test_the_first_token_that_a_text_lacks_is_named_and_always_the_same(gateway: RunningGateway) -> None:
    body = ROUTES["/v1/completions"][0] | {"max_tokens": 30, "allowed_token_ids": LETTERS, "ignore_eos": True}
    [(text, receipt)] = await asked(gateway, "/v1/completions", body)
    assert len(text) == 30
    for place in (0, 7, 29):
        changed = f"{text[:place]}#{text[place + 1 :]}"
        found = [await verified(gateway, receipt, PROMPT, "--raw", "--output", changed) for _ in range(3)]
        assert len(set(found)) == 1
        assert found[0].startswith(f"not equal: token {place} of the output (from 0)"), found
        assert repr(text[place]) in found[0] and "'#" in found[0]
    assert "token 30 " in await verified(gateway, receipt, PROMPT, "--raw", "--output", text + "!")
    assert "token 29 " in await verified(gateway, receipt, PROMPT, "--raw", "--output", text[:-1])


def test_a_difference_is_found_in_the_token_that_has_it_also_within_characters() -> None:
    euro, tokens = "\u20ac".encode(), [b"a", *(bytes([byte]) for byte in "\u20ac".encode()), b"", b"b"]
    assert first_difference("a\u20acb", tokens) == (6, 5)
    # These begin with the same two bytes, with another first one, and end early.
    assert first_difference("a\u20adb", tokens) == (3, 1)
    assert first_difference("axb", tokens) == (1, 1)
    assert first_difference("a\u20ac", tokens) == (5, 4)
    # A character that is never completed.
    assert first_difference("a\ufffdb", [b"a", euro[:2], b"b"]) == (3, 5)
    assert first_difference("a\ufffdc", [b"a", euro[:2], b"b"])[0] == 2


async def test_a_prompt_that_is_its_own_answer_gets_no_receipt(gateway: RunningGateway) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "echo": True, "max_tokens": 0, "receipt": True}
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"http://{gateway.http_address}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "receipt")
