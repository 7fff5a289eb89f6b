"""Receipts: `outrider verify` finds every answer equal, whatever became of it, and names what was changed."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import random
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from openai import AsyncOpenAI
from outrider.gateway.config import GatewayConfig
from outrider.gateway.generation.requests import Generation, TokenPrompt
from outrider.gateway.server import RunningGateway, running
from outrider.protocol.receipts import ReceiptKey, checked
from outrider.rpc.v1 import generation_pb2, receipt_pb2, router_pb2, tenants_pb2
from outrider_controller.cli.ask.verify import verify
from outrider_controller.cli.client import Gateway, GatewayAnswer

NUM_TOKENS, VOCAB = 40, 384
KEY = ReceiptKey.make()
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "coupled": {"temperature": 0.8, "top_p": 0.95, "seed": 2**64 - 1},
    "without a seed": {"temperature": 0.8, "top_p": 0.95},
    "penalties": {"temperature": 1.2, "frequency_penalty": 0.3, "repetition_penalty": 1.3, "bad_words": ["a"]},
    "a form": {"temperature": 0.8, "structured": {"regex": "[a-z]{3,9}( [a-z]{3,9}){9,30}"}},
}


@pytest.fixture
async def gateway(real_fleet: Any) -> AsyncIterator[RunningGateway]:
    config = GatewayConfig(
        listen_grpc="127.0.0.1:0",
        listen_http="127.0.0.1:0",
        routers=(real_fleet.router.address,),
        receipt_key=KEY,
    )
    async with running(config) as started:
        yield started


def ask(prompt: list[int], **options: Any) -> generation_pb2.GenerateRequest:
    always = {"max_tokens": NUM_TOKENS, "receipt": True, "include_metrics": True}
    options = always | {"speculation": router_pb2.SPECULATION_MODE_ON} | options
    tokens = generation_pb2.TokenPrompt(token_ids=prompt)
    return generation_pb2.GenerateRequest(model="tiny", tokens=tokens, options=options)  # type: ignore[arg-type]


async def answered(
    fleet: Any, address: str, request: generation_pb2.GenerateRequest, *, fails: bool = False
) -> GatewayAnswer:
    """With `fails`, the target that gives the answer is lost in its middle."""
    came = 0

    def show(chunk: generation_pb2.StreamGenerateResponse) -> None:
        nonlocal came, fails
        came += len(chunk.token_ids)
        if fails and came >= 5:
            fails = False
            for target in fleet.targets:
                target.expire_drain()

    async with Gateway(address) as asked:
        return await asked.answer(request, 60, show)


async def verified(address: str, receipt: str, prompt: Any, output: Any = None, *more: str) -> str:
    """What the command says; its error if it fails."""
    given = {"--gateway": address, "--prompt": prompt} | ({} if output is None else {"--output": output})
    options = [(name, each if isinstance(each, str) else json.dumps(list(each))) for name, each in given.items()]
    arguments = [receipt, *itertools.chain(*options), *more]
    result = await asyncio.to_thread(CliRunner().invoke, verify, arguments)
    assert result.exit_code in (0, 1), result.output
    return str(result.exception) if result.exit_code else result.output


async def _all_equal(fleet: Any, address: str, mode: str, count: int) -> None:
    rng, moved, kinds = random.Random(mode), 0, set[str]()
    for number in range(count):
        prompt = [rng.randrange(3, 259) for _ in range(rng.randint(2, 24))]
        answer = await answered(fleet, address, ask(prompt, **MODES[mode]), fails=bool(number % 2))
        moved += answer.metrics.speculative_decoding.num_target_failovers
        kinds |= set(checked(answer.receipt, KEY.private.public_key()).draft_kinds)
        assert (await verified(address, answer.receipt, prompt, answer.token_ids)).startswith("equal: ")
    assert kinds == {"model"}
    assert moved >= count // 4


async def test_an_answer_with_drafts_and_a_lost_target_is_equal(real_fleet: Any, gateway: RunningGateway) -> None:
    await _all_equal(real_fleet, gateway.grpc_address, "without a seed", 4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_200_answers_of_every_mode_are_equal(real_fleet: Any, gateway: RunningGateway, mode: str) -> None:
    await _all_equal(real_fleet, gateway.grpc_address, mode, 200 // len(MODES))


async def test_a_changed_token_is_found_at_its_place(real_fleet: Any, gateway: RunningGateway) -> None:
    prompt, rng = [40, 41, 42, 40, 41], random.Random(1)
    asked = ask(prompt, ignore_eos=True, **MODES["without a seed"])
    answer = await answered(real_fleet, gateway.grpc_address, asked)
    signed = checked(answer.receipt, KEY.private.public_key())
    for place in (0, 15, 16, len(answer.token_ids) - 1):
        output = list(answer.token_ids)
        output[place] = (output[place] + rng.randrange(1, 200)) % VOCAB
        found = await verified(gateway.grpc_address, answer.receipt, prompt, output)
        assert found.startswith(f"not equal: token {place} "), found
        # Nor does a gateway that signs what no target said get away with it.
        false = receipt_pb2.Receipt()
        false.CopyFrom(signed)
        false.output_sha256 = digest_of(output)
        found = await verified(gateway.grpc_address, KEY.sign(false), prompt, output)
        assert found.startswith(f"not equal: token {place} "), found


def digest_of(token_ids: list[int]) -> str:
    """As docs/api.md defines it."""
    return hashlib.sha256(b"".join(each.to_bytes(4, "little") for each in token_ids)).hexdigest()


def altered(text: str, place: int) -> str:
    """With another character of base64 there."""
    characters = list(text)
    characters[place] = "A" if characters[place] != "A" else "B"
    return "".join(characters)


async def test_what_is_not_the_answers_is_refused_by_name(real_fleet: Any, gateway: RunningGateway) -> None:
    prompt, address = [40, 41, 42, 40, 41], gateway.grpc_address
    answer = await answered(real_fleet, address, ask(prompt, temperature=0, ignore_eos=True))
    signed = checked(answer.receipt, KEY.private.public_key())
    assert (signed.prompt_sha256, signed.output_sha256) == (digest_of(prompt), digest_of(answer.token_ids))

    def told(**changes: Any) -> str:
        other = receipt_pb2.Receipt()
        other.CopyFrom(signed)
        for name, value in changes.items():
            other.ClearField(name)  # type: ignore[arg-type]
            other.MergeFrom(receipt_pb2.Receipt(**{name: value}))
        return KEY.sign(other)

    weights, _, arithmetic = signed.model_revisions[0].partition("/")
    for revision in (f"0{weights[1:]}/{arithmetic}", f"{weights}/float64"):
        found = await verified(address, told(model_revisions=[revision]), prompt, answer.token_ids)
        assert revision in found and signed.model_revisions[0] in found
    assert "not of one revision" in await verified(address, told(model_revisions=["a/b", "a/c"]), prompt)
    assert "prompt is not that" in await verified(address, answer.receipt, [40, 41, 42, 40], answer.token_ids)
    assert "the receipt has 40" in await verified(address, answer.receipt, prompt, answer.token_ids[:-1])
    # A text, however deeply it would be nested as JSON.
    assert "the text differs" in await verified(address, answer.receipt, prompt, "[" * 2000)
    header, content, signature = answer.receipt.split(".")
    for tampered in (f"{header}.{altered(content, -9)}.{signature}", f"{header}.{content}.{altered(signature, 0)}"):
        assert "signature is not that" in await verified(address, tampered, prompt, answer.token_ids)
    assert "signature is not that" in await verified(address, ReceiptKey.make().sign(signed), prompt)
    assert "not a receipt" in await verified(address, "abc", prompt)


async def test_openssl_finds_the_signature_good_and_that_of_a_changed_receipt_bad(
    real_fleet: Any, gateway: RunningGateway, tmp_path: Path
) -> None:
    openssl = shutil.which("openssl") or pytest.skip("needs openssl")
    answer = await answered(real_fleet, gateway.grpc_address, ask([40, 41, 42], temperature=0))
    async with httpx.AsyncClient() as client:
        given = await client.get(f"http://{gateway.http_address}/v1/receipt-key")
    (tmp_path / "key.pem").write_text(given.json()["pem"])
    signed, _, signature = answer.receipt.rpartition(".")
    (tmp_path / "signature").write_bytes(base64.urlsafe_b64decode(signature + "=="))
    command = [openssl, "pkeyutl", "-verify", "-pubin", "-inkey", "key.pem", "-rawin", "-in", "signed"]
    for text, code in ((signed, 0), (altered(signed, -1), 1)):
        (tmp_path / "signed").write_text(text)
        done = await asyncio.to_thread(subprocess.run, [*command, "-sigfile", "signature"], cwd=tmp_path)
        assert done.returncode == code, done


async def test_a_tenants_record_is_as_good_as_the_request(gateway: RunningGateway) -> None:
    asked = Generation("tiny", TokenPrompt([40, 41, 42]))
    for receipts in (False, True):
        tenant = tenants_pb2.Tenant(name="t", receipts=receipts)
        async with gateway.core.start([[asked]], default_max_tokens=4, tenant=tenant) as [answer]:
            chunks = [chunk async for chunk in answer.chunks]
        assert bool(chunks[-1].signed) is receipts
        assert (answer.options.seed is not None) is receipts


@pytest.mark.parametrize(
    ("seed", "stream"),
    [(25, False), (39, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((25, True), (39, False)))],
)
async def test_openais_client_gets_one_from_both_routes_and_text_is_enough_to_verify_it(
    gateway: RunningGateway, stream: bool, seed: int
) -> None:
    client = AsyncOpenAI(base_url=f"http://{gateway.http_address}/v1", api_key="x")
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 1.1, "seed": seed, "stream": stream}
    body |= {"extra_body": {"receipt": True, "speculation": "on"}, "stop": ["e", "<"]}
    ask_text = client.completions.create(prompt="Once upon a time", **body)
    ask_chat = client.chat.completions.create(messages=[{"role": "user", "content": "Why?"}], **body)
    for asking, prompt, more in ((ask_text, "Once upon a time", ["--raw"]), (ask_chat, "Why?", [])):
        parts = [part async for part in await asking] if stream else [await asking]
        choices = [choice.model_dump() for part in parts for choice in part.choices]
        said = [each.get("delta") or each.get("message") or {"content": each.get("text")} for each in choices]
        text = "".join(each["content"] or "" for each in said)
        assert bool(text) is (seed == 39)
        [receipt] = [each["receipt"] for each in choices if each.get("receipt")]
        address = gateway.grpc_address
        assert (await verified(address, receipt, prompt, text, *more)).startswith("equal: ")
        assert (await verified(address, receipt, prompt, None, *more)).startswith("equal: ")
        assert "text differs" in await verified(address, receipt, prompt, text + "!", *more)
    assert not (await client.completions.create(prompt="a", model="tiny", max_tokens=2)).choices[0].model_extra
    await client.close()
