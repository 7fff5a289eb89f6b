"""The shape of a row's drafted tokens: each follows another one, or the token before them all. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_TREE_NODES = 63
"""Most nodes of a tree that branches: a GPU's mask is one signed 64-bit number per node."""


def branches(parents: Sequence[int]) -> bool:
    """Whether any node follows another than the one before it."""
    # Most are chains, and those are ranges.
    return parents != range(-1, len(parents) - 1) and any(parent != node - 1 for node, parent in enumerate(parents))


def check_parents(parents: Sequence[int]) -> None:
    """Raises ValueError unless they are a tree's."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}]: {parent} does not come before its child")
    if len(parents) > MAX_TREE_NODES:
        raise ValueError(f"parents: a tree of {len(parents)} nodes, at most {MAX_TREE_NODES}")


def depth_first(parents: Sequence[int]) -> list[int]:
    """The nodes, each followed by its first child: so a path is cut into as few runs as possible."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        children[parent].append(node)
    found: list[int] = []
    waiting = children[-1][::-1]
    while waiting:
        found.append(waiting.pop())
        waiting.extend(reversed(children[found[-1]]))
    return found


def depths(parents: Sequence[int]) -> list[int]:
    """Each node's number of ancestors."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def runs(parents: Sequence[int]) -> Iterator[range]:
    """The nodes cut where one does not follow the node before it."""
    start = 0
    for node in range(1, len(parents) + 1):
        if node == len(parents) or parents[node] != node - 1:
            yield range(start, node)
            start = node


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to `node`, which comes last; none for -1."""
    found: list[int] = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def ancestor_masks(parents: Sequence[int]) -> list[int]:
    """For each node the bits of those on its path, its own included: bit 0 is the first node."""
    found: list[int] = []
    for node, parent in enumerate(parents):
        found.append((found[parent] if parent >= 0 else 0) | 1 << node)
    return found
