"""Drafters: propose the target's next tokens, for many sequences in one step.

Knows sequences and their committed tokens; not the target, and not the callers.
"""

from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.config import DrafterKind, ModelConfig, NgramConfig
from outrider.drafters.interface import Drafter
from outrider.drafters.loading import load_drafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.sequence import CommitMismatch, Drafted, DraftLimits, DraftSequence, Opening

__all__ = [
    "CombinedDrafter",
    "CommitMismatch",
    "DraftLimits",
    "DraftSequence",
    "Drafted",
    "Drafter",
    "DrafterKind",
    "ModelConfig",
    "ModelDrafter",
    "NgramConfig",
    "NgramDrafter",
    "Opening",
    "load_drafter",
]
