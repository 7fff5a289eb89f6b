"""Heads: small modules that draft from the target's hidden states. The only part of `outrider.drafting` with torch.

Here: the protocol (`interface`), the decoder layers that two kinds share (`layer`), one file for each kind (`mtp`,
`eagle`, `medusa`), the field's checkpoint formats (`loading`), and how they run on an engine of their own (`engine`).
Not here: the engine of the target, whose states come in as tensors. Begin with `interface`.
"""

from outrider.drafting.heads.eagle import Eagle3Head
from outrider.drafting.heads.interface import DraftHead, HeadError, TargetParts
from outrider.drafting.heads.loading import load_head
from outrider.drafting.heads.medusa import MedusaHead
from outrider.drafting.heads.mtp import MtpHead
from outrider.drafting.heads.remote import HeadFeatures
from outrider.drafting.heads.source import HeadDrafts

__all__ = [
    "DraftHead",
    "Eagle3Head",
    "HeadDrafts",
    "HeadError",
    "HeadFeatures",
    "MedusaHead",
    "MtpHead",
    "TargetParts",
    "load_head",
]
