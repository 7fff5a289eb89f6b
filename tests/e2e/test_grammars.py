"""Grammars on a real vocabulary: the small ones of other tests never show a matcher that loses its place."""

from __future__ import annotations

import random
from typing import Any

import pytest
from outrider.gateway.tools.structured import Structured
from outrider.target.grammars.grammar import GrammarCompiler
from outrider_controller.cli.models import DEFAULT_TARGET, fetched
from tokenizers import Tokenizer

pytestmark = pytest.mark.slow

_OBJECT: dict[str, Any] = {"type": "object", "properties": {"base": {"type": "number"}}, "additionalProperties": True}
_SCHEMA = {
    "type": "object",
    "properties": {"dimensions": _OBJECT, "shape": {"type": "string"}},
    "required": ["shape", "dimensions"],
}
_TEXT = '{"dimensions":{"properties":{"base":{"description":"The base"},"height":{"x":["y","z"]}}},"shape":"a"}'


async def test_looking_ahead_along_drafts_changes_no_mask() -> None:
    """Nested keys and strings are places in the grammar that a matcher can take for one another."""
    checkpoint = await fetched(DEFAULT_TARGET, print)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    compiler = GrammarCompiler(checkpoint, tokenizer.get_vocab_size(), [tokenizer.token_to_id("<|im_end|>")])
    grammar = Structured("json_schema", _SCHEMA, "schema").to_grammar()
    text = tokenizer.encode(_TEXT).ids
    others = [tokenizer.encode(each).ids for each in ('":', '",', '"', " :", ' "', "x")]
    rng = random.Random(0)
    for _ in range(200):
        matcher, committed = compiler.compile(grammar, ()), 0
        while committed < len(text):
            draft = text[committed : committed + rng.randint(0, 5)]
            draft = [*draft, *rng.choice(others)] if rng.random() < 0.5 else draft
            draft = draft[: matcher.num_allowed(draft)]
            for count in range(len(draft) + 1):
                mask = matcher.allowed(draft[:count])
                fresh = compiler.compile(grammar, [*text[:committed], *draft[:count]]).allowed(())
                assert mask is not None and mask == fresh
            step = text[committed : committed + rng.randint(1, 4)]
            matcher.advance(step)
            committed += len(step)
