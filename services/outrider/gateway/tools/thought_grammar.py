"""Grammars for answers with reasoning before them: the client's grammar applies only after `</think>`."""

from __future__ import annotations

import json
from typing import Any

from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.tools.parsers.reasoning import CLOSE, OPEN, Thought
from outrider.gateway.tools.parsers.tool_calls import MARKERS

_GAP = r"GAP: /[\n ]{0,4}/"


def after_thought(grammar: str, tokenizer: ModelTokenizer, thought: Thought) -> str:
    """A grammar, in llguidance's notation, with `grammar` after the reasoning. `grammar` itself without reasoning."""
    if thought is Thought.NONE:
        return grammar
    start = "thought GAP @answer" if thought is Thought.OPEN else f"({tokenizer.mark(OPEN)} thought GAP)? @answer"
    lark = "\n".join([f"start: {start}", *_thought(tokenizer), _GAP])
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": lark}, {**_parsed(grammar), "name": "answer"}]})


def _thought(tokenizer: ModelTokenizer) -> list[str]:
    """The rules of the reasoning, up to its end."""
    close = tokenizer.mark(CLOSE)
    if close.startswith('"'):
        # Lazy: the first `</think>` ends it.
        return [rf"thought[lazy]: /(.|\n)*{CLOSE.replace('/', chr(92) + '/')}/"]
    # Reasoning may mention tool calls, whose marks are tokens and not text.
    others = [tokenizer.mark(name) for name in MARKERS if name != CLOSE and name.startswith("<")]
    mentioned = " | ".join(name for name in others if not name.startswith('"'))
    text = f"TEXT (({mentioned}) TEXT)*" if mentioned else "TEXT"
    return [f"thought: {text} {close}", r"TEXT: /(.|\n)*/"]


def _parsed(grammar: str) -> dict[str, Any]:
    """Parses a grammar of llguidance, which is JSON or only Lark's notation."""
    if grammar.startswith("{"):
        [found] = json.loads(grammar)["grammars"]
        return dict(found)
    return {"lark_grammar": grammar}
