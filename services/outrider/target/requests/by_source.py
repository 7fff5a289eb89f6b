"""Which source proposed the drafted tokens of a row, and what verification made of each source's. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.limits import to_us
from outrider.protocol.rounds import SourceTokens
from outrider.tree import ROOT, DraftTree


def verified_nodes(draft: DraftTree, path: Sequence[int], num_verified: int) -> Sequence[int]:
    """The nodes that were verified: at each position, all that follow the accepted one before."""
    if not draft.parents:
        return range(min(num_verified, len(draft.token_ids)))
    children = draft.children()
    return [node for parent in [ROOT, *path][:num_verified] for node in children[parent + 1]]


def tokens_by_source(draft: DraftTree, path: Sequence[int], verified: Sequence[int]) -> list[SourceTokens]:
    """The counts of each source. `path`: the accepted nodes; `verified`: as `verified_nodes` finds them."""
    if not draft.token_ids:
        return []
    if not draft.origins:
        # Most drafts are one source's.
        own = not draft.serial
        totals = len(draft.token_ids), len(verified), len(path), to_us(draft.seconds) if own else 0
        return [SourceTokens(draft.source, own, *totals)]
    sources = _sources(draft)
    of_verified = [sources[node] for node in verified]
    accepted = [sources[node] for node in path]
    return [
        SourceTokens(
            *one, sources.count(one), of_verified.count(one), accepted.count(one), _own_us(draft, sources, one)
        )
        for one in dict.fromkeys(sources)
    ]


def places_of(draft: DraftTree, path: Sequence[int]) -> list[int]:
    """The place among those counts of each token that a commit tells of: the accepted ones, then the others of the
    longest path."""
    sources = _sources(draft)
    names = list(dict.fromkeys(sources))
    return [names.index(sources[node]) for node in _shown(draft, path)]


def chances_of(draft: DraftTree, path: Sequence[int]) -> bytes:
    """The chance of each token that a commit tells of, in the same order, in 255ths."""
    claims = draft.claims()
    return bytes(min(255, round(255 * claims[node])) for node in _shown(draft, path))


def _shown(draft: DraftTree, path: Sequence[int]) -> list[int]:
    return [*path, *draft.longest()[len(path) :]]


def _own_us(draft: DraftTree, sources: Sequence[tuple[str, bool]], source: tuple[str, bool]) -> int:
    """A draft worker says itself what its drafts took."""
    _, own = source
    return to_us(sum(draft.seconds_of(node) for node, each in enumerate(sources) if each == source)) if own else 0


def _sources(draft: DraftTree) -> list[tuple[str, bool]]:
    """Of each node. Messages of draft workers are numbered from 1 on."""
    return [(origin.source, not origin.serial) for origin in map(draft.origin, range(len(draft)))]
