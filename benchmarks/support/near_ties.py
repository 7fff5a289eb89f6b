"""Logit distance of the two tokens where two texts differ. A child process, which needs torch, reruns the target."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider_controller.cli.exits import CommandError

from benchmarks.report import Row


@dataclass(frozen=True, slots=True)
class Tie:
    """The first difference of two answers to one prompt."""

    prompt: str
    token_ids: list[int]
    """The common output before it."""
    plain: int
    other: int


@dataclass(frozen=True, slots=True)
class Margin:
    tokens: str
    """Both tokens as text."""
    float32: float
    """Distance of their logits when computed in float32."""
    ranks: str
    """Ranks of both among all logits in float32; 0 is the largest."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """Position of the first difference; the shorter length when one begins with the other."""
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return min(len(first), len(second))


def tie(prompt: str, plain: Sequence[int], other: Sequence[int]) -> Tie:
    at = first_difference(plain, other)
    return Tie(prompt, list(plain[:at]), plain[at], other[at])


def tie_rows(names: Iterable[str], ties: Iterable[Tie], gaps: Iterable[Margin]) -> list[Row]:
    """Table rows, one for each tie; `names`: of their prompts."""
    return [
        {
            "PROMPT": name,
            "AT": len(one.token_ids),
            "PLAIN | SPECULATION": gap.tokens,
            "LOGITS APART (FLOAT32)": f"{gap.float32:.4f}",
            "RANKS": gap.ranks,
        }
        for name, one, gap in zip(names, ties, gaps, strict=True)
    ]


async def measure_ties(target: Path, ties: list[Tie]) -> list[Margin]:
    """One margin for each tie. Raises CommandError."""
    if not ties:
        return []
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(target)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await child.communicate(json.dumps([asdict(tie) for tie in ties]).encode())
    if child.returncode != 0:
        raise CommandError(f"the target could not be asked again: {error.decode(errors='replace')[-400:]}")
    return [Margin(**fields) for fields in json.loads(out)]


def main() -> None:
    """Reads ties from stdin, writes margins to stdout."""
    from outrider.engine import EngineConfig
    from outrider.engine.checkpoints.tokenizer import load_tokenizer
    from outrider.engine.loading.loader import load_engine

    tokenizer = load_tokenizer(sys.argv[1])
    engine = load_engine(Path(sys.argv[1]), EngineConfig(dtype="float32", num_blocks=512, prefix_cache=False))
    found = [_margin(engine, tokenizer, Tie(**fields)) for fields in json.load(sys.stdin)]
    json.dump([margin.as_dict() for margin in found], sys.stdout)


def _margin(engine: Any, tokenizer: Any, tie: Tie) -> Margin:
    from outrider.engine import Row

    chat = [{"role": "user", "content": tie.prompt}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), *tie.token_ids]
    sequence = engine.kv.open([])
    for start in range(0, len(token_ids), 512):
        part = token_ids[start : start + 512]
        logits = engine.forward([Row(sequence, part, int(start + len(part) == len(token_ids)))])
    engine.kv.close(sequence)
    plain, other = float(logits[0, tie.plain]), float(logits[0, tie.other])
    ranks = [int((logits[0] > value).sum()) for value in (plain, other)]
    readable = " | ".join(repr(tokenizer.decode([token])) for token in (tie.plain, tie.other))
    return Margin(readable, round(abs(plain - other), 4), f"{ranks[0]}, {ranks[1]}")


if __name__ == "__main__":
    main()
