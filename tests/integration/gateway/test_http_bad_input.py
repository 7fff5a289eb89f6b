"""Whatever a client sends, it gets one clear error that names the field, and no router hears of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from outrider.gateway.config import GatewayLimits
from outrider.gateway.http.openai.schemas import CompletionRequest

from tests.integration.gateway.scripted_router import CONTEXT, MODEL, VOCAB, ScriptedRouter, saying

USER = {"role": "user", "content": "a"}
NAN = float("nan")


def _tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a"} | function}


TOOL = _tool()


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """A tool_choice."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def _calling(function: dict[str, Any], **more: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call | more]}


# What is sent, and the field that has to be named.
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"model": 3}, "model"),
    ({"model": None}, "model"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1, VOCAB]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [5] * CONTEXT + [VOCAB]}, "prompt"),
    ({"prompt": "a" * 600}, "prompt"),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e39}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": 1e-60}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"seed": -2}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": CONTEXT}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": "b" * 257}, "stop[0]"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"stop_token_ids": [""] * 65}, "stop_token_ids"),
    ({"speculation": "maybe"}, "speculation"),
    ({"max_draft_tokens": -1}, "max_draft_tokens"),
    ({"include_metrics": "yes"}, "include_metrics"),
    ({"stream": 1}, "stream"),
    ({"stream": False, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"every": 1}}, "stream_options.every"),
    ({"stream": True, "stream_options": {f"{i}": 1 for i in range(17)}}, "stream_options"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {f"{i}": 1 for i in range(17)}}, "metadata"),
    ({"temprature": 1}, "temprature"),
    ({"n": 129}, "n"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"echo": 1}, "echo"),
    ({"num_speculative_tokens": 65}, "num_speculative_tokens"),
    ({"num_speculative_tokens": 1, "max_draft_tokens": 1}, "num_speculative_tokens"),
    ({"disable_spec_decode": True, "speculation": "on"}, "disable_spec_decode"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a", "b"], "n": 65}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"bad_words": ["a", " "]}, "bad_words[1]"),
    ({"bad_words": ["a" * 257]}, "bad_words[0]"),
    ({"bad_words": ["a" * 65]}, "bad_words[0]"),
    ({"bad_words": ["a"] * 257}, "bad_words"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[" * 3000}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": {}, "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "function", "content": "a"}]}, "messages[1].name"),
    ({"messages": [USER, {"role": "other", "content": "a"}]}, "messages[1].role"),
    ({"messages": [{**USER, "function_call": {"name": "a"}}]}, "messages[0].function_call"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "a", "arguments": 1}}]},
        "messages[0].function_call.arguments",
    ),
    ({"messages": [_calling({"name": "a"}) | {"function_call": {"name": "a"}}]}, "messages[0].function_call"),
    ({"messages": [USER, {"role": "tool", "content": "a"}]}, "messages[1].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{**USER, "name": 5}]}, "messages[0].name"),
    ({"messages": [{**USER, "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"messages": [{**USER, "contnet": "good"}]}, "messages[0].contnet"),
    ({"messages": [{**USER, "toolCalls": []}]}, "messages[0].toolCalls"),
    ({"messages": [{**USER, **{f"a{i}": 1 for i in range(64)}}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]}, "messages[0].content[0].txt"),
    ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [_calling({})]}, "messages[0].tool_calls[0].function"),
    ({"messages": [_calling({"name": "a"}, type="custom")]}, "messages[0].tool_calls[0]"),
    ({"messages": [_calling({"name": "a"}, id=3)]}, "messages[0].tool_calls[0].id"),
    ({"messages": [_calling({"name": "a"}, functions={})]}, "messages[0].tool_calls[0].functions"),
    ({"messages": [_calling({"name": "a", "arguments": 1})]}, "messages[0].tool_calls[0].function.arguments"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
    ({"messages": [USER] * 1025}, "messages"),
    ({"messages": [1] * 1025}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": CONTEXT}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
    ({"tools": "all"}, "tools"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": ["weather"]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"function": {"name": "a"}}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameter": {}}}]}, "tools[0].function.parameter"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [TOOL], "tool_choice": allowed("some", "a")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools"),
    ({"tools": [TOOL], "tool_choice": allowed("auto", "b")}, "tool_choice.allowed_tools.tools[0].function.name"),
    ({"tool_choice": allowed("auto", "b")}, "tool_choice.allowed_tools.tools[0].function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"functions": [{}]}, "functions[0]"),
    ({"functions": [{"name": "a", "parameters": []}]}, "functions[0].parameters"),
    ({"functions": [{"name": "a"}, {"name": "a"}]}, "functions[1].name"),
    ({"functions": [{"name": "a"}] * 129}, "functions"),
    ({"functions": [{"name": "a"}], "tools": [TOOL]}, "functions"),
    ({"functions": [{"name": "a"}], "function_call": "required"}, "function_call"),
    ({"functions": [{"name": "a"}], "function_call": {"name": "b"}}, "function_call.name"),
    ({"function_call": {"name": "b"}}, "function_call"),
    ({"structured_outputs": {"json_object": True}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"prediction": "a"}, "prediction"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": "a", "x": 1}}, "prediction.x"),
    ({"prediction": {"type": "content", "content": "a" * 600}}, "prediction"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"reasoning": {"efort": "low"}}, "reasoning.efort"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": [[[[[[[[1]]]]]]]]}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "a" * 20_000}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {f"a{i}": 1 for i in range(65)}}, "chat_template_kwargs"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"min_tokens": CONTEXT}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"prompt": "a"}, "prompt"),
]
HARMLESS: dict[str, Any] = {
    "n": 1,
    "user": "someone",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "request_id": "mine",
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "stop": None,
    "safety_identifier": "x",
    "top_k": -1,
    "seed": -1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "stream": True,
    "stream_options": {"continuous_usage_stats": True},
}


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter(saying([40, 2]))


@pytest.fixture
def options() -> dict[str, Any]:
    return {"limits": GatewayLimits(max_body_bytes=100_000, body_timeout_s=0.5)}


async def post(http: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await http.post(path, content=content, headers={"content-type": "application/json"})


def check_error(answer: httpx.Response, status: int, param: str | None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or param in error["message"] or status == 404


async def test_every_bad_completion_is_refused_by_name_before_a_stream_begins(
    http: httpx.AsyncClient, router: ScriptedRouter
) -> None:
    asked = {"model": MODEL, "prompt": "a", "stream": True}
    for fields, param in COMPLETIONS:
        check_error(await post(http, "/v1/completions", asked | fields), 400, param)
    for model in ("nobody", "../../etc"):
        check_error(await post(http, "/v1/completions", asked | {"model": model}), 404, "model")
    assert router.requests == []


async def test_a_name_that_the_client_made_up_is_not_sent_back_at_length(http: httpx.AsyncClient) -> None:
    answer = await post(http, "/v1/completions", {"model": MODEL, "prompt": "a", "x" * 90_000: 1})
    check_error(answer, 400, "x" * 200)


async def test_a_field_that_is_missing_is_named(http: httpx.AsyncClient) -> None:
    check_error(await post(http, "/v1/completions", {"prompt": "a"}), 400, "model")
    check_error(await post(http, "/v1/completions", {"model": MODEL}), 400, "prompt")
    check_error(await post(http, "/v1/chat/completions", {"model": MODEL}), 400, "messages")


async def test_every_bad_chat_is_refused_by_name(http: httpx.AsyncClient, router: ScriptedRouter) -> None:
    for fields, param in CHATS:
        body = {"model": MODEL, "messages": [USER], **fields}
        check_error(await post(http, "/v1/chat/completions", body), 400, param)
    assert router.requests == []


async def test_a_refusal_of_something_known_says_it_is_unsupported(http: httpx.AsyncClient) -> None:
    answer = await post(http, "/v1/completions", {"model": MODEL, "prompt": "a", "suffix": "b"})
    assert answer.json()["error"]["code"] == "unsupported_parameter"
    answer = await post(http, "/v1/completions", {"model": MODEL, "prompt": "a", "temprature": 3})
    assert answer.json()["error"]["code"] == "unknown_parameter"


async def test_options_that_ask_for_nothing_special_are_accepted(http: httpx.AsyncClient) -> None:
    completion = {**HARMLESS, "best_of": 1, "echo": False, "suffix": None, "logprobs": None, "prompt": ["a"]}
    assert (await post(http, "/v1/completions", {"model": MODEL, **completion})).status_code == 200
    chat = {
        **HARMLESS,
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "logprobs": False,
        "top_logprobs": None,
        "modalities": ["text"],
        "add_generation_prompt": True,
        "echo": False,
        "best_of": 1,
        "include_reasoning": True,
        "reasoning_effort": "high",
        "reasoning": {"effort": "none", "summary": "auto", "max_tokens": 5},
        "verbosity": "low",
        "prompt_cache_options": {"mode": "implicit"},
        "prompt_cache_retention": "24h",
        "chat_template_kwargs": {"enable_thinking": False, "self": 1},
        "messages": [USER, {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None}, USER],
    }
    assert (await post(http, "/v1/chat/completions", {"model": MODEL, **chat})).status_code == 200


async def test_what_clients_add_inside_messages_and_tools_changes_nothing(
    http: httpx.AsyncClient, router: ScriptedRouter
) -> None:
    router.max_context_len = 4096
    call: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
    plain: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "d"}]},
    ]
    cached = {"cache_control": {"type": "ephemeral"}}
    added = [
        {**USER, "type": "text", "id": "1", "metadata": {}, **cached},
        {
            **plain[1],
            "provider_specific_fields": {"refusal": None},
            "annotations": [{}],
            "thinking_blocks": [],
            "tool_calls": [{**call, "provider_specific_fields": None, **cached, "index": 0}],
        },
        {**plain[2], "is_error": False, "content": [{"type": "text", "text": "d", "citations": None, **cached}]},
    ]
    for messages, one in ((plain, tool), (added, {**tool, **cached, "function": {"name": "f", "defer_loading": True}})):
        asked = {"model": MODEL, "messages": messages, "tools": [one], "max_tokens": 1}
        assert (await post(http, "/v1/chat/completions", asked)).status_code == 200
    assert router.requests[0].prompt_token_ids == router.requests[1].prompt_token_ids


async def test_a_field_that_is_null_was_not_given(http: httpx.AsyncClient) -> None:
    """Clients of other servers send all of their fields."""
    nulls = {"mm_processor_kwargs": None, "logits_processors": None, "tools": None, "max_tokens": None}
    formats = {"response_format": {"type": "text", "json_schema": None}}
    asked = {"model": MODEL, "messages": [USER], **nulls, **formats}
    assert (await post(http, "/v1/chat/completions", asked)).status_code == 200
    check_error(await post(http, "/v1/chat/completions", {**asked, "messages": None}), 400, "messages")


CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": ""}
SAME_MESSAGES = {
    "empty fields of other roles": (
        [USER | {"tool_calls": [], "tool_call_id": "", "reasoning_content": "", "refusal": "", "audio": {}}],
        [USER],
    ),
    "texts as parts": ([USER | {"content": ["a", {"type": "input_text", "text": "b"}]}], [USER | {"content": "ab"}]),
    "an answer of responses": (
        [USER, {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}],
        [USER, {"role": "assistant", "content": "a"}],
    ),
    "thinking in parts": (
        [
            USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}, {"type": "text", "text": "a"}]},
        ],
        [USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}],
    ),
    "empty reasoning": (
        [USER, {"role": "assistant", "content": "a", "reasoning": [], "function_call": None}],
        [USER, {"role": "assistant", "content": "a"}],
    ),
    "a call without type": ([USER, CALLING | {"tool_calls": [CALL | {"type": None}]}], [USER, CALLING]),
    "a call without arguments": (
        [USER, CALLING | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": None}}]}],
        [USER, CALLING],
    ),
    "no result": ([USER, CALLING, RESULT | {"content": None}], [USER, CALLING, RESULT]),
}


async def test_messages_in_the_forms_of_many_clients_are_the_same_prompt(
    http: httpx.AsyncClient, router: ScriptedRouter
) -> None:
    for form, both in SAME_MESSAGES.items():
        for messages in both:
            answer = await post(http, "/v1/chat/completions", {"model": MODEL, "messages": messages})
            assert answer.status_code == 200, answer.text
        first, second = (list(request.prompt_token_ids) for request in router.requests[-2:])
        assert first == second, form


async def test_what_was_refused_of_an_answer_is_told_to_the_model(
    http: httpx.AsyncClient, router: ScriptedRouter
) -> None:
    for answer in (
        {"content": "No."},
        {"content": None, "refusal": "No."},
        {"content": [{"type": "refusal", "refusal": "No."}]},
    ):
        messages = [USER, {"role": "assistant", **answer}, USER]
        assert (await post(http, "/v1/chat/completions", {"model": MODEL, "messages": messages})).status_code == 200
    first, *others = (list(request.prompt_token_ids) for request in router.requests)
    assert others == [first, first]


async def test_what_exceeds_the_context_is_refused_in_the_words_that_others_know(http: httpx.AsyncClient) -> None:
    far: Any = "a " * 40_000
    for path, asked, param, numbers in (
        ("completions", {"prompt": "a" * 600}, "prompt", "it has 600 tokens"),
        ("completions", {"prompt": [3] * 600}, "prompt", "it has 600 tokens"),
        # Tokenised, its tokens would be counted.
        ("completions", {"prompt": far}, "prompt", "it has at least"),
        ("chat/completions", {"messages": [USER | {"content": far}]}, "messages", "it has at least"),
        (
            "completions",
            {"prompt": [3] * 500, "max_tokens": 20},
            "max_tokens",
            "(500 in the messages, 20 in the completion)",
        ),
    ):
        answer = await post(http, f"/v1/{path}", {"model": MODEL, **asked})
        check_error(answer, 400, param)
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f"This model's maximum context length is {CONTEXT} tokens. However, " in error["message"]
        assert numbers in error["message"]


async def test_a_body_that_is_no_json_object_is_a_400(http: httpx.AsyncClient) -> None:
    deep = [b"[" * 50_000, b'{"a":' * 9000 + b"1"]
    for body in [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', *deep]:
        check_error(await post(http, "/v1/completions", body), 400, None)


async def test_a_body_over_the_limit_is_a_413_declared_or_not(http: httpx.AsyncClient) -> None:
    declared = await post(http, "/v1/completions", b'{"prompt":"' + b"a" * 200_000 + b'"}')
    check_error(declared, 413, None)

    async def undeclared() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 10_000

    headers = {"content-type": "application/json"}
    check_error(await http.post("/v1/completions", content=undeclared(), headers=headers), 413, None)


async def test_a_body_that_does_not_arrive_is_a_408(http: httpx.AsyncClient) -> None:
    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(0.8)

    headers = {"content-type": "application/json"}
    check_error(await http.post("/v1/completions", content=stuck(), headers=headers), 408, None)


async def test_other_content_types_paths_and_methods_get_openai_errors(http: httpx.AsyncClient) -> None:
    check_error(await http.post("/v1/completions", data={"prompt": "a"}), 415, "Content-Type")
    check_error(await http.get("/v1/completions"), 405, None)
    check_error(await http.get("/v1/nowhere"), 404, None)
    check_error(await post(http, "/v1/embeddings", {}), 404, None)


async def test_a_fault_of_ours_is_an_error_of_openai_s_shape(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(CompletionRequest, "generations", fail)
    answer = await post(http, "/v1/completions", {"model": MODEL, "prompt": "a"})
    check_error(answer, 500, None)
    assert answer.json()["error"]["type"] == "server_error"
