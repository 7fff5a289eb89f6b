"""The target's side: which drafted tokens it would have said itself, and what it says next.

`p` is the target's distribution at a position given the drafted prefix; `q` what the draft sampled from; `x` its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.speculation.noise import Purpose, gumbel, uniform
from outrider.speculation.params import Q_TOTAL, DraftDistribution, InvalidField, SamplingParams, VerificationMode
from outrider.speculation.sampling import Support, support


@dataclass(slots=True)
class Candidate:
    """One sequence's drafted tokens, to be judged in one step."""

    params: SamplingParams
    mode: VerificationMode
    base_len: int
    """Absolute position of the first judged token, counted from the first prompt token."""
    draft: Sequence[int] = ()
    q: Sequence[DraftDistribution] = ()
    """Ratio mode: one per drafted token."""
    parents: Sequence[int] = ()
    """Tree: each token's parent as an index into draft, -1 for the root. Empty means a chain."""

    def __post_init__(self) -> None:
        if self.mode is VerificationMode.RATIO:
            if self.parents:
                raise InvalidField("parents", "trees are judged in greedy and coupled mode only")
            if len(self.q) != len(self.draft):
                raise InvalidField("q", f"{len(self.q)} distributions for {len(self.draft)} drafted tokens")
            for index, (token_id, q) in enumerate(zip(self.draft, self.q, strict=True)):
                if not q.count_of(token_id):
                    raise InvalidField(f"q[{index}]", f"gives no chance to the drafted token {token_id}")
        if self.parents and len(self.parents) != len(self.draft):
            raise InvalidField("parents", f"{len(self.parents)} parents for {len(self.draft)} drafted tokens")
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise InvalidField("parents", f"token {node} has parent {parent}: a parent comes before its child")

    @property
    def num_rows(self) -> int:
        return len(self.draft) + 1

    def children(self, node: int) -> list[int]:
        """Indices of the tokens drafted after `node`; -1 is the root."""
        if self.parents:
            return [child for child, parent in enumerate(self.parents) if parent == node]
        return [node + 1] if node + 1 < len(self.draft) else []


@dataclass(slots=True)
class Verdict:
    """What the target says: the accepted drafts and one token of its own."""

    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    num_verified: int = 0
    """Positions judged: the accepted ones and the first rejected one, if any."""
    path: list[int] = field(default_factory=list)
    """The candidate's rows after the first that belong to the accepted tokens: 1, 2, … for a chain."""


def verify(logits: Tensor, candidates: Sequence[Candidate]) -> list[Verdict]:
    """Judges every candidate. logits [sum of num_rows, vocab], candidates in order.

    Row 0 of a candidate follows its last committed token, row j its drafted token j - 1.
    """
    favourites: list[int] = logits.argmax(-1).tolist()
    verdicts = []
    start = 0
    for candidate in candidates:
        rows = slice(start, start + candidate.num_rows)
        judge = _judge_ratio if candidate.mode is VerificationMode.RATIO else _judge_by_choice
        verdicts.append(judge(candidate, logits[rows], favourites[rows]))
        start += candidate.num_rows
    return verdicts


def _judge_by_choice(candidate: Candidate, logits: Tensor, favourites: Sequence[int]) -> Verdict:
    """Greedy and coupled: the target's choice at each node is fixed; a draft is accepted when it is that choice."""
    verdict = Verdict()
    node = -1
    while True:
        position = candidate.base_len + verdict.num_accepted
        choice = _choose(candidate, logits[node + 1], favourites[node + 1], position)
        verdict.token_ids.append(choice)
        children = candidate.children(node)
        match = next((child for child in children if candidate.draft[child] == choice), None)
        verdict.num_verified += bool(children)
        if match is None:
            return verdict
        verdict.num_accepted += 1
        verdict.path.append(match + 1)
        node = match


def _choose(candidate: Candidate, logits: Tensor, favourite: int, position: int) -> int:
    if candidate.mode is VerificationMode.GREEDY or candidate.params.greedy:
        return favourite
    p = support(logits, candidate.params)
    index = int((p.probs.log() + gumbel(candidate.params.seed, position, p.token_ids)).argmax())
    return int(p.token_ids[index])


def _judge_ratio(candidate: Candidate, logits: Tensor, favourites: Sequence[int]) -> Verdict:
    """Accept x with probability min(1, p(x) / q(x)); else sample max(p - q, 0), normalised (Leviathan et al., 1)."""
    verdict = Verdict()
    seed = candidate.params.seed
    for index, token_id in enumerate(candidate.draft):
        position = candidate.base_len + index
        p = _distribution(candidate, logits[index], favourites[index])
        verdict.num_verified += 1
        q = candidate.q[index]
        # Strict: p(x) = 0 must never be accepted, not even at u = 0.
        u = uniform(seed, position, Purpose.ACCEPT)
        if not u * q.count_of(token_id) / Q_TOTAL < p.prob_of(token_id):
            verdict.token_ids.append(recover(p, q, uniform(seed, position, Purpose.RECOVER)))
            return verdict
        verdict.token_ids.append(token_id)
        verdict.num_accepted += 1
        verdict.path.append(index + 1)
    bonus = _distribution(candidate, logits[-1], favourites[-1])
    position = candidate.base_len + len(candidate.draft)
    verdict.token_ids.append(bonus.draw(uniform(seed, position, Purpose.BONUS)))
    return verdict


def _distribution(candidate: Candidate, logits: Tensor, favourite: int) -> Support:
    if candidate.params.greedy:
        return Support(torch.tensor([favourite]), torch.ones(1, dtype=torch.float64))
    return support(logits, candidate.params)


def recover(p: Support, q: DraftDistribution, u: float) -> int:
    """The token at quantile u of max(p - q, 0), normalised."""
    residual = p.probs.clone()
    ids = torch.tensor(q.token_ids, dtype=torch.int64)
    counts = torch.tensor(q.counts, dtype=torch.float64)
    at = torch.searchsorted(p.token_ids, ids)
    inside = at < len(p.token_ids)
    inside &= p.token_ids[at.clamp_max(len(p.token_ids) - 1)] == ids
    residual[at[inside]] -= counts[inside] / Q_TOTAL
    residual.clamp_min_(0)
    if float(residual.sum()) <= 0:
        # p = q up to rounding: a rejection has probability 0 but for the last bit.
        return p.draw(u)
    return Support(p.token_ids, residual).draw(u)
