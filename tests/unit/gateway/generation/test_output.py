"""Where an answer ends, and that it can be taken up where it broke off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider.gateway.generation.output import MessageParser, Output
from outrider.gateway.tools.parsers.formats import FORMATS
from outrider.gateway.tools.parsers.reasoning import ReasoningParser
from outrider.gateway.tools.parsers.tool_calls import Delta, NamedCall, ToolParser
from outrider.testing.tiny import tiny_tokenizer
from outrider.token_bytes import TokenBytes

TOKENIZER = tiny_tokenizer()
TOKENS = TokenBytes.of_tokenizer(TOKENIZER.backend_tokenizer)
EOS = 2


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.backend_tokenizer.encode(text).ids)


def output(max_tokens: int = 100, stop: tuple[str, ...] = ()) -> Output:
    return Output(TOKENS, stop, frozenset({EOS}), max_tokens)


def test_a_stop_string_inside_a_round_ends_the_answer_and_drops_the_tokens_after_it() -> None:
    answer = output(stop=("lo",))
    assert (answer.push(ids_of("hello world")).content, answer.finish_reason) == ("hel", "stop")
    assert answer.token_ids == ids_of("hello")


def test_a_stop_token_inside_a_round_ends_it_and_is_its_last_token() -> None:
    answer = output()
    assert (answer.push([*ids_of("hi"), EOS, *ids_of("no")]).content, answer.finish_reason) == ("hi", "stop")
    assert answer.token_ids[-1] == EOS


def test_a_visible_stop_token_leaves_no_text() -> None:
    newline = ids_of("\n")[0]
    answer = Output(TOKENS, (), frozenset({newline}), 100)
    assert answer.push(ids_of("a\nb")).content == "a"


def test_max_tokens_is_exact_inside_a_round_and_lets_held_text_go() -> None:
    answer = output(max_tokens=3, stop=("abcX",))
    shown = answer.push(ids_of("abcd"))
    assert (shown.content, answer.finish_reason, len(answer.token_ids)) == ("abc", "length", 3)


def test_a_stop_string_that_completes_with_the_last_token_wins_over_length() -> None:
    answer = output(max_tokens=2, stop=("ab",))
    answer.push(ids_of("ab"))
    assert answer.finish_reason == "stop"


@given(st.text("ab€\n", max_size=20), st.integers(0, 80), st.sampled_from([("ab",), ("b€", "aab"), ()]))
def test_an_answer_resumed_anywhere_gives_the_text_of_one_that_was_not_broken(
    text: str, cut: int, stop: tuple[str, ...]
) -> None:
    ids = [*ids_of(text), EOS]
    cut = min(cut, len(ids) - 1)
    unbroken = output(stop=stop).push(ids).content
    first = output(stop=stop)
    before = first.push(ids[:cut])
    second = output(stop=stop)
    second.resume(ids[:cut])
    assert second.finish_reason == first.finish_reason
    after = "" if second.finish_reason else second.push(ids[cut:]).content
    assert before.content + after == unbroken


def test_an_answer_resumed_at_its_end_ends_at_once() -> None:
    answer = output(max_tokens=2)
    assert not answer.resume(ids_of("ab")).content
    assert answer.finish_reason == "length"


WEATHER = '{"name": "weather", "arguments": {"city": "Bern", "why": "STOP"}}'


def message(tools: ToolParser, stop: tuple[str, ...], *, inside: bool = False) -> Output:
    parser = MessageParser(ReasoningParser(inside=inside), tools)
    return Output(TOKENS, stop, frozenset({EOS}), 1000, parser=parser)


def hermes() -> ToolParser:
    return FORMATS["hermes"].parser({"weather": {}})


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_stops_end_the_content_and_neither_reasoning_nor_arguments(size: int) -> None:
    text = (
        f"<think>STOP?</think>Wait.\n<tool_call>{WEATHER}</tool_call> Then STOP here <tool_call>{WEATHER}</tool_call>"
    )
    answer, ids = message(hermes(), ("STOP",)), [*ids_of(text), EOS]
    pieces: list[Delta] = []
    while not answer.finish_reason:
        pieces.append(answer.push(ids[len(answer.token_ids) :][:size]))
    whole = Delta.join(pieces)
    assert (whole.reasoning, whole.content, len(whole.calls)) == ("STOP?", "Wait. Then ", 1)
    assert whole.calls[0].arguments == '{"city": "Bern", "why": "STOP"}'
    assert (answer.finish_reason, answer.matched_stop) == ("stop", "STOP")
    assert len(answer.token_ids) == len(ids_of(text.partition(" here")[0]))


@pytest.mark.parametrize("held", ["I look, ST", "I <think> again", "I <thi", "I <think> ST"])
@pytest.mark.parametrize("size", [1, 1000])
def test_what_was_held_back_before_a_call_comes_before_it(held: str, size: int) -> None:
    text = f"<think>Hm.</think>{held}<tool_call>{WEATHER}</tool_call>OP</think>."
    answer, ids = message(hermes(), ("STOP",)), [*ids_of(text), EOS]
    content, preceded = "", []
    while not answer.finish_reason:
        piece = answer.push(ids[len(answer.token_ids) :][:size])
        preceded += [content + piece.content[: call.at] for call in piece.calls]
        content += piece.content
    before = held.replace("<think>", "")
    assert (content, preceded, answer.matched_stop) == (f"{before}OP.", [before], EOS)


def test_a_stop_string_in_what_turns_out_to_be_no_call_ends_the_content_before_it() -> None:
    answer = message(hermes(), ("STOP",))
    piece = answer.push([*ids_of('Use <tool_call>{"STOP'), EOS])
    assert (piece.content, answer.finish_reason, answer.matched_stop) == ('Use <tool_call>{"', "stop", "STOP")


def test_no_stop_string_ends_the_arguments_of_a_named_tool() -> None:
    piece = message(NamedCall("weather"), ("Be", "}")).push([*ids_of('{"city": "Bern"}'), EOS])
    assert (piece.content, [call.arguments for call in piece.calls]) == ("", ['{"city": "Bern"}'])


def test_a_call_that_max_tokens_cuts_off_is_passed_on_as_far_as_it_came() -> None:
    answer = message(hermes(), ())
    answer.max_tokens = len(ids := ids_of(f"<tool_call>{WEATHER}"[:60]))
    piece = answer.push(ids)
    assert (piece.content, answer.finish_reason) == ("", "length")
    assert [call.arguments for call in piece.calls] == ['{"city": "Bern",']
