"""The rows of a step that are sampled, laid out in columns on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.options.sampling import Q_TOTAL, Q_WIDTH, DraftDistribution, SamplingParams, VerificationMode
from outrider.speculation.candidates import Candidate
from outrider.speculation.columns import Columns
from outrider.speculation.noise import Purpose, gumbel_keys, uniform


@dataclass(slots=True)
class Sampled:
    """Rows of logits that are sampled. Rows that follow one another may share their parameters."""

    params: list[SamplingParams] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Rows that share each of these."""
    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Of the token that the row chooses."""
    purposes: list[Purpose] = field(default_factory=list)
    """Of the row's noise."""
    drafted: list[int] = field(default_factory=list)
    """The token whose acceptance is decided by p / q, or any where there is none."""
    bound: list[float] = field(default_factory=list)
    """It is accepted if this is less than its p. Infinite: none is."""
    q: list[DraftDistribution | None] = field(default_factory=list)

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Sampled:
        """Of the rows of a step. Greedy ones need no entry."""
        found, start = cls(), 0
        for candidate in candidates:
            rows = range(start, start + candidate.num_rows)
            if candidate.by_ratio:
                found._add_ratio(rows, candidate)
            elif candidate.mode is VerificationMode.COUPLED and not candidate.params.greedy:
                found.add(rows, candidate.params, candidate.positions)
            start += candidate.num_rows
        return found

    def __bool__(self) -> bool:
        return bool(self.rows)

    def add(self, rows: Sequence[int], params: SamplingParams, positions: Sequence[int]) -> None:
        """Coupled."""
        self._share(rows, params, positions)
        self.purposes += [Purpose.GUMBEL] * len(rows)
        self.drafted += [0] * len(rows)
        self.bound += [np.inf] * len(rows)
        self.q += [None] * len(rows)

    def _add_ratio(self, rows: Sequence[int], candidate: Candidate) -> None:
        params, draft = candidate.params, candidate.draft
        self._share(rows, params, candidate.positions)
        self.purposes += [Purpose.RECOVER] * len(draft) + [Purpose.BONUS]
        self.drafted += [*draft.token_ids, 0]
        for position, (token_id, q) in enumerate(zip(draft.token_ids, draft.q, strict=True), draft.base_len):
            self.bound.append(uniform(params.seed, position, Purpose.ACCEPT) * q.count_of(token_id) / Q_TOTAL)
        self.bound.append(np.inf)
        self.q += [*draft.q, None]

    def _share(self, rows: Sequence[int], params: SamplingParams, positions: Sequence[int]) -> None:
        self.params.append(params)
        self.counts.append(len(rows))
        self.rows += rows
        self.positions += positions

    def lay_out(self, columns: Columns, num_rows: int, width: int) -> None:
        """As `choose_kernel` has them. `num_rows`, `width`: of the logits."""
        if self:
            columns.add(**self.columns(num_rows, width))

    def columns(self, num_rows: int, width: int) -> dict[str, NDArray[np.generic]]:
        """Of at least one row."""
        params, counts = self.params, self.counts
        real = np.array([(p.temperature, p.top_p, max(p.min_p, 1e-300)) for p in params]).T
        real[2] = np.log(real[2])
        top_k = np.array([p.top_k if 0 < p.top_k < width else width for p in params])
        seeds = np.repeat(np.array([p.seed for p in params], dtype=np.uint64), counts)
        keys = gumbel_keys(seeds, np.array(self.positions, np.uint64), np.array(self.purposes, np.uint64))
        rows = np.array(self.rows)
        numbers = np.full(num_rows, -1)
        numbers[rows] = np.arange(len(rows))
        found: dict[str, NDArray[np.generic]] = {
            "numbers": numbers,
            "reals": np.vstack([np.repeat(real, counts, axis=1), self.bound]),
            "integers": np.stack([np.repeat(top_k, counts), keys, self.drafted]),
        }
        if any(self.q):
            found["quotas"] = _padded(self.q)
        return found


def _padded(distributions: Sequence[DraftDistribution | None]) -> NDArray[np.int64]:
    """[rows, 2, Q_WIDTH]: tokens, padded with -1, and counts."""
    table = np.zeros((len(distributions), 2, Q_WIDTH), dtype=np.int64)
    table[:, 0] = -1
    for row, q in enumerate(distributions):
        if q is not None:
            table[row, :, : len(q.token_ids)] = q.token_ids, q.counts
    return table
