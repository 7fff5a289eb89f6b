"""Answers with random faults: text in is text out, unless it is a valid call to a declared tool.

The references read whole texts, with nothing but `json` and `ast`.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from outrider.gateway.generation.output import MessageParser
from outrider.gateway.tools.parsers.blocks import MarkedCalls
from outrider.gateway.tools.parsers.formats import FORMATS
from outrider.gateway.tools.parsers.json_calls import JsonCalls
from outrider.gateway.tools.parsers.reasoning import ReasoningParser
from outrider.gateway.tools.parsers.tool_calls import Delta, NoTools, Tools

TOOLS: Tools = {"sun": {}, "rain": {}}
SUN = '{"name": "sun", "arguments": {"city": "Z\\u00fcrich \\"}]<tool_call>", "days": [1, {"a": 2.5e1}]}}'
RAIN = '{"arguments": {}, "name": "rain"}'
ANSWERS = {
    "hermes": [
        f"Let me see.\n<tool_call>\n{SUN}\n</tool_call>\n<tool_call>\n{RAIN}\n</tool_call>\n",
        f"<tool_call>{SUN}</tool_call> Done, with </tool_call> and <tool_call> tags.",
        f"Use <tool_call> or `{{}}`: <tool_call>[{RAIN}, {SUN}]</tool_call>",
    ],
    "mistral": [
        f"Now [TOOL_CALLS][{SUN}, {RAIN}]",
        '[TOOL_CALLS]sun[ARGS]{"city": "a [TOOL_CALLS] b"}[TOOL_CALLS]rain[CALL_ID]x1[ARGS]{}',
        "Marks are [TOOL_CALLS] and [ARGS].",
    ],
    "llama3_json": [SUN.replace("arguments", "parameters"), f" {RAIN}; {SUN}", f"So:\n<|python_tag|>{SUN}"],
    "pythonic": ["[sun(city='Bern', days=[1, {'a': None}]), rain()]", "[1, 2]", "Say [sun()]"],
    "lfm2": ["So: <|tool_call_start|>[sun(city='Bern', days=(1, 2,)), rain()]<|tool_call_end|>Wait."],
    "olmo3": ["So:\n<function_calls>\nsun(city='Bern', days=[1, {'a': null}])\nrain()\n</function_calls>"],
    "qwen3_coder": [
        "So:\n<tool_call>\n<function=sun>\n<parameter=city>\nBern </parameter> or\n</parameter>\n<parameter=days>\n"
        "[1]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=rain>\n</function>\n</tool_call>"
    ],
    "seed_oss": ["<seed:tool_call><function=sun><parameter=city>Bern</parameter></function></seed:tool_call>"],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="sun">\n<parameter name="city">Bern</parameter>\n</invoke>\n'
        '<invoke name="rain">\n</invoke>\n</minimax:tool_call>'
    ],
    "glm45": [
        "So:\n<tool_call>sun\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>[1]</arg_value>\n</tool_call>\n<tool_call>rain\n</tool_call>"
    ],
    "granite": [f"<|tool_call|>[{SUN}, {RAIN}]", f"<tool_call>[{RAIN}]"],
    "phi4_mini_json": [f"functools[{SUN}, {RAIN}]", f"<|tool_call|>[{SUN}]<|/tool_call|>"],
    "nemotron_json": [f"So:<TOOLCALL>[{SUN}, {RAIN}]</TOOLCALL>"],
    "jamba": [f"So: <tool_calls>[{SUN}, {RAIN}]</tool_calls>"],
    "cohere_command": [
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "sun", "parameters": {"a": 1}}\n]<|END_ACTION|>'
    ],
    "deepseek_v3": [
        "So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>sun\n```json\n"
        '{"city": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>rain\n```json\n'
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "deepseek_v31": [
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>sun<｜tool▁sep｜>{"a": "<｜tool▁call▁end｜>"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>rain<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.sun:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
    ],
}
PIECES = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"),
    *('"', "'", "{", "}", "[", "]", ",", ":", ";", "\\", "\n", " ", "<", ">", "=", "(", ")", "/"),
    *("True", "null", "NaN", "1", "Alice", "sun", '"name"', '"arguments"', "{}", SUN, RAIN),
]
THOUGHTS = [
    "<think>\nHm. <b>\n</think>\n\nYes.\n",
    "Hm.\n</think>Yes, by <think>tags</think> such as <think>.",
    "</think>\n\nYes",
    "Yes.",
]


@pytest.fixture(params=[1_000, pytest.param(5_000, marks=pytest.mark.slow)])
def num_answers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def mutated(rng: random.Random, answers: list[str]) -> str:
    text = rng.choice(answers)
    for _ in range(rng.randint(1, 3)):
        at, end = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        end = min(end, at + rng.choice((1, 1, 1, 5, 100)))
        match rng.randrange(5):
            case 0:
                text = text[:at] + text[end:]
            case 1:
                text = text[:end] + text[at:]
            case 2 | 3:
                text = text[:at] + rng.choice(PIECES) + text[at:]
            case _:
                text = text[:end] if rng.random() < 0.2 else text[:at] + rng.choice(PIECES) + text[end:]
    return text


def pieces_of(rng: random.Random, text: str) -> list[str]:
    """The text, cut anywhere."""
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.choice((0, 1, 5, 40))))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def read(parser: MessageParser, pieces: list[str], *, cut: bool = False) -> Delta:
    return Delta.join([*map(parser.push, pieces), parser.finish(cut=cut)])


Calls = list[tuple[str, Any]]
_DECODER = json.JSONDecoder(parse_constant=lambda constant: [][0])


def objects_in(text: str) -> list[Any]:
    """The JSON objects that the text consists of, in a list or not."""
    text = text.strip(" \t\r\n")
    if text.startswith("["):
        return [*_DECODER.decode(text)]
    value, end = _DECODER.raw_decode(text)
    rest = text[end:].lstrip(" \t\r\n")
    if rest[:1] in (",", ";"):
        return [value, *objects_in(rest[1:])]
    return [value, *(objects_in(rest) if rest else [])]


def call_in(value: Any) -> tuple[str, Any]:
    if not isinstance(value, dict) or not value.keys() <= {"name", "arguments", "parameters", "type", "id"}:
        raise ValueError("no call")
    name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
    arguments = _DECODER.decode(arguments) if isinstance(arguments, str) else arguments
    if {"arguments", "parameters"} <= value.keys() or name not in TOOLS or not isinstance(arguments, dict):
        raise ValueError("no call")
    return name, arguments


def calls_in(block: str) -> Calls:
    named = re.fullmatch(r"\s*(\w+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]\s*)?(\{.*)", block, re.DOTALL)
    values = [{"name": named[1], "arguments": _DECODER.decode(named[2])}] if named else objects_in(block)
    if not values:
        raise ValueError("no call")
    return [call_in(value) for value in values]


def reference(text: str, begin: str, end: str, at_start: str) -> tuple[str, Calls]:
    """Content and calls of a whole answer, by trying every marker as the end of every block."""
    content, calls, rest, after_call = "", Calls(), text, False
    if at_start and text.lstrip(" \t\r\n").startswith(at_start):
        found = block_in(text, begin, end)
        if found is not None:
            (calls, rest), after_call = found, True
    while begin in rest:
        before, _, block = rest.partition(begin)
        found = block_in(block, begin, end)
        if found is None:
            content, rest, after_call = content + before + begin, block, False
        else:
            content, rest, after_call = content + before.rstrip(" \t\r\n"), found[1], True
            calls += found[0]
    return content + (rest if rest.strip(" \t\r\n") or not after_call else ""), calls


def block_in(text: str, begin: str, end: str) -> tuple[Calls, str] | None:
    """The calls of a block at the beginning, and what follows it."""
    ends = [at.start() for marker in (begin, end) if marker for at in re.finditer(re.escape(marker), text)]
    for at in [*sorted(ends), len(text)]:
        try:
            return calls_in(text[:at]), text[at:].removeprefix(end)
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
    return None


def partly_marked(text: str, begin: str, end: str) -> bool:
    """An answer that ends within a marker: its block may end there, without the rest of the marker."""
    return any(text.endswith(marker[:count]) for marker in (begin, end) for count in range(1, len(marker)))


MARKS = {
    "hermes": ("<tool_call>", "</tool_call>", ""),
    "mistral": ("[TOOL_CALLS]", "", ""),
    "llama3_json": ("<|python_tag|>", "", "{"),
}


@pytest.mark.parametrize("written_in", sorted(MARKS))
def test_a_streamed_answer_is_read_as_the_whole_text_is(written_in: str, num_answers: int) -> None:
    rng, num_calls = random.Random(written_in), 0
    for _ in range(num_answers):
        text = mutated(rng, ANSWERS[written_in])
        found = read(MessageParser(None, FORMATS[written_in].parser(TOOLS)), pieces_of(rng, text))
        calls = [(call.name, json.loads(call.arguments)) for call in found.calls]
        if not calls:
            assert found.content == text
        if not partly_marked(text, *MARKS[written_in][:2]):
            assert (found.content, calls) == reference(text, *MARKS[written_in]), text
        num_calls += len(calls)
    assert num_calls > num_answers / 10, "many are still calls"


def test_pythonic_answers_are_calls_as_a_whole_or_content(num_answers: int) -> None:
    rng, num_calls = random.Random(0), 0
    for _ in range(num_answers):
        text = mutated(rng, ANSWERS["pythonic"])
        found = read(MessageParser(None, FORMATS["pythonic"].parser(TOOLS)), pieces_of(rng, text))
        assert found.content == ("" if found.calls else text)
        for call, node in zip(found.calls, python_calls(text) if found.calls else (), strict=True):
            assert (call.name, call.name in TOOLS) == (ast.unparse(node.func), True)
            assert json.loads(call.arguments).keys() == {keyword.arg for keyword in node.keywords}
        num_calls += len(found.calls)
    assert num_calls > num_answers / 20


def python_calls(text: str) -> Iterator[ast.Call]:
    # A text may have lines, also in single quotes.
    tree = ast.parse(text.strip().replace("\n", " "), mode="eval").body
    assert isinstance(tree, ast.List)
    for node in tree.elts:
        assert isinstance(node, ast.Call)
        yield node


@pytest.mark.parametrize("written_in", sorted(FORMATS))
def test_an_answer_is_read_in_the_same_way_however_it_is_cut(written_in: str, num_answers: int) -> None:
    rng, num_calls = random.Random(written_in), 0
    for _ in range(num_answers // 5):
        text, cut = mutated(rng, ANSWERS[written_in]), rng.random() < 0.5
        ways = [[text], list(text), pieces_of(rng, text)]
        found = [read(MessageParser(None, FORMATS[written_in].parser(TOOLS)), pieces, cut=cut) for pieces in ways]
        assert found[1:] == found[:1] * 2, text
        assert found[0].calls or found[0].content == text
        assert all(call.name in TOOLS and call.arguments.startswith("{") for call in found[0].calls)
        # The length may have cut off the last one.
        assert all(json.loads(call.arguments) is not None for call in found[0].calls[: -1 if cut else None])
        num_calls += len(found[0].calls)
    assert num_calls > num_answers / 1_000


def test_an_answer_that_a_grammar_makes_a_list_of_calls_loses_none_if_it_is_none(num_answers: int) -> None:
    rng = random.Random(0)
    for _ in range(num_answers):
        text = mutated(rng, [f"[{SUN}, {RAIN}]", f"\n [ {RAIN}]"])
        found = read(MessageParser(None, MarkedCalls(lambda: JsonCalls(TOOLS), at_start="[")), pieces_of(rng, text))
        assert found.content == ("" if found.calls else text)


def plain(text: str) -> str:
    """Without marks of reasoning, also those that appear where one was cut out, and the white space around them."""
    less = re.sub(r"</?think>|\s", "", text)
    return less if less == text else plain(less)


@pytest.mark.parametrize("inside", [False, True])
def test_reasoning_and_content_together_are_the_answer(inside: bool, num_answers: int) -> None:
    rng = random.Random(inside)
    for _ in range(num_answers):
        text = mutated(rng, THOUGHTS)
        found = read(MessageParser(ReasoningParser(inside=inside), NoTools()), pieces_of(rng, text))
        assert plain(found.reasoning + found.content) == plain(text), text
        if "think>" not in text:
            assert found.reasoning + found.content == (text.lstrip() if inside else text)
        if "think>" not in re.sub(r"</?think>", "", text):
            assert found.content.count("<think>") == found.content.count("</think>"), text
