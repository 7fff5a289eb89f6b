"""python -m outrider.comparison.best_way TARGET FILE [options of a target]: which drafts that ship are fastest here.

Each way is replayed with what a target looks up by default, one stream, on a few prompts that the target answers. The
result is kept in FILE.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outrider import ways
from outrider.comparison.compare import replays
from outrider.comparison.loaded import CompareConfig
from outrider.comparison.texts import Question
from outrider.drafting.lookup import ngram
from outrider.engine import EngineConfig, resolve
from outrider.target.config import parse_arguments
from outrider.ways import MORE, SHIPPED, Measured, Shipped, Way

_TOKENS = 32
_PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A farmer has 17 sheep and buys 5 more. Then he sells 9. How many has he? Explain each step.",
    "Translate into French: The library opens at nine and closes at six.",
    "Summarise in two sentences: The committee met on Monday to discuss the bridge. Its repair will cost two million, "
    "more than the town has. The committee will ask the county for half of the sum, and repair the bridge in spring.",
    "Write a short story about a lighthouse.",
)


def best_way(target: Path, shipped: Shipped, engine: EngineConfig) -> Way:
    """Raises CheckpointError."""
    mixtures = {("", ""): ngram.NAME, (shipped.head, ""): f"{shipped.head}+{ngram.NAME}"}
    mixtures["", shipped.draft] = f"{shipped.draft}+{ngram.NAME}"
    with tempfile.TemporaryDirectory() as kept:
        config = CompareConfig(
            target=str(target),
            drafts=tuple(mixtures.values()),
            questions=tuple(Question("all", ({"role": "user", "content": prompt},)) for prompt in _PROMPTS),
            kept=Path(kept),
            streams=(1,),
            max_new_tokens=_TOKENS,
            engine=engine,
            # So that what else runs on this machine does not count.
            threads=1,
        )
        replayed, _ = replays(config, lambda line: None)
    times = [replayed.times_plain(parts, 1) for parts in config.mixtures]
    return chosen(tuple(Measured(*way, round(each, 2)) for way, each in zip(mixtures, times, strict=True)))


def chosen(measured: tuple[Measured, ...]) -> Way:
    """The fastest, where a draft worker's gain counts by what it has to bring."""
    best = max(measured, key=lambda one: one.times_plain / (MORE if one.draft else 1.0))
    return Way(best.head, best.draft, measured)


def main(arguments: Sequence[str]) -> None:
    name, file, *options = arguments
    config = parse_arguments(["--model", name, "--listen", "127.0.0.1:0", *options])
    ways.keep(Path(file), best_way(resolve(name), SHIPPED[name], config.engine))


if __name__ == "__main__":
    main(sys.argv[1:])
