"""Drafts of the pool of draft workers, over gRPC. Not here: how they are proposed. Begin with `client`.

A link is one connection to one worker (`link`, `links`), to none without a lease (`leases`); `sequence` is one sequence
on a link, and says which messages a round verified; `validator` makes a tree of a message.
"""

from outrider.drafting.pool.client import PoolDrafts, PoolListener
from outrider.drafting.pool.leases import DraftLeases, ReadLeases, no_leases
from outrider.drafting.pool.sequence import DraftVocabulary

__all__ = ["DraftLeases", "DraftVocabulary", "PoolDrafts", "PoolListener", "ReadLeases", "no_leases"]
