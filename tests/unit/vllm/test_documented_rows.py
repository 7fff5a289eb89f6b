"""The table of what works in docs/bring-your-vllm.md: each row has a test."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_SERVE, _ATTACH, _FEED = "tests/vllm/test_serve.py", "tests/vllm/test_attach.py", "tests/vllm/test_feed.py"
ROWS = {
    "temperature 0": (_SERVE, "test_greedy_texts_with_drafts_are_those_of_vllm_alone"),
    "temperature above 0 with `seed`": (_SERVE, "test_seeded_texts_do_not_depend_on_drafts"),
    "temperature above 0 without `seed`": ("tests/vllm/test_distribution.py", "test_draws_follow_the_model"),
    "a tenant with the cap 0, or a request": (_SERVE, "test_a_tenant_that_is_off_has_no_drafts"),
    "a draft worker that is killed in mid-answer": (
        _SERVE,
        "test_a_draft_that_stops_in_mid_answer_changes_nothing_and_comes_back",
    ),
    "a router that is killed in mid-answer": (
        _ATTACH,
        "test_an_answer_outlives_its_router_and_the_next_one_is_attached_to",
    ),
    "JSON schema, regex, choice": (_SERVE, "test_structured_output_is_the_same_with_drafts"),
    "images, audio, prompt embeddings, streamed input": (
        _FEED,
        "test_a_request_that_is_more_than_its_tokens_is_decoded_plainly",
    ),
    "`receipt: true`": ("tests/unit/vllm/test_middleware.py", "test_a_receipt_is_refused_by_name"),
    "samples of tenants that consent": (_FEED, "test_a_server_that_cannot_draft_does_not_start"),
}


def test_each_row_has_a_test() -> None:
    page = (_ROOT / "docs/bring-your-vllm.md").read_text()
    table = page.partition("## What works")[2].partition("| | |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (.+?) \|", table, re.MULTILINE) == list(ROWS)
    for file, name in ROWS.values():
        assert re.search(rf"def {name}\(", (_ROOT / file).read_text()), (file, name)
