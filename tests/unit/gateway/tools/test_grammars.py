"""Grammars made in processes of their own: the same as here, and what takes too much takes nothing of this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from outrider.errors import InvalidRequest
from outrider.gateway.tokenizer.model import ModelTokenizer, Parsers
from outrider.gateway.tools.grammars import GrammarMaker
from outrider.gateway.tools.parsers.reasoning import Thought
from outrider.gateway.tools.structured import Grammatical, Structured
from outrider.gateway.tools.tool_grammar import FreeCalls, after_thought
from outrider.gateway.tools.tools import ToolUse
from outrider.runtime.bounded import BoundedProcess, OutOfBounds

from tests.integration.gateway.scripted_router import tiny_tokenizer_bytes
from tests.unit.gateway.tools import test_thought_grammar

pytest.importorskip("llguidance")

ASKED: list[Grammatical] = [asked for asked, _, _ in test_thought_grammar.ASKED]


def patterns(count: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f"(.|\\n)*a.{{{number}}}"} for number in range(count)]}


# Python's own search for a name goes back and forth.
BACKTRACKING = {"propertyNames": {"pattern": "^(a+)+$"}, "properties": {"a" * 40 + "!": {}}}
HOSTILE = [
    Structured("json_schema", BACKTRACKING, "its.name"),
    Structured("json_schema", patterns(40), "its.name"),
    Structured("json_schema", {"properties": {"a": patterns(30)}}, "its.name", strict=True),
    FreeCalls(ToolUse((test_thought_grammar.TOOL,)), Structured("json_schema", patterns(40), "its.name"), "its.name"),
]


PLAIN = json.dumps({"text": "x", "error": "", "field": None}).encode()


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.parse(tiny_tokenizer_bytes("", ("<think>", "</think>")), Parsers(reasoning=True))


@pytest.fixture
def maker() -> Iterator[GrammarMaker]:
    maker = GrammarMaker()
    yield maker
    maker.close()


@pytest.mark.parametrize("thought", Thought)
async def test_they_are_those_that_would_be_made_here(
    maker: GrammarMaker, tokenizer: ModelTokenizer, thought: Thought
) -> None:
    for asked in ASKED:
        expected = after_thought(asked.to_grammar(tokenizer), tokenizer, thought)
        assert await maker.make(asked, tokenizer, thought, "a") == expected
        assert await maker.make(asked, tokenizer, thought, "b") == expected


async def test_a_tenant_does_not_learn_that_another_one_asked_the_same(
    maker: GrammarMaker, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is remembered comes a hundred times as soon."""
    asked = list[bytes]()

    def ask(process: BoundedProcess, question: bytes) -> bytes:
        asked.append(question)
        return PLAIN

    monkeypatch.setattr(BoundedProcess, "ask", ask)
    for tenant in ("a", "a", "b", "b"):
        await maker.make(ASKED[0], tokenizer, Thought.NONE, tenant)
    assert len(asked) == 2


async def test_faults_have_their_field_each_time(maker: GrammarMaker, tokenizer: ModelTokenizer) -> None:
    for value in ("a(b", "a(b"):
        with pytest.raises(InvalidRequest) as refused:
            await maker.make(Structured("regex", value, "its.name"), tokenizer, Thought.NONE, "")
        assert refused.value.field == "its.name"


async def test_an_answer_is_forgotten_after_a_while(
    maker: GrammarMaker, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.gateway.tools.grammars._KEPT_S", 0.01)
    await maker.make(ASKED[0], tokenizer, Thought.NONE, "a")
    async with asyncio.timeout(60):
        while maker._answers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_verdict_on_time_is_its_tenants_alone(
    maker: GrammarMaker, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, questions = ASKED[1], list[bytes]()

    def slow(process: BoundedProcess, question: bytes) -> bytes:
        questions.append(question)
        raise OutOfBounds("it takes more than 2 s of processor time")

    with monkeypatch.context() as patch:
        patch.setattr(BoundedProcess, "ask", slow)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="too much time"):
                await maker.make(asked, tokenizer, Thought.NONE, "a")
    assert len(questions) == 1
    assert await maker.make(asked, tokenizer, Thought.NONE, "b") == asked.to_grammar(tokenizer)


@pytest.mark.parametrize(
    "number", [0, 1, *(pytest.param(number, marks=pytest.mark.slow) for number in range(2, len(HOSTILE)))]
)
async def test_what_takes_too_much_to_read_is_refused_and_takes_nothing_of_this_process(
    maker: GrammarMaker, tokenizer: ModelTokenizer, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.gateway.tools.grammars._CPU_S", 0.2)
    before = psutil.Process().memory_info().rss
    with pytest.raises(InvalidRequest) as refused:
        await maker.make(HOSTILE[number], tokenizer, Thought.NONE, "hostile")
    assert refused.value.field == "its.name" and len(json.dumps(refused.value.message)) < 2000
    assert psutil.Process().memory_info().rss - before < 32 << 20
    assert await maker.make(ASKED[0], tokenizer, Thought.NONE, "hostile") == ASKED[0].to_grammar(tokenizer)
