"""The parser of an answer to a chat: by its model's formats and the request's tools."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.gateway.generation.requests import ChatPrompt, Prompt
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.tools.parsers.message import MessageParser
from outrider.gateway.tools.parsers.reasoning import ReasoningParser, Thought
from outrider.gateway.tools.parsers.tool_calls import FORMATS, MarkedCalls, NamedCall, NoTools, ToolParser
from outrider.gateway.tools.structured import Grammatical
from outrider.gateway.tools.tool_grammar import FreeCalls
from outrider.gateway.tools.tools import ToolUse


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
            return FORMATS[written_in](use.names)
        case "required":
            return MarkedCalls(use.names, at_start="[")
        case "named":
            return NamedCall(use.name)
