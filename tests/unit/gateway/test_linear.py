"""Long answers of the worst kinds: the work for one is in proportion to its length. Characters looked at are counted,
and not time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from outrider.gateway.generation.output import MessageParser
from outrider.gateway.tokenizer.text import StopMatcher
from outrider.gateway.tools.parsers.blocks import MarkedCalls
from outrider.gateway.tools.parsers.formats import FORMATS
from outrider.gateway.tools.parsers.reasoning import PairedMarks, ReasoningParser
from outrider.gateway.tools.parsers.tool_calls import NoTools, Tools, held_back

TOOLS: Tools = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
NUM_TOKENS = 500
_looked_at = 0


class Counted(str):
    """A text that counts the characters which are looked at or copied, and whose parts and sums do so too."""

    def __new__(cls, text: str) -> Counted:
        return super().__new__(cls, text)


def _counting(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def counted(self: str, *arguments: Any) -> Any:
        global _looked_at
        found = method(self, *arguments)
        begins = arguments[1] if name == "find" and len(arguments) > 1 else 0
        size = len(found) if isinstance(found, str) and name in ("__getitem__", "__add__") else len(self) - begins
        _looked_at += 1 if name == "startswith" else size
        if isinstance(found, tuple):
            return tuple(map(Counted, found))
        return Counted(found) if isinstance(found, str) else found

    return counted


_NAMES = ("find", "partition", "rpartition", "lstrip", "rstrip", "strip", "replace", "startswith", "split")
for _name in (*_NAMES, "__add__", "__getitem__", "__contains__", "removeprefix", "removesuffix"):
    setattr(Counted, _name, _counting(_name))
Counted.__radd__ = lambda self, other: Counted(other) + self  # type: ignore[attr-defined]


def work(push: Callable[[str], Any], finish: Callable[[], Any], tokens: Iterator[str]) -> int:
    global _looked_at
    before = _looked_at
    for token in tokens:
        push(Counted(token))
    finish()
    return _looked_at - before


def repeated(opening: str, token: str, num_tokens: int) -> Iterator[str]:
    yield opening
    for _ in range(num_tokens):
        yield token


def check_linear(make: Callable[[], Any], opening: str, token: str) -> None:
    amounts = []
    for num_tokens in (NUM_TOKENS, 2 * NUM_TOKENS):
        parser = make()
        cut = {"cut": False} if isinstance(parser, MarkedCalls | MessageParser | NoTools) else {}
        finish = (
            parser.flush if isinstance(parser, StopMatcher) else lambda parser=parser, cut=cut: parser.finish(**cut)
        )
        amount = work(parser.push, finish, repeated(opening, token, num_tokens))
        amounts.append(amount + (parser.num_read if isinstance(parser, MarkedCalls) else 0))
        assert amount < 1_000 * len(token) * num_tokens + 100_000
    assert amounts[1] < 2.5 * amounts[0] + 10_000


def openings(written_in: str) -> list[str]:
    """A block that is in a string, so far as it goes."""
    begin = FORMATS[written_in].marks[0]
    return [
        "",
        begin,
        *(begin + rest for rest in ('{"name": "f", "arguments": {"a": "', '[{"name": "f", "arguments": {"a": "')),
        *(begin + rest for rest in ("f\n<arg_key>a</arg_key>\n<arg_value>", "\n<function=f>\n<parameter=a>\n")),
        *(
            begin + rest
            for rest in ('\n<invoke name="f">\n<parameter name="a">', "[f(a='", "\nf(a='", 'f[ARGS]{"a": "')
        ),
    ]


def tokens(written_in: str) -> list[str]:
    marks = FORMATS[written_in].marks
    whole = [
        *marks,
        *(mark[:-1] for mark in marks),
        f'{marks[0]}{{"a": [',
        f'{marks[0]}[{{"name": "f", "arguments": {{',
    ]
    tags = ["</parameter>", "</arg_value>", "</parameter>\n<para", f"{marks[0]}<function=f><parameter=a>", "<arg_key>"]
    return [*whole, *tags, " ", "\n", "{", "[", "[[", '"', "\\", "\\\\", "'", '\\"', "1", "a", "<", "f(", "<think>"]


@pytest.mark.parametrize("written_in", sorted(FORMATS))
def test_calls_take_work_in_proportion_to_the_length_of_the_answer(written_in: str) -> None:
    for opening in openings(written_in)[1:2]:
        for token in tokens(written_in)[:4]:
            check_linear(lambda: FORMATS[written_in].parser(TOOLS), opening, token)


@pytest.mark.slow
@pytest.mark.parametrize("written_in", sorted(FORMATS))
def test_so_do_all_beginnings_with_all_repeated_parts(written_in: str) -> None:
    for opening in openings(written_in):
        for token in tokens(written_in):
            check_linear(lambda: FORMATS[written_in].parser(TOOLS), opening, token)


@pytest.mark.parametrize("token", [" ", "\n", "<think>", "</think>", "<thin", "</thin", "</", "a", "<think>a</think>"])
@pytest.mark.parametrize("opening", ["", "<think>", "a<think>", "<think>a</think>"])
def test_so_does_reasoning(opening: str, token: str) -> None:
    check_linear(lambda: ReasoningParser(inside=False), opening, token)
    check_linear(lambda: ReasoningParser(inside=True), opening, token)
    check_linear(PairedMarks, opening, token)
    check_linear(lambda: MessageParser(ReasoningParser(inside=False), NoTools()), opening, token)


@pytest.mark.parametrize("stops", [["a" * 255 + "b"], ["ab" * 100 + "c" + str(i) for i in range(16)], ["\n\n\n", "##"]])
@pytest.mark.parametrize("token", ["a", "ab", "\n", "aaaa", "#\n"])
def test_so_do_stop_strings_that_never_complete(stops: list[str], token: str) -> None:
    check_linear(lambda: StopMatcher(stops), "", token)


def test_the_count_sees_work_that_grows_with_the_square() -> None:
    class Slow(NoTools):
        text = ""

        def push(self, text: str) -> Any:
            self.text = self.text + text
            held_back(self.text.lstrip(), ("x",))

    with pytest.raises(AssertionError):
        check_linear(Slow, "", "a")
