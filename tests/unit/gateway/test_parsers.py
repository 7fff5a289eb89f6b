"""From text to messages: the same, however the text is cut into pieces; what is no call stays content."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.gateway.generation.output import MessageParser, is_bound
from outrider.gateway.tools.parsers.blocks import MarkedCalls
from outrider.gateway.tools.parsers.formats import FORMATS
from outrider.gateway.tools.parsers.json_calls import JsonCalls
from outrider.gateway.tools.parsers.reasoning import ReasoningParser
from outrider.gateway.tools.parsers.tool_calls import Delta, NamedCall, NoTools, ToolParser, Tools
from outrider.gateway.tools.structured import Structured
from outrider.gateway.tools.tool_grammar import FreeCalls
from outrider.gateway.tools.tools import ToolUse

Calls = list[tuple[str, str]]
SUN = '{"city": "Z\\u00fcrich \\"}]<", "days": [1, {"a": 2}]}'


TOOLS: Tools = {name: {} for name in ("sun", "rain", "x", "f", "a.rain")}


def parsed(parser: MessageParser, pieces: list[str], *, cut: bool = False) -> tuple[str, str, Calls]:
    """Reasoning, content, calls."""
    whole = Delta.join([*(parser.push(piece) for piece in pieces), parser.finish(cut=cut)])
    assert [call.index for call in whole.calls] == list(range(len(whole.calls))), "calls come in their order"
    assert all(call.name for call in whole.calls), "a name comes with the first of a call"
    return whole.reasoning, whole.content, [(call.name, call.arguments) for call in whole.calls]


def cuts(text: str) -> Iterator[list[str]]:
    for size in (1, 2, 3, 7, len(text) or 1):
        yield [text[at : at + size] for at in range(0, len(text), size)] or [""]


def tools_in(written_in: str, text: str, *, cut: bool = False) -> tuple[str, Calls]:
    results = [
        parsed(MessageParser(None, FORMATS[written_in].parser(TOOLS)), pieces, cut=cut)[1:] for pieces in cuts(text)
    ]
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
        ("mistral", "[TOOL_CALLS]" + "x" * 300, "[TOOL_CALLS]" + "x" * 300, []),
        ("hermes", "a < b <tool and <tool_cal", "a < b <tool and <tool_cal", []),
        ("llama3_json", ONE.replace("arguments", "parameters"), "", [("sun", SUN)]),
        ("llama3_json", f"<|python_tag|>{ONE}; {TWO}", "", "both"),
        ("llama3_json", 'I say {"name": 1}', 'I say {"name": 1}', []),
        ("mistral", f"[TOOL_CALLS][{ONE}, {TWO}]", "", "both"),
        ("mistral", f"Now [TOOL_CALLS] [{ONE}]", "Now", [("sun", SUN)]),
        ("mistral", f"[TOOL_CALLS]sun[ARGS]{SUN}[TOOL_CALLS]rain[ARGS]{{}}", "", "both"),
        ("mistral", f"[TOOL_CALLS]sun{SUN}", "", [("sun", SUN)]),
        ("mistral", f"Hm. [TOOL_CALLS]sun[CALL_ID]abc[ARGS]{SUN}", "Hm.", [("sun", SUN)]),
        ("mistral", "[TOOL_ and [1, 2]", "[TOOL_ and [1, 2]", []),
        (
            "pythonic",
            '[sun(city="Bern", days=[1]), a.rain()]',
            "",
            [("sun", '{"city": "Bern", "days": [1]}'), ("a.rain", "{}")],
        ),
        ("pythonic", "[sun(t='1\n2\\n3\\\n4')]", "", [("sun", '{"t": "1\\n2\\n34"}')]),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("pythonic", "[sun(city=open('x'))]", "[sun(city=open('x'))]", []),
        ("pythonic", "Hello [sun()]", "Hello [sun()]", []),
    ],
)
def test_calls_are_found_in_each_format(written_in: str, text: str, content: str, calls: Calls | str) -> None:
    expected = [("sun", SUN), ("rain", "{}")] if calls == "both" else calls
    assert tools_in(written_in, text) == (content, expected)


@pytest.mark.parametrize("mark", ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "<|python_tag|>"])
def test_marks_within_the_strings_of_a_call_are_a_part_of_it(mark: str) -> None:
    arguments = json.dumps({"t": f"Use {mark} tags"})
    call = f'{{"name": "f", "arguments": {arguments}}}'
    for written_in, text in [
        ("hermes", f"<tool_call>{call}</tool_call>"),
        ("mistral", f"[TOOL_CALLS][{call}]"),
        ("mistral", f"[TOOL_CALLS]f[ARGS]{arguments}"),
        ("llama3_json", call),
        ("pythonic", f"[f(t={f'Use {mark} tags'!r})]"),
    ]:
        assert tools_in(written_in, text) == ("", [("f", arguments)])


NO_CALLS = [
    "no json",
    '{"name": 5, "arguments": {}}',
    '{"arguments": {}}',
    '{"name" "x"}',
    "{}",
    '{"t": "Use marks"}',
    '{"name": "f", "arguments": {"a": True}}',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": "text"}',
    '{"name": "f", "arguments": null}',
    '{"name": "f", "arguments": {"a": 1}',
    '{"name": "f", "arguments": {"a": "1}}',
    '{"name": "Alice", "arguments": {}}',
    '{"name": "f", "arguments": {}} and so on',
    '[{"name": "f", "arguments": {}}, {"name": "Alice"}]',
    '{"name": "f", "arguments": ' + '{"a":' * 300 + "1" + "}" * 301,
]


@pytest.mark.parametrize("written", NO_CALLS)
@pytest.mark.parametrize(
    ("written_in", "begin", "end"),
    [
        ("hermes", "So: \n<tool_call>\n", "\n</tool_call>"),
        ("hermes", "<tool_call>", ""),
        ("hermes", "Use <tool_call> or\n <tool_call>", "</tool_call> \n"),
        ("mistral", "Now [TOOL_CALLS]", ""),
        ("mistral", "[TOOL_CALLS] ", ""),
        ("llama3_json", "<|python_tag|>", "\n"),
        ("llama3_json", "", ""),
        ("pythonic", "", ""),
    ],
)
def test_what_is_no_valid_call_of_a_declared_tool_stays_content_unchanged(
    written_in: str, begin: str, end: str, written: str
) -> None:
    assert tools_in(written_in, begin + written + end) == (begin + written + end, [])


@pytest.mark.parametrize("text", ["Alice({})", "[Alice()]", "[TOOL_CALLS]Alice[ARGS]{}", "[TOOL_CALLS]Alice{}"])
def test_a_call_of_a_tool_that_nobody_declared_is_content(text: str) -> None:
    for written_in in FORMATS:
        assert tools_in(written_in, text) == (text, [])


def test_half_of_a_surrogate_pair_is_no_argument() -> None:
    text = '[f(a="\\ud800")]'
    assert tools_in("pythonic", text) == (text, [])


def test_a_call_after_one_that_is_none_is_found() -> None:
    bad = '<tool_call>{"name": "f", "arguments": {"a": "}}</tool_call>'
    assert tools_in("hermes", f"{bad}\n<tool_call>{TWO}</tool_call>") == (bad, [("rain", "{}")])
    assert tools_in("hermes", f"Use <tool_call>{{ as in <tool_call>{TWO}</tool_call>") == (
        "Use <tool_call>{ as in",
        [("rain", "{}")],
    )


@pytest.mark.parametrize(
    ("written_in", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
        ("llama3_json", '{"name": "f", "parameters": {', "{"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [1, ', '{"a": [1, '),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": tr', '{"a": tr'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [', '{"a": ['),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1 <', '{"a": "1 <'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>', '{"a": "<tool_call>'),
    ],
)
def test_arguments_that_the_length_cut_off_are_passed_on_as_far_as_they_came(
    written_in: str, text: str, arguments: str
) -> None:
    assert tools_in(written_in, text, cut=True) == ("", [("f", arguments)])
    assert tools_in(written_in, text) == (text, []), "an answer that ended so has called nothing"


@pytest.mark.parametrize(
    "text",
    ['<tool_call>{"name": "f"', '<tool_call>{"name": "f", "arguments": ', '<tool_call>{"arguments": {"a', "<tool_ca"],
)
def test_a_call_cut_off_before_its_arguments_is_content(text: str) -> None:
    assert tools_in("hermes", text, cut=True) == (text, [])


def test_an_answer_in_json_that_is_no_call_is_not_held_back_to_its_end() -> None:
    parser = FORMATS["llama3_json"].parser(TOOLS)
    assert parser.push('{"answer": "a long text') == Delta('{"answer": "a long text')


def test_a_list_that_a_grammar_forces_and_a_named_tool() -> None:
    for pieces in cuts(f"[{ONE}, {TWO}]"):
        assert parsed(MessageParser(None, MarkedCalls(lambda: JsonCalls(TOOLS), at_start="[")), pieces) == (
            "",
            "",
            [("sun", SUN), ("rain", "{}")],
        )
    for pieces in cuts(SUN):
        assert parsed(MessageParser(None, NamedCall("sun")), pieces) == ("", "", [("sun", SUN)])


def test_one_call_is_all_where_only_one_is_wanted() -> None:
    parser = MessageParser(None, FORMATS["mistral"].parser(TOOLS), max_calls=1)
    assert parsed(parser, [f"[TOOL_CALLS][{ONE}, {TWO}]"])[2] == [("sun", SUN)]


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm. <b>\n</think>\n\nYes.\n", "Hm. <b>", "Yes.\n"),
        (True, "Hm.\n\nOr?\n</think>Yes.", "Hm.\n\nOr?", "Yes."),
        (True, "Cut off", "Cut off", ""),
        (False, " Yes <think>no</think>", " Yes <think>no</think>", None),
        (False, "\n</think>\n\nYes", "", "Yes"),
        (False, "Yes</think>.", "Yes.", None),
        (False, "Yes <think> no", "Yes  no", None),
        (False, "<think>a <think> b</think>c</think>", "a <think> b", "c"),
        (True, "\n<think>\nHm.</think>Yes", "Hm.", "Yes"),
        (True, "</think>Yes", "", "Yes"),
        (True, "<thin", "<thin", ""),
        (False, "<thin", "<thin", None),
        (False, "<think></think>x", "", "x"),
    ],
)
def test_reasoning_is_told_from_the_answer(inside: bool, text: str, reasoning: str, content: str | None) -> None:
    expected = ("", reasoning) if content is None else (reasoning, content)
    for pieces in cuts(text):
        parser = MessageParser(ReasoningParser(inside=inside), NoTools())
        assert parsed(parser, pieces)[:2] == expected


@pytest.mark.parametrize("inside", [False, True])
def test_marks_in_content_that_a_grammar_makes_are_text(inside: bool) -> None:
    content = '{"a": "<think> opens, </think> closes", "b": "<think>"}'
    for pieces in cuts(f"<think>c</think>{content}"):
        parser = MessageParser(ReasoningParser(inside=inside), NoTools(), verbatim=True)
        assert parsed(parser, pieces) == ("c", content, [])


def test_content_is_bound_by_a_form_but_not_by_that_of_calls_beside_text() -> None:
    form = Structured("json_schema", {"type": "object"}, "response_format")
    use = ToolUse(({"type": "function", "function": {"name": "f"}},))
    assert not is_bound(None) and is_bound(form)
    assert is_bound(FreeCalls(use, form, "response_format")) and not is_bound(FreeCalls(use, None, "tools"))


def test_calls_come_after_reasoning() -> None:
    text = f"<think>I need <tool_call></think>\n<tool_call>{ONE}</tool_call>"
    for pieces in cuts(text):
        parser = MessageParser(ReasoningParser(inside=False), FORMATS["hermes"].parser(TOOLS))
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
    assert parsed(MessageParser(None, FORMATS["hermes"].parser(TOOLS)), pieces) == ("", "", [("f", written)])


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.text('<>tol_ca[]{}":,f()=1TOLCAS/ \n', max_size=12), min_size=1))
def test_no_text_breaks_a_parser(written_in: str, pieces: list[str]) -> None:
    parser: ToolParser = FORMATS[written_in].parser(TOOLS)
    content, reasoning, _ = parsed(MessageParser(ReasoningParser(inside=False), parser), pieces)
    assert len(content) + len(reasoning) <= len("".join(pieces)), "a parser makes up no text"
