"""What a GPU judges and proposes is what a CPU does."""

from __future__ import annotations

import random

import pytest
import torch
from outrider.speculation import Candidate, SamplingParams, VerificationMode, propose
from outrider.speculation.noise import gumbel
from outrider.speculation.proposals import quantize
from outrider.speculation.sampling import support
from outrider.tree import DraftTree

from tests.judged import verify

VOCAB = 32000
PARAMS = [
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.0, top_p=0.9, seed=1 << 63),
    SamplingParams(temperature=1.3, top_k=40, min_p=0.02, seed=5),
]


def test_the_noise_is_the_same_on_both_devices(gpu: torch.device) -> None:
    ids = torch.arange(VOCAB)
    for seed, position in ((0, 1), ((1 << 64) - 1, 4096)):
        on_cpu, on_gpu = gumbel(seed, position, ids), gumbel(seed, position, ids.to(gpu)).cpu()
        assert torch.allclose(on_gpu, on_cpu, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("mode", VerificationMode, ids=lambda mode: mode.value)
def test_verdicts_are_those_of_the_cpu(mode: VerificationMode, gpu: torch.device) -> None:
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    for _ in range(20):
        logits, batch = [], []
        for params in PARAMS:
            count = rng.randint(0, 7)
            rows = torch.randn(count + 1, VOCAB, generator=generator) * 3
            chosen = SamplingParams(temperature=0) if mode is VerificationMode.GREEDY else params
            q = [quantize(support(row, chosen)) for row in rows[:count]] if mode is VerificationMode.RATIO else []
            drafted = [d.token_ids[0] for d in q] if q else rows[:count].argmax(-1).tolist()
            draft = DraftTree(rng.randrange(1, 5000), tuple(drafted), q=tuple(q))
            batch.append(Candidate(chosen, mode, draft))
            logits.append(rows)
        joined = torch.cat(logits)
        assert verify(joined.to(gpu), batch) == verify(joined, batch)


@pytest.mark.parametrize("mode", VerificationMode, ids=lambda mode: mode.value)
def test_proposals_are_those_of_the_cpu(mode: VerificationMode, gpu: torch.device) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    params = [SamplingParams(temperature=0)] * 3 if mode is VerificationMode.GREEDY else PARAMS
    got = propose(logits.to(gpu), params, [mode] * 3, [7, 8, 9])
    for now, want in zip(got, propose(logits, params, [mode] * 3, [7, 8, 9]), strict=True):
        assert now.token_id == want.token_id
        assert now.confidence == pytest.approx(want.confidence, rel=1e-4)
        assert now.q == want.q
