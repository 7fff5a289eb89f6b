"""Any body of a request is either understood or refused by the field at fault."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outrider.errors import InvalidRequest
from outrider.gateway.http.anthropic.request import MessagesRequest
from outrider.gateway.http.errors import HttpError
from outrider.gateway.http.openai.responses_request import ResponsesRequest
from outrider.gateway.http.openai.schemas import ChatRequest, CompletionRequest, GenerationBody, parse
from outrider.gateway.http.tokens import DetokenizeRequest, TokenizeRequest
from pydantic import ValidationError

MODEL, USER = "model", {"role": "user", "content": "a"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
BASES: dict[type[GenerationBody], dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatRequest: {"messages": [USER]},
    ResponsesRequest: {"input": "a"},
    MessagesRequest: {"messages": [USER], "max_tokens": 5},
}
names = st.sampled_from([name for kind in BASES for name in (*kind.model_fields, *kind.unserved)])


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([*BASES]), st.dictionaries(names, json_values, max_size=4))
def test_any_json_is_either_understood_or_refused_by_name(kind: type[GenerationBody], fields: dict[str, Any]) -> None:
    try:
        generation = parse(kind, json.dumps({"model": MODEL, **BASES[kind], **fields}).encode()).generations()[0][0]
    except HttpError as error:
        assert error.status == 400
        assert error.param is not None or error.code == "invalid_json"
    except InvalidRequest as error:
        assert error.field
    else:
        assert generation.options.temperature >= 0
        assert generation.options.top_p > 0


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_without_a_crash(body: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        parse(CompletionRequest, body)
    assert caught.value.status == 400


@pytest.mark.parametrize("faults", [[{}] * 2_000, {str(i): {} for i in range(2_000)}], ids=["list", "object"])
@pytest.mark.parametrize("kind", [*BASES, TokenizeRequest, DetokenizeRequest])
def test_of_many_faults_in_one_field_few_are_described(kind: Any, faults: Any) -> None:
    for name in kind.model_fields:
        try:
            parse(kind, json.dumps({"model": MODEL, **BASES.get(kind, {}), name: faults}).encode())
        except HttpError as error:
            assert not isinstance(error.__cause__, ValidationError) or error.__cause__.error_count() < 100, name


def test_blocks_of_one_turn_are_read_in_proportion_to_their_number() -> None:
    def took_s(number: int) -> float:
        called = [{"type": "tool_use", "id": "c", "name": "f", "input": {}}] * number
        messages = [USER, {"role": "assistant", "content": called}, USER]
        body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 5}).encode()
        # The collector's work is in proportion to all that this process holds.
        gc.disable()
        before_s = time.process_time()
        with contextlib.suppress(InvalidRequest):
            parse(MessagesRequest, body).generations()
        took_s = time.process_time() - before_s
        gc.enable()
        return took_s

    # 16 times, and not 256 times.
    assert took_s(64_000) < 64 * min(took_s(4_000) for _ in range(3))


def test_texts_of_a_body_are_kept_in_no_cache() -> None:
    body = json.dumps({"model": MODEL, "prompt": "a short text"}).encode()
    first, second = (parse(CompletionRequest, body).prompt for _ in range(2))
    assert first == second and first is not second
