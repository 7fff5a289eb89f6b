"""Runs many hostile grammars of one tenant beside a small one of another, and says what they took of the memory.

python -m tests.unit.target.hostile_grammars CHECKPOINT VOCAB BOUND_BYTES
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from outrider.errors import OutriderError
from outrider.gateway.tools.structured import Kind, Structured
from outrider.target.grammars.grammar import GrammarCompiler

EOS = 2
NUM_LARGE = 200
NUM_STEPS = 120
SMALL = Structured("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}}, "x").to_grammar()


def _hostile() -> Iterator[str]:
    for kind, value in _large():
        yield Structured(kind, value, "x").to_grammar()


def _large() -> Iterator[tuple[Kind, Any]]:
    """NUM_LARGE, with very many states, each of which a process may compile."""
    for number in range(NUM_LARGE // 4):
        yield "regex", rf"(.{{0,{200 + number}}}a){{2}}b"
        yield "regex", rf"(\w{{1,{20 + number}}} ){{1,50}}[\p{{Greek}}\p{{Han}}]{{3,30}}"
        fields = {f"{number}_{k}": {"type": "string", "pattern": f"^(.{{0,{20 + k}}}a){{2}}b$"} for k in range(100)}
        yield "json_schema", {"type": "object", "properties": fields}
        yield "grammar", f'start: e\ne: e e | "a" e | "({number}" e ")" | "b"'


def walk(compiler: GrammarCompiler, grammar: str, tenant: str, chance: random.Random) -> object:
    """Commits allowed tokens by chance. Returns the sequence's matcher, or None when it was refused."""
    try:
        matcher = compiler.compile(grammar, (), tenant)
        for _ in range(NUM_STEPS):
            mask = matcher.allowed(())
            assert mask is not None
            bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
            bits[EOS] = 0
            ids = bits.nonzero()[0].tolist()
            if not ids:
                break
            matcher.advance([chance.choice(ids)])
    except OutriderError:
        return None
    return matcher


def main(checkpoint: str, vocab_size: str, bound: str) -> None:
    compiler = GrammarCompiler(Path(checkpoint), int(vocab_size), [EOS], most_bytes=int(bound))
    process, chance = psutil.Process(), random.Random(0)
    assert walk(compiler, SMALL, "small", chance)
    before = process.memory_info().rss
    running = [walk(compiler, grammar, "hostile", chance) for grammar in _hostile()]
    took = process.memory_info().rss - before
    small = [walk(compiler, SMALL, "small", chance) for _ in range(10)]
    said = {"took": took, "estimated": compiler.memory.num_bytes, "refused": running.count(None)}
    print(json.dumps(said | {"small_refused": small.count(None), "running": len(running)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
