"""A guess and what may come in the place of its tokens, as one tree. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafters.sequence import Drafted


@dataclass(slots=True)
class Tree:
    """Tokens, each one's parent's index or -1, and the draft's own probability of each."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    _at: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, node: int, token_id: int, confidence: float) -> int:
        """The token after `node`, which is another node's index or -1."""
        child = self._at.get((node, token_id))
        if child is None:
            child = self._at[node, token_id] = len(self.token_ids)
            self.token_ids.append(token_id)
            self.parents.append(node)
            self.confidence.append(confidence)
        return child


def merge(paths: Sequence[Drafted]) -> Tree:
    """Paths, with what stands beside them, as one tree. The first path is that of first children."""
    tree, ways = Tree(), []
    for path in paths:
        way = [-1]
        # What has no probability of its own is quoted, and seldom wrong.
        for token_id, confidence in zip(path.token_ids, path.confidence or [1.0] * len(path.token_ids), strict=True):
            way.append(tree.add(way[-1], token_id, confidence))
        ways.append(way)
    for path, way in zip(paths, ways, strict=True):
        for one in path.siblings:
            tree.add(way[one.at], one.token_id, one.confidence)
    return tree
