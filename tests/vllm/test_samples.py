"""Samples of a target on vLLM: of tenants that consent, with the model's likeliest tokens, and gone when erased."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.rpc.v1 import target_pb2
from outrider.samples import SampleStore
from transformers import AutoModelForCausalLM

from tests.integration.target.test_server import Router, open_sequence, until
from tests.vllm.served import Loaded, loaded, served
from tests.vllm.test_target import MODES, PROMPT, WAITING, following, how, plain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TEXT, NUMBERS, NOTHING = sp.SAMPLE_CONSENT_TEXT, sp.SAMPLE_CONSENT_ACCEPTANCE, sp.SAMPLE_CONSENT_UNSPECIFIED


@pytest.fixture(scope="module")
def engine(tiny_vllm: Path) -> Iterator[Loaded]:
    with loaded(tiny_vllm) as made:
        yield made


async def ask(stub: Any, draft: Any, number: int, mode: str, tenant: str, consent: Any, **changes: Any) -> Router:
    """An answer for which drafts are verified."""
    router = Router(stub)
    asked = how(mode, tenant=tenant, samples=consent, speculation=WAITING, draft=draft.assigned(number), **changes)
    await router.send(opens=[open_sequence(number, PROMPT, **asked)])
    await router.finished(number)
    assert not router.errors, router.errors
    return router


@pytest.mark.parametrize("mode", MODES)
async def test_a_sample_has_the_text_and_the_likeliest_tokens_of_transformers(
    engine: Loaded, tiny_vllm: Path, tmp_path: Path, mode: str
) -> None:
    text, store = (await plain(engine, **how(mode))).text[1], SampleStore(tmp_path)
    async with served(engine, following(text), samples=str(tmp_path)) as (_, stub, draft):
        router = await ask(stub, draft, 2, mode, "a", TEXT)
        await until(lambda: bool(list(store.read("a"))))
    [record] = store.read("a")
    assert (record["prompt"], record["output"]) == (PROMPT, text)
    assert router.text[2] == text, "the log probabilities of a sample change no text"
    assert record["model_revision"] == engine.info.model_revision
    assert sum(record["verified"].values()) > sum(record["accepted"].values()) > 15
    model = AutoModelForCausalLM.from_pretrained(tiny_vllm, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *text]])).logits[0, len(PROMPT) - 1 : -1]
    top = logits.log_softmax(-1).topk(8)
    torch.testing.assert_close(torch.tensor(record["top_logprobs"]), top.values, atol=2e-3, rtol=0)
    assert record["top_token_ids"] == top.indices.tolist()


async def test_only_what_the_tenant_consents_to_is_kept_and_the_client_gets_what_it_asks_for(
    engine: Loaded, tmp_path: Path
) -> None:
    text, store = (await plain(engine, **how("greedy"))).text[1], SampleStore(tmp_path)
    async with served(engine, following(text), samples=str(tmp_path)) as (_, stub, draft):
        await ask(stub, draft, 2, "greedy", "c", NOTHING)
        await ask(stub, draft, 3, "greedy", "b", NUMBERS)
        without = await ask(stub, draft, 4, "greedy", "a", TEXT)
        two = await ask(stub, draft, 5, "greedy", "a", TEXT, logprobs=sp.LogprobsOptions(num_top=2))
        await until(lambda: len(list(store.read("a"))) == 2)
        [numbers] = store.read("b")
        assert not list(store.read("c"))
        assert "output" not in numbers and numbers["output_tokens"] == len(text)
        assert {len(top) for record in store.read("a") for top in record["top_token_ids"]} == {8}
        erased = await stub.EraseHistory(target_pb2.EraseHistoryRequest(tenant="a", samples=True))
        assert erased.num_texts == 2 and not list(store.read("a")) and list(store.read("b"))
    given = [[one for r in router.responses for c in r.commits for one in c.logprobs] for router in (without, two)]
    assert not given[0] and len(given[1]) == len(text)
    assert {len(one.top_token_ids) for one in given[1]} == {2}
