"""Drafters: propose the target's next tokens, for many sequences in one step.

Knows sequences and their committed tokens; not the target, and not the callers.
"""

from outrider.drafters.config import ModelConfig
from outrider.drafters.interface import Drafter
from outrider.drafters.loading import load_drafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.sequence import CommitMismatch, DraftSequence

__all__ = [
    "CommitMismatch",
    "DraftSequence",
    "Drafter",
    "ModelConfig",
    "ModelDrafter",
    "load_drafter",
]
