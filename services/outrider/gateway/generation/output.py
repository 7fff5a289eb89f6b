"""One growing answer: takes the tokens of each round, and returns what the client may see of them. Pure.

Stop strings apply to the content of an answer: not to its reasoning, nor to the arguments of its calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from outrider.gateway.generation.requests import ChatPrompt, Prompt
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.tokenizer.text import Detokeniser, StopMatcher
from outrider.gateway.tools.parsers.blocks import MarkedCalls
from outrider.gateway.tools.parsers.formats import FORMATS
from outrider.gateway.tools.parsers.json_calls import JsonCalls
from outrider.gateway.tools.parsers.reasoning import PairedMarks, ReasoningParser, Thought
from outrider.gateway.tools.parsers.tool_calls import Delta, NamedCall, NoTools, ToolParser
from outrider.gateway.tools.structured import Grammatical
from outrider.gateway.tools.tool_grammar import FreeCalls
from outrider.gateway.tools.tools import ToolUse
from outrider.token_bytes import TokenBytes

FinishReason = Literal["stop", "length"]


@dataclass(slots=True)
class Output:
    """Ends at the first of a stop token, a stop string and max_tokens, also within a round. What the client may see of
    one that is not read as a message is only content."""

    token_bytes: TokenBytes
    stop: Sequence[str]
    stop_token_ids: frozenset[int]
    max_tokens: int
    min_tokens: int = 0
    """No stop string ends the answer before this length. For stop tokens, the target ensures it."""
    parser: MessageParser | None = None
    """Reads the answer as a message. None: all of it is content."""
    token_ids: list[int] = field(default_factory=list)
    """All tokens after the prompt, with the resumed ones."""
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    _detokeniser: Detokeniser = field(init=False)
    _stops: StopMatcher = field(init=False)

    def __post_init__(self) -> None:
        self._detokeniser = Detokeniser(self.token_bytes)
        self._stops = StopMatcher(self.stop)

    def resume(self, token_ids: Sequence[int]) -> Delta:
        """Adds tokens that the client already has, and drops their certain text. Text that was held back still is.

        There is text only if the answer had ended with these tokens.
        """
        for token_id in token_ids:
            reason = self._advance(token_id, Delta())
            if reason is not None:
                return self.end(reason, Delta())
        return Delta()

    def push(self, token_ids: Sequence[int]) -> Delta:
        """Adds the tokens of one round, in order, up to the end of the answer. Not to be called after that."""
        delta = Delta()
        for token_id in token_ids:
            reason = self._advance(token_id, delta)
            if reason is not None:
                return self.end(reason, delta)
        delta.merge()
        return delta

    def end(self, reason: FinishReason, last: Delta) -> Delta:
        """Ends the answer. Returns its last piece with what was still held back, which may have a stop string too."""
        if not self._stops.stop:
            self._show(self._detokeniser.flush(), last)
            if self.parser is not None:
                self._take(self.parser.finish(cut=reason == "length"), last)
            last.content += self._stops.flush()
        last.merge()
        self.finish_reason = "stop" if self._stops.stop else reason
        return last

    def _advance(self, token_id: int, delta: Delta) -> FinishReason | None:
        """Adds a token, and what is certain now to `delta`."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            # The answer's tokens include the stop token; its text is left out.
            self.matched_stop = token_id
            return "stop"
        self._show(self._detokeniser.push(token_id), delta, stops=len(self.token_ids) > self.min_tokens)
        if self._stops.stop:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None

    def _show(self, text: str, delta: Delta, *, stops: bool = True) -> None:
        """Without `stops`, no stop string begins or ends in this text."""
        if self.parser is None:
            delta.content += self._until_stop(text) if stops else text
        else:
            self._take(self.parser.push(text), delta, stops=stops)

    def _take(self, read: Delta, delta: Delta, *, stops: bool = True) -> None:
        if stops:
            read.content = self._until_stop(read.content)
        if self._stops.stop:
            # Calls follow the content that is read together with them.
            read.calls = []
        elif read.calls:
            # No stop string goes on behind a call.
            read.content += self._stops.flush()
        delta.add(read)

    def _until_stop(self, content: str) -> str:
        content = self._stops.push(content)
        if self._stops.stop:
            self.matched_stop = self._stops.stop
        return content


def parser_of(
    prompt: Prompt, tokenizer: ModelTokenizer, prompt_token_ids: Sequence[int], form: Grammatical | None = None
) -> MessageParser | None:
    """None if the answer is a text and no message. `form`: the form of the whole answer."""
    if not isinstance(prompt, ChatPrompt) or not prompt.reads_reasoning:
        return None
    reasoning = None
    if tokenizer.reasons:
        reasoning = ReasoningParser(inside=tokenizer.thought_after(prompt_token_ids) is Thought.OPEN)
    use = prompt.tools
    if reasoning is None and use is None:
        return None
    most = None if use is None or use.parallel else 1
    return MessageParser(reasoning, _tools(use, tokenizer.tool_format), most, verbatim=is_bound(form))


def is_bound(form: Grammatical | None) -> bool:
    """Whether no content is free text."""
    return form is not None and not (isinstance(form, FreeCalls) and form.answer is None)


def _tools(use: ToolUse | None, written_in: str) -> ToolParser:
    if use is None:
        return NoTools()
    match use.choice:
        case "auto":
            return FORMATS[written_in].parser(use.schemas)
        case "required":
            return MarkedCalls(lambda: JsonCalls(use.schemas), at_start="[")
        case "named":
            return NamedCall(use.name)


class MessageParser:
    """Parses one answer. `max_calls`: further calls are dropped; None: no limit.

    `verbatim`: a grammar makes the content, so that marks of reasoning in it are text.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser,
        max_calls: int | None = None,
        *,
        verbatim: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._marks = None if verbatim else PairedMarks()
        self._tools = tools
        self._max_calls = max_calls

    def push(self, text: str) -> Delta:
        """What `text` adds."""
        if self._reasoning is None:
            return self._kept(self._tools.push(text))
        reasoning, content = self._reasoning.push(text)
        delta = self._kept(self._tools.push(content))
        delta.reasoning = reasoning
        if self._marks is not None:
            delta.content = self._marks.push(delta.content)
            if delta.calls:
                # Nor does a pair of marks.
                delta.content += self._marks.finish()
        return delta

    def finish(self, *, cut: bool) -> Delta:
        """What was held back. `cut`: the answer's length ended it."""
        if self._reasoning is None:
            return self._kept(self._tools.finish(cut=cut))
        reasoning, content = self._reasoning.finish()
        delta = self._tools.push(content)
        delta.add(self._tools.finish(cut=cut))
        delta.reasoning = reasoning
        if self._marks is not None:
            delta.content = self._marks.push(delta.content) + self._marks.finish()
        return self._kept(delta)

    def _kept(self, delta: Delta) -> Delta:
        if self._max_calls is not None:
            delta.calls = [call for call in delta.calls if call.index < self._max_calls]
        return delta
