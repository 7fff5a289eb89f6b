"""Launches on a GPU what chooses tokens, each form once: kernels are compiled when they are first launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.options.logits import LogitsOptions
from outrider.options.sampling import Q_TOTAL, DraftDistribution, SamplingParams, VerificationMode
from outrider.speculation.batched import verify_batched
from outrider.speculation.candidates import Candidate
from outrider.speculation.choosing import can_choose
from outrider.speculation.logits import LogitsProcessor
from outrider.speculation.proposals import Proposal
from outrider.tree import DraftTree

_FORMS = (
    (SamplingParams(temperature=0), VerificationMode.GREEDY),
    (SamplingParams(temperature=1, top_k=2, top_p=0.5, min_p=0.1), VerificationMode.COUPLED),
    (SamplingParams(temperature=1, top_k=2, top_p=0.5, min_p=0.1), VerificationMode.RATIO),
)
_DRAFT = DraftTree(1, (0,), q=(DraftDistribution((0,), (Q_TOTAL,)),))


def warm_up_verdicts(logits: Tensor) -> None:
    """logits [rows, vocabulary]: what they are does not matter. Without the kernels there is nothing to launch."""
    if not can_choose():
        return
    zeros = torch.zeros(2, logits.shape[1], dtype=logits.dtype, device=logits.device)
    changed = LogitsProcessor(LogitsOptions(presence_penalty=1.0), [0])
    for params, mode in _FORMS:
        for processor in (None, changed):
            verify_batched(zeros, [Candidate(params, mode, _DRAFT, processor)])


def warm_up_proposals(logits: Tensor, propose: Callable[..., Sequence[Proposal]], num_others: int) -> None:
    """As warm_up_verdicts. `propose`: as a draft's vocabulary does."""
    if not can_choose():
        return
    zeros = torch.zeros_like(logits[:1])
    for params, mode in _FORMS:
        propose(zeros, [params], [mode], [1], num_others=num_others)
