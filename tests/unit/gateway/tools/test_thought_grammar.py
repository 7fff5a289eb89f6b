"""Grammars for answers that a thought goes before: where they begin, whether its marks are tokens or text."""

from __future__ import annotations

from typing import Any

import pytest
from outrider.gateway.tokenizer.model import ModelTokenizer, Parsers
from outrider.gateway.tools.parsers.reasoning import Thought
from outrider.gateway.tools.structured import Grammatical, Structured
from outrider.gateway.tools.tool_grammar import FreeCalls, after_thought
from outrider.gateway.tools.tools import ToolUse

from tests.integration.gateway.scripted_router import tiny_tokenizer_bytes

llguidance = pytest.importorskip("llguidance")

SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ASKED: list[tuple[Grammatical, str, str]] = [
    (Structured("json_schema", SCHEMA, "x"), '{"a":1}', '{"a":"b"}'),
    (Structured("regex", "a+", "x"), "aa", "b"),
    (Structured("choice", ["yes", "no"], "x"), "yes", "maybe"),
    (Structured("grammar", 'start: "a" B\nB: /b+/', "x"), "abb", "ba"),
    (FreeCalls(ToolUse((TOOL,), strict=frozenset("f")), None, "tools"), f"Well. {CALL}", CALL.replace("1", '"b"')),
    (FreeCalls(ToolUse((TOOL,)), Structured("json_schema", SCHEMA, "x"), "x"), CALL, "Well."),
]


def taken(tokenizer: ModelTokenizer, grammar: str, text: str) -> bool:
    """Whether an answer may be this text, whole."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(tokenizer.tokenizer.to_str()), grammar, log_level=0)
    return bool(matcher.consume_tokens(tokenizer.encode_plain(text)) and matcher.is_accepting())


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked[1][:5])
@pytest.mark.parametrize("added", [(), MARKS], ids=["text", "tokens"])
def test_what_is_asked_begins_after_the_thought(asked: tuple[Grammatical, str, str], added: tuple[str, ...]) -> None:
    tokenizer = ModelTokenizer.parse(tiny_tokenizer_bytes("", added), Parsers(reasoning=True))
    structured, good, bad = asked
    grammar = structured.to_grammar(tokenizer)
    opened, free = (after_thought(grammar, tokenizer, thought) for thought in (Thought.OPEN, Thought.FREE))
    assert after_thought(grammar, tokenizer, Thought.NONE) == grammar
    thought = 'I may say {"a": \n' + (" or <tool_call>" if added else "")
    assert taken(tokenizer, opened, f"{thought}</think>\n\n{good}")
    assert taken(tokenizer, free, f"<think>{thought}</think>\n\n{good}")
    assert taken(tokenizer, free, good)
    for grammar, text in (
        (opened, f"{thought}</think>{bad}"),
        (free, f"<think>{thought}</think>{bad}"),
        (free, bad),
        (opened, thought),
    ):
        assert not taken(tokenizer, grammar, text), text


@pytest.mark.parametrize(
    ("prompt", "thought"),
    [("a<think>\n", Thought.OPEN), ("a<think>\n\n</think>\n\n", Thought.NONE), ("a", Thought.FREE)],
)
def test_a_prompt_tells_whether_a_thought_is_open(prompt: str, thought: Thought) -> None:
    thinking = ModelTokenizer.parse(tiny_tokenizer_bytes("", MARKS), Parsers(reasoning=True))
    assert thinking.thought_after(thinking.encode_plain(prompt)) is thought
    other = ModelTokenizer.parse(tiny_tokenizer_bytes("", MARKS))
    assert other.thought_after(other.encode_plain(prompt)) is Thought.NONE
