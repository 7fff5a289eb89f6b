"""`vllm serve` with two ranks of a model without experts: each drafts, and texts are those without drafts."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.vllm.vllm_serve import REPETITIVE, plugin, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_each_rank_verifies_drafts_and_texts_stay_the_same(tiny_vllm: Path) -> None:
    config = {
        "lookups": ["ngram"],
        "row_price": 0,
        "tenant_header": "x-tenant",
        "tenants": {"off": {"max_draft_tokens": 0}},
    }
    prompts = [f"{REPETITIVE} {n} {REPETITIVE}" for n in range(8)]
    ranks = "--data-parallel-size", "2", "--api-server-count", "1", "--max-model-len", "512"
    with serving(tiny_vllm, *plugin(**config), *ranks) as server:
        plain = server.answers(prompts, tenant="off", max_tokens=48)
        assert server.counted("num_draft_tokens") == 0
        assert server.answers(prompts, max_tokens=48) == plain
        lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    drafted = [line for line in lines if line.startswith("vllm:spec_decode_num_draft_tokens_total{")]
    assert len(drafted) == 2 and all(float(line.split()[-1]) > 0 for line in drafted), drafted
