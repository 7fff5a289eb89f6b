"""Which source proposed the drafted tokens of a row, and what verification made of each source's. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafting.tree import ROOT, DraftTree
from outrider.protocol.limits import to_us
from outrider.protocol.rounds import SourceTokens


def verified_nodes(draft: DraftTree, path: Sequence[int], num_verified: int) -> list[tuple[int, int]]:
    """The nodes that were verified, each with its depth: at each position, all that follow the accepted one before."""
    children = draft.children()
    parents = enumerate([ROOT, *path][:num_verified], start=1)
    return [(node, depth) for depth, parent in parents for node in children[parent + 1]]


def tokens_by_source(
    draft: DraftTree, path: Sequence[int], verified: Sequence[tuple[int, int]]
) -> tuple[list[SourceTokens], list[int]]:
    """The counts of each source, and the place in them of each token that a commit tells of: the accepted ones, then
    the others of the longest path. `path`: the accepted nodes; `verified`: as `verified_nodes` finds them."""
    if not draft.token_ids:
        return [], []
    if not draft.origins:
        # Most drafts are one source's.
        own = not draft.serial
        totals = len(draft), len(verified), len(path), to_us(draft.seconds) if own else 0
        return [SourceTokens(draft.source, own, *totals)], [0] * max(len(path), draft.depth)
    sources = [_source(draft, node) for node in range(len(draft))]
    names = list(dict.fromkeys(sources))
    of_verified = [sources[node] for node, _ in verified]
    accepted = [sources[node] for node in path]
    counts = [
        SourceTokens(
            *one, sources.count(one), of_verified.count(one), accepted.count(one), _own_us(draft, sources, one)
        )
        for one in names
    ]
    shown = [*path, *draft.longest()[len(path) :]]
    return counts, [names.index(sources[node]) for node in shown]


def chances_of(draft: DraftTree, path: Sequence[int]) -> bytes:
    """The chance of each token that a commit tells of, in the same order, in 255ths."""
    claims = draft.claims()
    return bytes(min(255, round(255 * claims[node])) for node in [*path, *draft.longest()[len(path) :]])


def _own_us(draft: DraftTree, sources: Sequence[tuple[str, bool]], source: tuple[str, bool]) -> int:
    """A draft worker says itself what its drafts took."""
    _, own = source
    return to_us(sum(draft.seconds_of(node) for node, each in enumerate(sources) if each == source)) if own else 0


def _source(draft: DraftTree, node: int) -> tuple[str, bool]:
    origin = draft.origin(node)
    # Messages of draft workers are numbered from 1 on.
    return origin.source, not origin.serial
