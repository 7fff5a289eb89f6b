"""What the gateway's HTTP routes answer, as JSON schemas for the OpenAPI document.

Closed: a field that an answer has and a schema has not is found where real answers are held against them.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT, _WHOLE, _NUMBER, _FLAG = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


_LOGPROB = {"token": _TEXT, "logprob": _NUMBER, "bytes": _array(_WHOLE)}
_CALL = _object({"id": _TEXT, "type": _one_of("function"), "function": _object({"name": _TEXT, "arguments": _TEXT})})
# The name and the id come with a call's first delta.
_CALL_DELTA = _object(
    {"index": _WHOLE, "function": _object({"arguments": _TEXT}, {"name": _TEXT})},
    {"id": _TEXT, "type": _one_of("function")},
)
_HEAD = {"id": _TEXT, "created": _WHOLE, "model": _TEXT}
_PROMPT_LOGPROBS = _array(
    _or_null(_map(_object({"logprob": _NUMBER, "rank": _or_null(_WHOLE), "decoded_token": _TEXT})))
)
_METRICS = {"metrics": _or_null(_ref("Metrics"))}
_RECEIPT = {"receipt": _TEXT}
_COUNTS = (
    *("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "num_verified_tokens", "num_spec_tokens"),
    *("num_steps", "num_dropped_draft_tokens", "num_target_failovers", "num_revision_changes", "num_draft_failovers"),
    *("num_router_failovers", "num_on_as_auto"),
)
_TIMES = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")

_FINISHED = _one_of("stop", "length", "tool_calls")
_COMPLETION_CHOICE = {
    "index": _WHOLE,
    "text": _TEXT,
    "logprobs": _or_null(_ref("CompletionLogprobs")),
}
_CHAT_CHOICE = {"index": _WHOLE, "logprobs": _or_null(_ref("ChatLogprobs"))}
_DELTA = _object(
    {},
    {
        "role": _one_of("assistant"),
        "content": _TEXT,
        "reasoning_content": _TEXT,
        "tool_calls": _array(_CALL_DELTA),
    },
)
_MESSAGE = _object(
    {"role": _one_of("assistant"), "content": _or_null(_TEXT), "refusal": {"type": "null"}},
    {"reasoning_content": _TEXT, "tool_calls": _array(_CALL)},
)

_STATUS = _one_of("in_progress", "completed", "incomplete")
_OUTPUT_TEXT = _object(
    {"type": _one_of("output_text"), "text": _TEXT, "annotations": _array({}), "logprobs": _array({})}
)
_REASONING_TEXT = _object({"type": _one_of("reasoning_text"), "text": _TEXT})
_ITEM = {
    "anyOf": [
        _object(
            {
                "id": _TEXT,
                "type": _one_of("message"),
                "status": _STATUS,
                "role": _one_of("assistant"),
                "content": _array(_OUTPUT_TEXT),
            }
        ),
        _object(
            {
                "id": _TEXT,
                "type": _one_of("reasoning"),
                "status": _STATUS,
                "summary": _array({}),
                "content": _array(_REASONING_TEXT),
            }
        ),
        _object(
            {
                "id": _TEXT,
                "type": _one_of("function_call"),
                "status": _STATUS,
                "call_id": _TEXT,
                "name": _TEXT,
                "arguments": _TEXT,
            }
        ),
    ]
}


def _event(name: str, fields: Schema) -> Schema:
    return _object({"type": _one_of(name), "sequence_number": _WHOLE, **fields})


_ITEM_PLACE = {"item_id": _TEXT, "output_index": _WHOLE}
_PLACE = {**_ITEM_PLACE, "content_index": _WHOLE}
_MORE = {"logprobs": _array({})}
_EVENTS = [
    *(
        _event(f"response.{name}", {"response": _ref("Response")})
        for name in ("created", "in_progress", "completed", "incomplete")
    ),
    *(
        _event(f"response.output_item.{name}", {"output_index": _WHOLE, "item": _ref("OutputItem")})
        for name in ("added", "done")
    ),
    *(_event(f"response.content_part.{name}", {**_PLACE, "part": _OUTPUT_TEXT}) for name in ("added", "done")),
    _event("response.output_text.delta", {**_PLACE, "delta": _TEXT, **_MORE}),
    _event("response.output_text.done", {**_PLACE, "text": _TEXT, **_MORE}),
    _event("response.reasoning_text.delta", {**_PLACE, "delta": _TEXT}),
    _event("response.reasoning_text.done", {**_PLACE, "text": _TEXT}),
    _event("response.function_call_arguments.delta", {**_ITEM_PLACE, "delta": _TEXT}),
    _event("response.function_call_arguments.done", {**_ITEM_PLACE, "arguments": _TEXT}),
    _event("error", {"message": _TEXT, "code": _or_null(_TEXT), "param": _or_null(_TEXT)}),
]

_THINKING = _object({"type": _one_of("thinking"), "thinking": _TEXT, "signature": _TEXT})
_TEXT_BLOCK = _object({"type": _one_of("text"), "text": _TEXT})
_TOOL_USE = _object({"type": _one_of("tool_use"), "id": _TEXT, "name": _TEXT, "input": {"type": "object"}})
_MESSAGE_BLOCK: Schema = {"anyOf": [_THINKING, _TEXT_BLOCK, _TOOL_USE]}
_MESSAGE_END = {
    "stop_reason": _or_null(
        _one_of("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded")
    ),
    "stop_sequence": _or_null(_TEXT),
}
_MESSAGE_USAGE = {"usage": _ref("MessageUsage")}
_MESSAGE_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
_MESSAGE_DELTA: Schema = {
    "anyOf": [
        _object({"type": _one_of(kind), name: _TEXT})
        for kind, name in {**_MESSAGE_DELTAS, "signature_delta": "signature"}.items()
    ]
}


def _message_event(name: str, fields: Schema, optional: Schema | None = None) -> Schema:
    return _object({"type": _one_of(name), **fields}, optional)


_MESSAGE_EVENTS = [
    _message_event("message_start", {"message": _ref("Message")}),
    _message_event("content_block_start", {"index": _WHOLE, "content_block": _MESSAGE_BLOCK}),
    _message_event("ping", {}),
    _message_event("content_block_delta", {"index": _WHOLE, "delta": _MESSAGE_DELTA}),
    _message_event("content_block_stop", {"index": _WHOLE}),
    _message_event("message_delta", {"delta": _object(_MESSAGE_END), **_MESSAGE_USAGE}, {**_METRICS, **_RECEIPT}),
    _message_event("message_stop", {}),
    _message_event("error", {"error": _object({"type": _TEXT, "message": _TEXT})}),
]

SCHEMAS: dict[str, Schema] = {
    "Usage": _object(
        {
            **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _WHOLE),
            "prompt_tokens_details": _object({"cached_tokens": _WHOLE}),
        },
        {
            "completion_tokens_details": _object(
                dict.fromkeys(("accepted_prediction_tokens", "rejected_prediction_tokens", "reasoning_tokens"), _WHOLE)
            )
        },
    ),
    "Metrics": _object(
        {
            **dict.fromkeys(_TIMES, _or_null(_NUMBER)),
            "speculative_decoding": _object(
                {
                    **dict.fromkeys(("mean_acceptance_length", "draft_acceptance_rate"), _or_null(_NUMBER)),
                    "acceptance_histogram": _array(_WHOLE),
                    "acceptance_histogram_by_draft_length": _map(_array(_WHOLE)),
                    **dict.fromkeys(_COUNTS, _WHOLE),
                }
            ),
        }
    ),
    "CompletionLogprobs": _object(
        {
            "tokens": _array(_TEXT),
            "token_logprobs": _array(_or_null(_NUMBER)),
            "top_logprobs": _array(_or_null(_map(_NUMBER))),
            "text_offset": _array(_WHOLE),
        }
    ),
    "ChatLogprobs": _object(
        {
            "content": _array(_object({**_LOGPROB, "top_logprobs": _array(_object(_LOGPROB))})),
            "refusal": {"type": "null"},
        }
    ),
    "Completion": _object(
        {
            **_HEAD,
            "object": _one_of("text_completion"),
            "choices": _array(
                _object(
                    {**_COMPLETION_CHOICE, "finish_reason": _FINISHED},
                    {"prompt_logprobs": _PROMPT_LOGPROBS, **_RECEIPT},
                )
            ),
            "usage": _ref("Usage"),
        },
        _METRICS,
    ),
    "CompletionChunk": _object(
        {
            **_HEAD,
            "object": _one_of("text_completion"),
            "choices": _array(_object({**_COMPLETION_CHOICE, "finish_reason": _or_null(_FINISHED)}, _RECEIPT)),
        },
        {"usage": _or_null(_ref("Usage")), **_METRICS},
    ),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "object": _one_of("chat.completion"),
            "choices": _array(_object({**_CHAT_CHOICE, "message": _MESSAGE, "finish_reason": _FINISHED}, _RECEIPT)),
            "usage": _ref("Usage"),
        },
        {"prompt_logprobs": _PROMPT_LOGPROBS, **_METRICS},
    ),
    "ChatCompletionChunk": _object(
        {
            **_HEAD,
            "object": _one_of("chat.completion.chunk"),
            "choices": _array(
                _object({**_CHAT_CHOICE, "delta": _DELTA, "finish_reason": _or_null(_FINISHED)}, _RECEIPT)
            ),
        },
        {"usage": _or_null(_ref("Usage")), **_METRICS},
    ),
    "OutputItem": _ITEM,
    "Response": _object(
        {
            "id": _TEXT,
            "object": _one_of("response"),
            "created_at": _WHOLE,
            "status": _STATUS,
            "model": _TEXT,
            "background": _FLAG,
            "error": {"type": "null"},
            "instructions": _or_null(_TEXT),
            "store": _FLAG,
            "incomplete_details": _or_null(_object({"reason": _one_of("max_output_tokens")})),
            "max_output_tokens": _or_null(_WHOLE),
            "output": _array(_ref("OutputItem")),
            "parallel_tool_calls": _FLAG,
            "previous_response_id": {"type": "null"},
            "reasoning": _object({"effort": {"type": "null"}, "summary": {"type": "null"}}),
            "temperature": _NUMBER,
            "top_p": _NUMBER,
            "truncation": _one_of("disabled"),
            "text": _object({"format": {"type": "object"}}),
            "tool_choice": {"type": ["string", "object"]},
            "tools": _array({"type": "object"}),
            "usage": _or_null(_ref("ResponseUsage")),
            "user": _or_null(_TEXT),
            "metadata": _map(_TEXT),
        },
        {**_METRICS, **_RECEIPT},
    ),
    "ResponseUsage": _object(
        {
            **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), _WHOLE),
            "input_tokens_details": _object({"cached_tokens": _WHOLE, "cache_write_tokens": _WHOLE}),
            "output_tokens_details": _object({"reasoning_tokens": _WHOLE}),
        }
    ),
    "ResponseEvent": {"anyOf": _EVENTS},
    "Message": _object(
        {
            "id": _TEXT,
            "type": _one_of("message"),
            "role": _one_of("assistant"),
            "model": _TEXT,
            "content": _array(_MESSAGE_BLOCK),
            **_MESSAGE_END,
            **_MESSAGE_USAGE,
        },
        {**_METRICS, **_RECEIPT},
    ),
    "MessageUsage": _object(
        dict.fromkeys(
            ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"), _WHOLE
        )
    ),
    "MessageEvent": {"anyOf": _MESSAGE_EVENTS},
    "MessageTokens": _object({"input_tokens": _WHOLE}),
    "ReceiptKey": _object({"pem": _TEXT}),
    "Tokenized": _object(
        {
            "count": _WHOLE,
            "max_model_len": _WHOLE,
            "tokens": _array(_WHOLE),
            "token_strs": _or_null(_array(_TEXT)),
        }
    ),
    "Detokenized": _object({"prompt": _TEXT}),
    "Version": _object({"version": _TEXT}),
    "Model": _object(
        {
            "id": _TEXT,
            "object": _one_of("model"),
            "created": _WHOLE,
            "owned_by": _one_of("outrider"),
            "max_model_len": _WHOLE,
            "sampling_defaults": _map({"type": "number"}),
        }
    ),
    "Models": _object({"object": _one_of("list"), "data": _array(_ref("Model"))}),
    "Health": _object({"status": _TEXT, "models": _array(_TEXT), "awaited": _array(_TEXT), "running": _WHOLE}),
}

WHOLE: dict[str, str] = {
    "/v1/completions": "Completion",
    "/v1/chat/completions": "ChatCompletion",
    "/v1/responses": "Response",
    "/v1/messages": "Message",
    "/v1/messages/count_tokens": "MessageTokens",
    "/tokenize": "Tokenized",
    "/detokenize": "Detokenized",
    "/version": "Version",
    "/v1/receipt-key": "ReceiptKey",
    "/v1/models": "Models",
    "/v1/models/{name:path}": "Model",
    "/health": "Health",
}
"""The schema of a route's answer."""

STREAMED: dict[str, str] = {
    "/v1/completions": "CompletionChunk",
    "/v1/chat/completions": "ChatCompletionChunk",
    "/v1/responses": "ResponseEvent",
    "/v1/messages": "MessageEvent",
}
"""With `stream`: that of the data of one server-sent event. An error in mid-stream is an Error, or of /v1/responses
and /v1/messages an event of its own."""
