"""A real draft worker, changed: python -m benchmarks.support.changed_draft CHANGE OPTIONS, which are outrider.draft's.

It uses the protocol like any other. `wrong` proposes a neighbour of each token that a good draft would propose;
`stalls` delays one round in eight, at random, by 200 ms. Both cost as much as a good draft.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from outrider.draft.config import DraftConfig, parse_arguments
from outrider.draft.process import load, run
from outrider.drafters import Drafter, DraftSequence
from outrider.telemetry.logging import configure_logging
from outrider.tree import DraftTree

STALL_S = 0.2
STALL_CHANCE = 1 / 8


class BadDrafter(Drafter):
    """Another drafter's proposals, changed by `spoil`."""

    def __init__(self, inner: Drafter, spoil: Callable[[DraftTree], DraftTree]) -> None:
        self.info = inner.info
        self._inner = inner
        self._spoil = spoil

    @property
    def num_free_blocks(self) -> int:
        return self._inner.num_free_blocks

    def take_prefix_changes(self) -> tuple[list[bytes], list[bytes]]:
        return self._inner.take_prefix_changes()

    def on_open(self, sequence: DraftSequence) -> None:
        self._inner.on_open(sequence)

    def on_commit(self, sequence: DraftSequence, known_len: int) -> None:
        self._inner.on_commit(sequence, known_len)

    def release(self, sequence: DraftSequence) -> None:
        self._inner.release(sequence)

    def on_close(self, sequence: DraftSequence) -> None:
        self._inner.on_close(sequence)

    def propose(self, sequences: Sequence[DraftSequence]) -> list[DraftTree | None]:
        return [None if drafted is None else self._spoil(drafted) for drafted in self._inner.propose(sequences)]


def wrong(vocab_size: int) -> Callable[[DraftTree], DraftTree]:
    """Replaces every token by another one."""

    def other(token_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple((token + 1) % vocab_size for token in token_ids)

    def spoil(tree: DraftTree) -> DraftTree:
        return replace(
            tree, token_ids=other(tree.token_ids), q=tuple(replace(q, token_ids=other(q.token_ids)) for q in tree.q)
        )

    return spoil


def stalling(drafted: DraftTree) -> DraftTree:
    """Delays a proposal now and then."""
    if random.random() < STALL_CHANCE:
        time.sleep(STALL_S)
    return drafted


def _wrong(config: DraftConfig, path: Path) -> Drafter:
    drafter = load(config, path)
    return BadDrafter(drafter, wrong(drafter.info.vocab_size))


def _stalls(config: DraftConfig, path: Path) -> Drafter:
    return BadDrafter(load(config, path), stalling)


CHANGES: dict[str, Callable[[DraftConfig, Path], Drafter]] = {
    "wrong": _wrong,
    "stalls": _stalls,
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in CHANGES:
        print(f"the first argument must be one of {', '.join(CHANGES)}", file=sys.stderr)
        return 2
    config = parse_arguments(sys.argv[2:])
    configure_logging("draft", config.log_format)
    sys.setswitchinterval(0.0005)
    asyncio.run(run(config, CHANGES[sys.argv[1]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
