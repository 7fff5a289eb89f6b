"""The way to draft workers, over gRPC. Not here: how they propose, and which drafts a target has. Begin with `links`.

A link is one connection to one worker (`link`, `links`), to none without a lease (`leases`); `sequence` is one sequence
on a link, and says which messages a round verified; `validator` makes a tree of a message.
"""

from outrider.drafting.pool.leases import DraftLeases, ReadLeases, no_leases
from outrider.drafting.pool.links import DraftLinks
from outrider.drafting.pool.sequence import PooledSequence
from outrider.drafting.pool.validator import DraftVocabulary

__all__ = ["DraftLeases", "DraftLinks", "DraftVocabulary", "PooledSequence", "ReadLeases", "no_leases"]
