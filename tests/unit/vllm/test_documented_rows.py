"""The tables of what works, in docs/vllm.md and docs/bring-your-vllm.md: each row has a test."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from outrider.draft.config import parse_arguments
from outrider.engine.checkpoints.fetching import KNOWN_MODELS, hub_model

_ROOT = Path(__file__).parents[3]
_SETTINGS = "tests/vllm/test_settings.py"
_RUNNER = "tests/vllm/test_second_runner.py"
_SERVE, _ATTACH, _FEED = "tests/vllm/test_serve.py", "tests/vllm/test_attach.py", "tests/vllm/test_feed.py"
ROWS: dict[str, tuple[str, str]] = {
    "temperature 0": (_SERVE, "test_greedy_texts_with_drafts_are_those_of_vllm_alone"),
    "temperature above 0 with `seed`": (_SERVE, "test_seeded_texts_with_drafts_are_those_of_vllm_alone"),
    "temperature above 0 without `seed`": (_RUNNER, "test_unseeded_texts_are_drawn_as_vllm_draws"),
    "other sampling options": (_RUNNER, "test_texts_with_drafts_are_those_of_vllm_alone"),
    "a tenant with the cap 0, or a request": (_SERVE, "test_a_tenant_that_is_off_has_no_drafts"),
    "a draft worker that is killed in mid-answer": (
        _SERVE,
        "test_a_draft_that_stops_in_mid_answer_changes_nothing_and_comes_back",
    ),
    "a draft worker that sends ids beyond the vocabulary, or what is no draft": (
        "tests/vllm/test_serve_faults.py",
        "test_garbage_of_a_draft_worker_changes_no_text",
    ),
    "a router that is killed in mid-answer": (
        _ATTACH,
        "test_an_answer_outlives_its_router_and_the_next_one_is_attached_to",
    ),
    "`n`, `logprobs`, `prompt_logprobs`, prefix caching, chunked prefill, `--kv-cache-dtype fp8`": (
        _RUNNER,
        "test_texts_with_drafts_are_those_of_vllm_alone",
    ),
    "`/v1/responses`": (_SERVE, "test_responses_are_the_same_with_drafts_and_a_tenant_holds_there"),
    "JSON schema, regex, choice, tools": (
        _SERVE,
        "test_structured_output_and_a_call_of_a_tool_are_the_same_with_drafts",
    ),
    "images, audio, prompt embeddings, streamed input": (
        _FEED,
        "test_a_request_that_is_more_than_its_tokens_is_decoded_plainly",
    ),
    "`--enable-lora`": (_RUNNER, "test_texts_with_drafts_are_those_of_vllm_alone"),
    "`--tensor-parallel-size`": (_SETTINGS, "test_a_setting_works_or_is_refused_by_name"),
    "`--data-parallel-size`": (
        "tests/vllm/test_data_parallel.py",
        "test_each_rank_verifies_drafts_and_texts_stay_the_same",
    ),
    "`--pipeline-parallel-size` above 1": (_SETTINGS, "test_a_setting_works_or_is_refused_by_name"),
    "another method of `--speculative-config`": (_RUNNER, "test_texts_with_drafts_are_those_of_vllm_alone"),
    "another `--scheduler-cls`": (_SETTINGS, "test_a_setting_works_or_is_refused_by_name"),
    "`--enable-sleep-mode`": (
        "tests/vllm/test_planted_faults.py",
        "test_an_engine_that_has_slept_answers_as_before",
    ),
    "`--kv-transfer-config`": (_SETTINGS, "test_a_setting_works_or_is_refused_by_name"),
    "fields of `--speculative-config` that would have no effect": (
        _SETTINGS,
        "test_a_setting_works_or_is_refused_by_name",
    ),
    "vLLM's front end in Rust": (
        _SETTINGS,
        "test_a_front_end_without_middleware_is_refused_where_there_are_tenants",
    ),
    "`receipt: true`": ("tests/unit/vllm/test_middleware.py", "test_a_receipt_is_refused_by_name"),
    "samples of tenants that consent": (_FEED, "test_a_server_that_cannot_draft_does_not_start"),
}
_FLEET, _GATEWAY = "tests/vllm/test_fleet.py", "tests/vllm/test_gateway.py"
ELSEWHERE = {
    "stop strings, n, best_of": (_GATEWAY, "test_the_best_of_several_is_the_likeliest_with_drafts_and_without"),
    "a client's prediction": ("tests/vllm/test_lookups.py", "test_a_prediction_is_used_and_changes_no_text"),
    "tools": (_GATEWAY, "test_calls_of_tools_are_the_same_with_drafts_and_are_what_their_schemas_say"),
    "receipts": (_FLEET, "test_a_receipt_names_the_targets_revision_and_the_answer_is_said_again"),
    "samples": ("tests/vllm/test_samples.py", "test_a_sample_has_the_text_and_the_likeliest_tokens_of_transformers"),
    "what an operator sets of a tenant": (_FLEET, "test_what_an_operator_says_holds_for_a_running_request"),
    "failover": (
        "tests/vllm/test_faults.py",
        "test_texts_of_a_target_that_is_killed_continue_on_another_of_vllm_and_of_our_own_engine",
    ),
}
"""Of docs/vllm.md; tests/vllm/test_options.py has the other rows as its cases."""


def test_each_row_of_a_target_has_a_test() -> None:
    page = (_ROOT / "docs/vllm.md").read_text()
    rows = re.findall(r"^\| (.+?) \|", page.partition("| option |")[2].partition("\n\n")[0], re.MULTILINE)[1:]
    cases = (_ROOT / "tests/vllm/test_options.py").read_text()
    assert len(rows) == len(set(rows)) > len(ELSEWHERE)
    for row in rows:
        file, name = ELSEWHERE.get(row, ("tests/vllm/test_options.py", "test_an_option_does_what_the_table_says"))
        assert re.search(rf"def {name}\(", (_ROOT / file).read_text()), (file, name)
        assert row in ELSEWHERE or f'    "{row}": ' in cases, row
    assert set(ELSEWHERE) <= set(rows)


def test_each_row_of_the_plugin_has_a_test() -> None:
    page = (_ROOT / "docs/bring-your-vllm.md").read_text()
    table = page.partition("## What works")[2].partition("| | |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (.+?) \|", table, re.MULTILINE) == list(ROWS)
    for file, name in ROWS.values():
        assert re.search(rf"def {name}\(", (_ROOT / file).read_text()), (file, name)


def test_the_commands_that_start_a_draft_are_ones_that_it_takes() -> None:
    page = (_ROOT / "docs/bring-your-vllm.md").read_text()
    commands = re.findall(r"^ *outrider draft (.+)$", page, re.MULTILINE)
    assert commands
    for command in commands:
        config = parse_arguments(shlex.split(command))
        assert config.engine.device == "cuda" and _is_named(config.model)
    table = page.partition("| your model | a draft of its family |")[2].partition("\n\n")[0]
    drafts = re.findall(r"`(hf://[^`]+)`", table)
    assert len(drafts) >= 3 and all(map(_is_named, drafts))


def _is_named(model: str) -> bool:
    return model in KNOWN_MODELS or hub_model(model) is not None
