"""python -m tests.unit.engine.parallel.ranks MODEL FILE: two ranks play a game of trees; rank 0 writes its logits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from outrider.engine import Engine, EngineConfig, Row
from outrider.engine.loader import load_engine
from outrider.engine.parallel.follower import follow
from outrider.engine.parallel.group import Group, Place, listen
from outrider.engine.parallel.links import Link
from torch import Tensor

CONFIG = EngineConfig(dtype="float32", execution="transformers", num_blocks=32, block_size=8)
_TIMEOUT_S = 60.0


def play(engine: Engine) -> list[Tensor]:
    """Logits of trees; of each one a path is kept that is not the first branch."""
    sequence, other = engine.kv.open([]), engine.kv.open([])
    engine.forward([Row(sequence, list(range(5, 25)), 0), Row(other, [9, 8, 7], 0)])
    found = []
    for turn in range(4):
        nodes = [30 + 7 * turn + n for n in range(6)]
        rows = [Row(other, [40 + turn], 1), Row(sequence, [turn + 3, *nodes], 7, parents=[-1, -1, 1, 0, 2, 2])]
        found.append(engine.forward(rows).clone())
        engine.kv.keep(sequence, [1, 2, 5])
    return found


def main(model: Path, file: Path) -> None:
    """Forks before torch has started any thread."""
    ours, theirs = Link.pair()
    rendezvous = listen()
    beats = os.pipe()[1]
    rank = 1 if os.fork() == 0 else 0
    group = Group(Place(rank, 2, (theirs if rank else ours,), rendezvous, beats, _TIMEOUT_S))
    if rank:
        ours.close()
        follow(group, CONFIG)
        os._exit(0)
    theirs.close()
    engine = load_engine(model, CONFIG, group)
    torch.save(play(engine), file)
    group.stop()
    assert os.wait()[1] == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
