"""Does speculation change the distribution? An experiment on a small-vocabulary model, with faults that it must find.

The model is a Markov chain: p and q at a position depend on the previous token, so every emitted token is one draw from
a known distribution, and effects of an accepted block on the next token also show. The shipped `propose` and `verify`
make the text; numpy code that is independent of them computes the expected distribution.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from outrider.speculation import (
    Q_TOTAL,
    Candidate,
    DraftDistribution,
    Proposal,
    SamplingParams,
    VerificationMode,
    choosing,
    propose,
    verify,
)
from outrider.speculation.noise import Purpose, gumbel, uniform
from outrider.speculation.sampling import Support
from outrider.tree import DraftTree
from scipy import stats

VOCAB = 24
DRAFT_TOKENS = 3
SAMPLING = SamplingParams(temperature=0.9, top_p=0.97, seed=11)
_SIGNIFICANCE = 1e-3


class Fault(enum.StrEnum):
    """Mistakes that published engines have made. The shipped code has none of them."""

    NONE = "none"
    NOISE_REUSED = "recovery re-uses the draft's noise"
    Q_TRUNCATED = "draft samples full q, verifier sees top-8"
    RECOVERY_FROM_P = "recovery samples p, not the residual"
    MATCH_TAKES_OVER = "a match takes over a drawn guess that it begins with"
    LENGTH_FOLLOWS_THE_DRAW = "what is drawn decides how much is drawn with it"
    PRICED_BY_THE_DRAW = "whether a row is worth its price depends on what was drawn"
    STATE_BY_STEPS = "penalties and masks follow one token a step"
    MASK_OF_ANOTHER_POSITION = "a drafted token's mask is that of the position before"
    REJECTED_COUNTED = "penalties count rejected tokens"


@dataclass(frozen=True, slots=True)
class DistributionResult:
    """One run of the experiment."""

    mode: str
    fault: str
    draws: int
    """Tokens compared with their distribution."""
    accepted: float
    """Accepted / verified."""
    total_variation: float
    """Distance between observed and expected frequencies, mean over contexts weighted by their draws."""
    total_variation_bound: float
    """Bound that a correct sampler exceeds once in a million runs (expectation plus McDiarmid's bound)."""
    chi_square: float
    degrees_of_freedom: int
    p_value: float

    @property
    def passed(self) -> bool:
        return self.p_value > _SIGNIFICANCE and self.total_variation < self.total_variation_bound


def run_experiment(
    mode: VerificationMode = VerificationMode.RATIO,
    *,
    draws: int = 200_000,
    fault: Fault = Fault.NONE,
    speculate: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DistributionResult:
    """Emits `draws` tokens and compares them with the target's own distribution."""
    model = Models.make()
    counts = np.zeros((VOCAB, VOCAB))
    verified = accepted = 0
    text = _Text(model, mode, fault, speculate)
    with _planted(fault):
        done = 0
        while done < draws:
            before = text.last
            row = text.round()
            for token_id in row.token_ids:
                counts[before, token_id] += 1
                before = token_id
            done += len(row.token_ids)
            verified += row.num_verified
            accepted += row.num_accepted
            progress(min(done, draws), draws)
    return compare_counts(counts, model.expected(), mode, fault, accepted / max(verified, 1))


@dataclass(slots=True)
class Models:
    """Logits of target and draft after each token, [VOCAB, VOCAB]."""

    target: torch.Tensor
    draft: torch.Tensor

    @classmethod
    def make(cls) -> Models:
        generator = torch.Generator().manual_seed(4)
        target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
        # Near enough that about half is accepted, and far enough that a biased recovery shows.
        return cls(target, target + torch.randn(VOCAB, VOCAB, generator=generator))

    def expected(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """[context, token]: the target's distribution under SAMPLING."""
        logits = self.target.numpy().astype(np.float64) / SAMPLING.temperature
        probs = np.exp(logits - logits.max(1, keepdims=True))
        probs /= probs.sum(1, keepdims=True)
        for row in probs:
            order = np.argsort(-row)
            before = np.cumsum(row[order]) - row[order]
            row[order[before >= SAMPLING.top_p]] = 0
        return np.asarray(probs / probs.sum(1, keepdims=True))


@dataclass(slots=True)
class _Text:
    """The text as it grows, round by round."""

    model: Models
    mode: VerificationMode
    fault: Fault
    speculate: bool
    last: int = 0
    length: int = 0

    def round(self) -> Candidate:
        proposals = self._draft() if self.speculate else []
        draft = [p.token_id for p in proposals]
        tree = DraftTree(self.length, tuple(draft), q=tuple(p.q for p in proposals if p.q is not None))
        candidate = Candidate(SAMPLING, self.mode, tree)
        if self.fault is Fault.Q_TRUNCATED:
            # Set after construction, whose check would refuse it.
            tree.q = tuple(map(_truncated, tree.q))
        verify(self.model.target[[self.last, *draft]], [candidate])
        self.last = candidate.token_ids[-1]
        self.length += len(candidate.token_ids)
        return candidate

    def _draft(self) -> list[Proposal]:
        drafted: list[Proposal] = []
        last = self.last
        for offset in range(DRAFT_TOKENS):
            logits = self.model.draft[last : last + 1]
            drafted += propose(logits, [SAMPLING], [self.mode], [self.length + offset])
            last = drafted[-1].token_id
        return drafted


def _truncated(q: DraftDistribution) -> DraftDistribution:
    """The eight likeliest tokens of q, normalized."""
    order = sorted(range(len(q.counts)), key=lambda i: -q.counts[i])[:8]
    counts = [q.counts[i] for i in order]
    scaled = [max(1, count * 65536 // sum(counts)) for count in counts]
    scaled[0] += 65536 - sum(scaled)
    return DraftDistribution(tuple(q.token_ids[i] for i in order), tuple(scaled))


@contextmanager
def _planted(fault: Fault) -> Iterator[None]:
    """Plants the fault in the shipped verification for the block."""
    planted: dict[Fault, dict[str, Callable[..., Any]]] = {
        Fault.NOISE_REUSED: {"gumbel": _draft_noise_for_recovery, "recover": _recover_at_quantile},
        Fault.RECOVERY_FROM_P: {"recover": _recover_from_p},
    }
    faulty = planted.get(fault, {})
    shipped = {name: getattr(choosing, name) for name in faulty}
    vars(choosing).update(faulty)
    try:
        yield
    finally:
        vars(choosing).update(shipped)


def _draft_noise_for_recovery(seed: int, position: int, token_ids: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    if purpose is Purpose.RECOVER:
        return torch.full(token_ids.shape, uniform(seed, position, Purpose.DRAFT))
    return gumbel(seed, position, token_ids, purpose)


def _recover_at_quantile(p: Support, q: DraftDistribution, noise: torch.Tensor) -> int:
    """As the draft drew its token, which noise has the number of."""
    q_of = torch.tensor([q.count_of(token_id) / Q_TOTAL for token_id in p.token_ids.tolist()])
    mass = (p.probs - q_of).clamp_min(0).cumsum(0)
    return int(p.token_ids[torch.searchsorted(mass, float(noise[0]) * float(mass[-1]), right=True)])


def _recover_from_p(p: Support, q: DraftDistribution, noise: torch.Tensor) -> int:
    return p.draw(noise)


def compare_counts(
    counts: np.ndarray[Any, np.dtype[np.float64]],
    expected: np.ndarray[Any, np.dtype[np.float64]],
    mode: VerificationMode,
    fault: Fault,
    accepted: float,
) -> DistributionResult:
    draws = int(counts.sum())
    rows = counts.sum(1, keepdims=True)
    wanted = expected * rows
    distance = 0.5 * np.abs(counts - wanted).sum() / draws
    # Mean absolute deviation of a binomial, summed over cells (normal approximation).
    mean_distance = 0.5 * np.sqrt(2 / np.pi * wanted * (1 - expected)).sum() / draws
    chi_square, freedom, impossible = 0.0, 0, 0.0
    for seen, want in zip(counts, wanted, strict=True):
        impossible += seen[want == 0].sum()
        cells = _cells(seen, want)
        chi_square += float(sum((observed - mean) ** 2 / mean for observed, mean in cells))
        freedom += max(0, len(cells) - 1)
    p_value = 0.0 if impossible else float(stats.chi2.sf(chi_square, freedom))
    bound = float(mean_distance + np.sqrt(np.log(1e6) / (2 * draws)))
    return DistributionResult(
        mode.value, fault.value, draws, accepted, float(distance), bound, chi_square, freedom, p_value
    )


def _cells(seen: np.ndarray[Any, np.dtype[np.float64]], want: np.ndarray[Any, np.dtype[np.float64]]) -> list[Any]:
    """(observed, expected) counts of one context; rare tokens share a cell, so that each expects at least 5."""
    order = np.argsort(-want)
    cells: list[Any] = []
    for token in order[want[order] > 0]:
        if cells and cells[-1][1] < 5:
            cells[-1] += (seen[token], want[token])
        else:
            cells.append(np.array([seen[token], want[token]]))
    if len(cells) > 1 and cells[-1][1] < 5:
        last = cells.pop()
        cells[-1] += last
    return cells if cells and cells[-1][1] >= 5 else []
