"""Heads: small modules that draft from the target's hidden states.

Here: the protocol (`interface`), the decoder layers that two kinds share (`layer`), one file for each kind (`mtp`,
`eagle`, `medusa`, `dflash`), the field's checkpoint formats (`loading`), and how they run on an engine of their own
(`engine`, `decoders`; on GPUs `fused_gpu` and `recorded`).
Not here: the engine of the target, whose states come in as tensors. Begin with `interface`.
"""

from outrider.heads.dflash import DFlashHead
from outrider.heads.eagle import Eagle3Head
from outrider.heads.interface import DraftHead, HeadError, TargetParts
from outrider.heads.loading import load_head
from outrider.heads.medusa import MedusaHead
from outrider.heads.mtp import MtpHead
from outrider.heads.remote import HeadFeatures
from outrider.heads.source import HeadDrafts

__all__ = [
    "DFlashHead",
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
