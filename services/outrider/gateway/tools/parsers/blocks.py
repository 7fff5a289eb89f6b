"""Calls in blocks of an answer, between marks or as its beginning. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.gateway.fields import from_json
from outrider.gateway.tools.parsers.tool_calls import SPACE, CallDelta, Delta, ToolParser, held_back

_MAX_REREADS = 8
"""So often a text is read again because a block that began before it was no call: it bounds the work for answers that
are full of marks."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    """A JSON object as the model has written it; its beginning, in an answer that was cut off."""


class NotACall(ValueError):
    """The text is no call, whatever may follow it. `at`: how far it was read."""

    def __init__(self, problem: str, at: int = 0) -> None:
        super().__init__(problem)
        self.at = at

    def beyond(self, at: int) -> NotACall:
        self.at = max(self.at, at)
        return self


def is_object(text: str) -> bool:
    try:
        return isinstance(from_json(text, allow_inf_nan=False), dict)
    # TypeError: of half a surrogate pair, which is no text.
    except (ValueError, TypeError):
        return False


def checked(name: str, arguments: str) -> Call:
    """Raises NotACall."""
    if not is_object(arguments):
        raise NotACall("its arguments are no object")
    return Call(name, arguments)


def spaces(text: str, at: int) -> int:
    """Where the white space ends that begins at `at`."""
    end = len(text)
    while at < end and text[at] in SPACE:
        at += 1
    return at


class Block(ABC):
    """Reads one block, piece by piece."""

    stopped = False
    """What follows is no part of the block: a mark, or it is none."""

    @abstractmethod
    def read(self, text: str, at: int) -> int:
        """Reads `text` from `at` on. Returns where it stopped: at the end, before what is not part of the block, or
        before a few characters that need those after them. It gets these again. Raises NotACall."""

    @abstractmethod
    def calls(self) -> list[Call]:
        """Those of a complete block. Raises NotACall if it is not complete."""

    @abstractmethod
    def begun(self, rest: str) -> list[Call]:
        """Of a block that the answer's length cut off: those that are complete, and one whose arguments have begun.
        `rest`: what `read` would get again."""


class MarkedCalls(ToolParser):
    """Each block is from a beginning mark to an end mark, the next beginning, or the end of the answer.

    `at_start`: an answer that begins with this character is a block without a mark.
    """

    def __init__(
        self, block: Callable[[], Block], begins: Sequence[str] = (), ends: Sequence[str] = (), at_start: str = ""
    ) -> None:
        super().__init__()
        self._make, self._begins, self._marks, self._ends = block, begins, (*ends, *begins), ends
        self._at_start = at_start
        self._text, self._at = "", 0
        """What is still to be read: from `_at` on."""
        self._content: list[str] = []
        """That is certain, but not passed on yet."""
        self._space: list[str] = []
        """White space after content or a call, which is none if a block follows."""
        self._block: Block | None = None
        self._lead = ""
        """What precedes the block: white space and the mark."""
        self._earlier: list[str] = []
        """Of the block, in texts before `_text`."""
        self._from = 0
        """Where the block begins in `_text`, or goes on."""
        self._passed = 0
        """Characters of the answer before `_text`."""
        self._reached = 0
        """Characters of the answer that have been read in blocks which were no calls."""
        self._rereads = 0
        self.num_read = 0
        """Characters read in blocks, those that were read again each time."""
        self._called_last = False
        """Nothing but white space has followed the last call."""

    def push(self, text: str) -> Delta:
        delta = Delta()
        self._passed += self._at
        self._text, self._at = self._text[self._at :] + text, 0
        while self._advances(delta):
            pass
        if self._block is not None:
            self._earlier.append(self._text[self._from : self._at])
            self._passed += self._at
            self._text, self._from, self._at = self._text[self._at :], 0, 0
        return self._with_content(delta)

    def finish(self, *, cut: bool) -> Delta:
        delta = Delta()
        while self._block is not None:
            self._end_block(delta, cut=cut)
            while self._advances(delta):
                pass
        # Templates put line ends after calls.
        if not self._called_last or self._at < len(self._text):
            self._content += [*self._space, self._text[self._at :]]
        self._text, self._at, self._space = "", 0, []
        return self._with_content(delta)

    def _with_content(self, delta: Delta) -> Delta:
        delta.content, self._content = "".join(self._content), []
        return delta

    def _advances(self, delta: Delta) -> bool:
        return self._finds_block() if self._block is None else self._reads_block(self._block, delta)

    def _finds_block(self) -> bool:
        if self._at_start:
            begins = spaces(self._text, self._at)
            self._space.append(self._text[self._at : begins])
            self._at = begins
            if begins == len(self._text):
                return False
            if self._text[begins] == self._at_start:
                self._begin_block("")
                return True
            self._at_start = ""
        if not self._begins:
            self._content += [*self._space, self._text[self._at :]]
            self._space, self._at, self._called_last = [], len(self._text), False
            return False
        marks = [(at, mark) for mark in self._begins if (at := self._text.find(mark, self._at)) >= 0]
        found, mark = min(marks) if marks else (-1, "")
        last = self._text[max(self._at, len(self._text) - max(map(len, self._begins))) :]
        end = found if marks else len(self._text) - held_back(last, self._begins)
        self._add_content(self._text[self._at : end])
        self._at = end + len(mark)
        if marks:
            self._begin_block(mark)
        return bool(marks)

    def _add_content(self, text: str) -> None:
        content = text.rstrip(SPACE)
        if content:
            self._content += [*self._space, content]
            self._space, self._at_start, self._called_last = [], "", False
        self._space.append(text[len(content) :])

    def _begin_block(self, mark: str) -> None:
        self._block, self._lead = self._make(), "".join(self._space) + mark
        self._space, self._earlier, self._from = [], [], self._at

    def _reads_block(self, block: Block, delta: Delta) -> bool:
        try:
            if not block.stopped:
                before, self._at = self._at, block.read(self._text, self._at)
                self.num_read += self._at - before
            if not block.stopped or self._at == len(self._text):
                return False
            rest = self._text[self._at : self._at + max(map(len, self._marks), default=0)]
            if not any(map(rest.startswith, self._marks)):
                if any(mark.startswith(rest) for mark in self._marks):
                    return False
                raise NotACall("other text follows")
            self._pass_on(block.calls(), delta)
            self._at += len(next((mark for mark in self._ends if rest.startswith(mark)), ""))
        except NotACall as error:
            self.num_read += max(0, error.at - self._at)
            self._at = max(error.at, self._at)
            self._give_up()
        return True

    def _end_block(self, delta: Delta, *, cut: bool) -> None:
        """At the end of the answer."""
        assert self._block is not None
        try:
            calls = self._block.calls()
        except NotACall:
            calls = self._block.begun(self._text[self._at :]) if cut else []
        if calls:
            # What is left is the beginning of a mark.
            self._at = len(self._text)
            self._pass_on(calls, delta)
        else:
            self._give_up()

    def _pass_on(self, calls: Sequence[Call], delta: Delta) -> None:
        for call in calls:
            delta.calls.append(CallDelta(self.num_calls, call.name, call.arguments))
            self.num_calls += 1
        self._block, self._called_last = None, True

    def _give_up(self) -> None:
        """The block, read up to `_at`, is no call: its mark becomes content, and what follows is read anew."""
        self._content.append(self._lead)
        if earlier := "".join(self._earlier):
            self._text, self._at = earlier + self._text[self._from :], self._at + len(earlier) - self._from
            self._passed, self._from = self._passed + self._from - len(earlier), 0
        self._rereads = self._rereads + 1 if self._passed + self._from < self._reached else 0
        self._reached = max(self._reached, self._passed + self._at)
        self._block, self._called_last, self._at_start = None, False, ""
        if self._rereads < _MAX_REREADS:
            self._at = self._from
        else:
            self._at = self._reached - self._passed
            self._add_content(self._text[self._from : self._at])


class Enclosed(Block):
    """Several blocks, each between marks of its own."""

    def __init__(self, make: Callable[[], Block], begin: str, end: str) -> None:
        self._make, self._begin, self._end = make, begin, end
        self._blocks: list[Block] = []
        self._inside = False

    def read(self, text: str, at: int) -> int:
        while at < len(text):
            if self._inside:
                block = self._blocks[-1]
                at = at if block.stopped else block.read(text, at)
                if not block.stopped:
                    return at
            else:
                at = spaces(text, at)
            mark = self._end if self._inside else self._begin
            if not text.startswith(mark, at):
                if mark.startswith(text[at:]):
                    return at
                if self._inside or not self._blocks:
                    raise NotACall("a mark is missing", at)
                self.stopped = True
                return at
            self._inside = not self._inside
            if self._inside:
                self._blocks.append(self._make())
            at += len(mark)
        return at

    def calls(self) -> list[Call]:
        if not self._blocks:
            raise NotACall("it is not complete")
        return [call for block in self._blocks for call in block.calls()]

    def begun(self, rest: str) -> list[Call]:
        whole = [call for block in self._blocks[:-1] for call in block.calls()]
        return whole + [call for block in self._blocks[-1:] for call in block.begun(rest)]
