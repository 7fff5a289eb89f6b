"""Drafters: propose the target's next tokens, for many sequences in one step.

Knows sequences and their committed tokens; not the target, and not the callers.

Not here: drafts that the target makes itself (`outrider.drafting`). Begin with `interface`.
"""

from outrider.drafters.interface import Drafter
from outrider.drafters.loading import load_drafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.sequence import CommitMismatch, DraftSequence
from outrider.drafting.config import ModelConfig

__all__ = [
    "CommitMismatch",
    "DraftSequence",
    "Drafter",
    "ModelConfig",
    "ModelDrafter",
    "load_drafter",
]
