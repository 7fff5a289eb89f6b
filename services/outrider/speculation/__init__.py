"""Speculative decoding's mathematics: sampling, noise, drafting, verification. Pure functions, no I/O.

Sources: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) for ratio mode;
Daliri et al. 2024 (arXiv 2408.07978) for coupled mode.

Not here: models and their KV cache (`outrider.engine`). Begin with `verification`.
"""

from outrider.options.logits import LogitsOptions
from outrider.options.sampling import (
    Q_TOTAL,
    DraftDistribution,
    SamplingParams,
    VerificationMode,
)
from outrider.speculation.candidates import Candidate, NotFinite
from outrider.speculation.logits import Grammar, LogitsProcessor, MaskLate
from outrider.speculation.proposals import Proposal, propose
from outrider.speculation.verification import verify

__all__ = [
    "Q_TOTAL",
    "Candidate",
    "DraftDistribution",
    "Grammar",
    "LogitsOptions",
    "LogitsProcessor",
    "MaskLate",
    "NotFinite",
    "Proposal",
    "SamplingParams",
    "VerificationMode",
    "propose",
    "verify",
]
