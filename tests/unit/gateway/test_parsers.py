"""From text to messages: the same, however the text is cut into pieces; what is no call stays content."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.gateway.parsers.message import MessageParser
from outrider.gateway.parsers.reasoning import ReasoningParser
from outrider.gateway.parsers.tool_calls import FORMATS, Delta, JsonCalls, NamedCall, NoTools, ToolParser, format_of

Calls = list[tuple[str, str]]
SUN = '{"city": "Z\\u00fcrich \\"}]<", "days": [1, {"a": 2}]}'


def parsed(parser: MessageParser, pieces: list[str]) -> tuple[str, str, Calls]:
    """Reasoning, content, calls."""
    content, reasoning, calls = "", "", dict[int, list[str]]()
    for number, piece in enumerate(pieces, start=1):
        delta: Delta = parser.push(piece, finished=number == len(pieces))
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        for call in delta.calls:
            assert bool(call.name) is (call.index not in calls), "a name comes once, with the first of a call"
            assert call.index <= len(calls), "calls come in their order"
            entry = calls.setdefault(call.index, [call.name, ""])
            entry[1] += call.arguments
    assert parser.num_calls == len(calls)
    return reasoning, content, [(name, arguments) for name, arguments in calls.values()]


def cuts(text: str) -> Iterator[list[str]]:
    for size in (1, 2, 3, 7, len(text) or 1):
        yield [text[at : at + size] for at in range(0, len(text), size)] or [""]


def tools_in(written_in: str, text: str) -> tuple[str, Calls]:
    results = [parsed(MessageParser(None, FORMATS[written_in]()), pieces)[1:] for pieces in cuts(text)]
    assert all(result == results[0] for result in results), "however it is cut"
    return results[0]


ONE = f'{{"name": "sun", "arguments": {SUN}}}'
TWO = '{"name": "rain", "arguments": {}}'


@pytest.mark.parametrize(
    ("written_in", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [("sun", SUN)]),
        ("hermes", f"Wait. \n<tool_call>{ONE}</tool_call>\n<tool_call>\n{TWO}\n</tool_call>\n", "Wait.", "both"),
        ("hermes", f"<tool_call>{TWO}</tool_call> Done.", " Done.", [("rain", "{}")]),
        ("hermes", f"<tool_call>\n{ONE}", "", [("sun", SUN)]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "x"}</tool_call>', "", [("x", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("x", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "x"}</tool_call>', "", [("x", "{}")]),
        ("mistral", "[TOOL_CALLS]" + "x" * 300, "x" * 300, []),
        ("hermes", "a < b <tool and <tool_cal", "a < b <tool and <tool_cal", []),
        ("llama3_json", ONE.replace("arguments", "parameters"), "", [("sun", SUN)]),
        ("llama3_json", f"<|python_tag|>{ONE}; {TWO}", "", "both"),
        ("llama3_json", 'I say {"name": 1}', 'I say {"name": 1}', []),
        ("mistral", f"[TOOL_CALLS][{ONE}, {TWO}]", "", "both"),
        ("mistral", f"Now [TOOL_CALLS] [{ONE}]", "Now", [("sun", SUN)]),
        ("mistral", f"[TOOL_CALLS]sun[ARGS]{SUN}[TOOL_CALLS]rain[ARGS]{{}}", "", "both"),
        ("mistral", f"[TOOL_CALLS]sun{SUN}", "", [("sun", SUN)]),
        ("mistral", "[TOOL_ and [1, 2]", "[TOOL_ and [1, 2]", []),
        (
            "pythonic",
            '[sun(city="Bern", days=[1]), a.rain()]',
            "",
            [("sun", '{"city": "Bern", "days": [1]}'), ("a.rain", "{}")],
        ),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("pythonic", "[sun(city=open('x'))]", "[sun(city=open('x'))]", []),
        ("pythonic", "Hello [sun()]", "Hello [sun()]", []),
    ],
)
def test_calls_are_found_in_each_format(written_in: str, text: str, content: str, calls: Calls | str) -> None:
    expected = [("sun", SUN), ("rain", "{}")] if calls == "both" else calls
    assert tools_in(written_in, text) == (content, expected)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nno json\n</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name" "x"}</tool_call>',
        "<tool_call>{} and so on",
        "  spaces are kept, too \n",
    ],
)
def test_what_only_looks_like_a_call_stays_content(text: str) -> None:
    content, calls = tools_in("hermes", text)
    assert not calls
    assert content in text and content.strip(), "but for the marker"
    assert "</tool_call>" not in text or content.endswith("</tool_call>")


def test_arguments_come_as_they_are_written() -> None:
    """A client sees the first of them long before the last."""
    parser = FORMATS["hermes"]()
    parser.push('<tool_call>{"name": "x", "arguments": {"a')
    delta = parser.push('": 1')
    assert [(call.name, call.arguments) for call in delta.calls] == [("", '": 1')]


def test_a_list_that_a_grammar_forces_and_a_named_tool() -> None:
    for pieces in cuts(f"[{ONE}, {TWO}]"):
        assert parsed(MessageParser(None, JsonCalls(at_start="[")), pieces) == ("", "", [("sun", SUN), ("rain", "{}")])
    for pieces in cuts(SUN):
        assert parsed(MessageParser(None, NamedCall("sun")), pieces) == ("", "", [("sun", SUN)])


def test_one_call_is_all_where_only_one_is_wanted() -> None:
    parser = MessageParser(None, FORMATS["mistral"](), max_calls=1)
    delta = parser.push(f"[TOOL_CALLS][{ONE}, {TWO}]", finished=True)
    assert {call.index for call in delta.calls} == {0}


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm. <b>\n</think>\n\nYes.\n", "Hm. <b>", "Yes.\n"),
        (True, "Hm.\n\nOr?\n</think>Yes.", "Hm.\n\nOr?", "Yes."),
        (True, "Cut off", "Cut off", ""),
        (False, " Yes <think>no</think>", " Yes <think>no</think>", None),
        (False, "<thin", "<thin", None),
        (False, "<think></think>x", "", "x"),
    ],
)
def test_reasoning_is_told_from_the_answer(inside: bool, text: str, reasoning: str, content: str | None) -> None:
    expected = ("", reasoning) if content is None else (reasoning, content)
    for pieces in cuts(text):
        parser = MessageParser(ReasoningParser(inside=inside), NoTools())
        assert parsed(parser, pieces)[:2] == expected


def test_calls_come_after_reasoning() -> None:
    text = f"<think>I need <tool_call></think>\n<tool_call>{ONE}</tool_call>"
    for pieces in cuts(text):
        parser = MessageParser(ReasoningParser(inside=False), FORMATS["hermes"]())
        assert parsed(parser, pieces) == ("I need <tool_call>", "", [("sun", SUN)])


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=5), _json, max_size=4), st.booleans(), st.integers(1, 9))
def test_any_arguments_are_passed_on_letter_by_letter(
    arguments: dict[str, object], ascii_only: bool, size: int
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    text = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert parsed(MessageParser(None, FORMATS["hermes"]()), pieces) == ("", "", [("f", written)])


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.text('<>tol_ca[]{}":,f()=1TOLCAS/ \n', max_size=12), min_size=1))
def test_no_text_breaks_a_parser(written_in: str, pieces: list[str]) -> None:
    parser: ToolParser = FORMATS[written_in]()
    content, reasoning, _ = parsed(MessageParser(ReasoningParser(inside=False), parser), pieces)
    assert len(content) + len(reasoning) <= len("".join(pieces)), "a parser makes up no text"


def test_the_format_is_that_of_the_chat_template() -> None:
    assert format_of("... <tool_call> ...") == "hermes"
    assert format_of("[TOOL_CALLS] [") == "mistral"
    assert format_of("{{ '<|python_tag|>' }} Environment: ipython") == "llama3_json"
    assert format_of("[func_name1(params_name1=params_value1)] ipython") == "pythonic"
    assert format_of("") == "hermes"
