"""The rows of a step that are sampled: laid out in columns on the host, read as settings on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.options.sampling import Q_TOTAL, Q_WIDTH, SamplingParams, VerificationMode
from outrider.speculation.candidates import Candidate
from outrider.speculation.columns import Columns
from outrider.speculation.noise import Purpose, gumbel_keys, uniform

_WIDE, _NARROW = 1 << 26, 1 << 23
"""Most logits that are sampled at once, with a few tensors of float32 as large, and with many of float64."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How rows are sampled: tensors on the device with one entry per row, int64 unless noted."""

    rows: Tensor
    temperature: Tensor
    """float64"""
    top_k: Tensor
    """The vocabulary's size when all are kept."""
    top_p: Tensor
    """float64"""
    log_min_p: Tensor
    """float64"""
    more: dict[str, Tensor]
    ranks: bool
    """Whether they may be cut by rank."""
    sums_all: bool
    """Whether any row uses top-p without top-k."""

    def chunks(self, width: int, *, wide: bool = False) -> Iterator[Settings]:
        """Parts that bound the memory. `width`: of the logits; `wide`: for the way that needs little."""
        size = max(1, (_WIDE if wide else _NARROW) // width)
        if len(self.rows) <= size:
            yield self
            return
        for start in range(0, self.rows.shape[0], size):
            cut = slice(start, start + size)
            yield Settings(
                self.rows[cut],
                self.temperature[cut],
                self.top_k[cut],
                self.top_p[cut],
                self.log_min_p[cut],
                {name: column[cut] for name, column in self.more.items()},
                self.ranks,
                self.sums_all,
            )


@dataclass(slots=True)
class Sampled:
    """Rows of logits that are sampled by one rule. Rows that follow one another may share their parameters."""

    name: str
    ranked: bool
    """Whether the tokens that can follow are among the likeliest, as far as one can tell from the parameters."""
    params: list[SamplingParams] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Rows that share each of these."""
    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Of the token that the row chooses."""
    drafted: list[int] = field(default_factory=list)
    """Ratio: the drafted token, or any token if none is drafted."""
    bound: list[float] = field(default_factory=list)
    """Ratio: the drafted token is accepted when its p exceeds this; infinite if none is drafted."""
    q_ids: list[tuple[int, ...]] = field(default_factory=list)
    q_counts: list[tuple[int, ...]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def add(self, rows: Sequence[int], params: SamplingParams, positions: Sequence[int] = ()) -> None:
        self.params.append(params)
        self.counts.append(len(rows))
        self.rows += rows
        self.positions += positions

    def lay_out(self, columns: Columns, width: int) -> None:
        """`width`: of the logits."""
        params, counts = self.params, self.counts
        real = np.array([(p.temperature, p.top_p, max(p.min_p, 1e-300)) for p in params]).T
        real[2] = np.log(real[2])
        top_k = np.array([p.top_k if 0 < p.top_k < width else width for p in params])
        found: dict[str, NDArray[np.generic]] = {
            "rows": np.array(self.rows, dtype=np.int64),
            "real": np.repeat(real, counts, axis=1),
            "top_k": np.repeat(top_k, counts),
        }
        if self.positions:
            seeds = np.repeat(np.array([p.seed for p in params], dtype=np.uint64), counts)
            found["keys"] = gumbel_keys(seeds, np.array(self.positions, dtype=np.uint64), self._purposes())
        if self.bound:
            found |= {"drafted": np.array(self.drafted), "bound": np.array(self.bound)}
            found |= {"q_ids": _padded(self.q_ids), "q_counts": _padded(self.q_counts)}
        columns.add(**{f"{self.name}.{name}": column for name, column in found.items()})

    def _purposes(self) -> NDArray[np.uint64]:
        """Of each row's noise."""
        if not self.bound:
            return np.full(len(self.rows), Purpose.GUMBEL, dtype=np.uint64)
        return np.where(np.isinf(self.bound), Purpose.BONUS, Purpose.RECOVER).astype(np.uint64)

    def settings(self, sent: Mapping[str, Tensor]) -> Settings:
        """What was laid out, on the device."""
        mark = f"{self.name}."
        columns = {name.removeprefix(mark): each for name, each in sent.items() if name.startswith(mark)}
        rows, (temperature, top_p, log_min_p), top_k = map(columns.pop, ("rows", "real", "top_k"))
        sums_all = any(p.top_p < 1 and not p.top_k for p in self.params)
        return Settings(rows, temperature, top_k, top_p, log_min_p, columns, self.ranked, sums_all)


def _pair(name: str) -> tuple[Sampled, Sampled]:
    return Sampled(f"{name}_free", ranked=False), Sampled(f"{name}_ranked", ranked=True)


@dataclass(slots=True)
class SampledRows:
    """The rows of a step, by the rule that chooses their tokens. Greedy rows need no entry."""

    coupled: tuple[Sampled, Sampled] = field(default_factory=lambda: _pair("coupled"))
    """Of all tokens; of the likeliest."""
    ratio: tuple[Sampled, Sampled] = field(default_factory=lambda: _pair("ratio"))

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> SampledRows:
        found, start = cls(), 0
        for candidate in candidates:
            if candidate.by_ratio:
                found._add_ratio(candidate, start)
            elif candidate.mode is VerificationMode.COUPLED and not candidate.params.greedy:
                rows = range(start, start + candidate.num_rows)
                found.add_coupled(rows, candidate.params, candidate.positions)
            start += candidate.num_rows
        return found

    def add_coupled(self, rows: Sequence[int], params: SamplingParams, positions: Sequence[int]) -> None:
        self.coupled[params.top_p < 1 or params.top_k > 0].add(rows, params, positions)

    def lay_out(self, columns: Columns, width: int) -> None:
        for sampled in (*self.coupled, *self.ratio):
            if sampled:
                sampled.lay_out(columns, width)

    def _add_ratio(self, candidate: Candidate, start: int) -> None:
        params, draft = candidate.params, candidate.draft
        # All weights count here, and a sum in float32 does not tell which are just above min-p.
        ratio = self.ratio[params.top_p < 1 or params.top_k > 0 or params.min_p > 0]
        ratio.add(range(start, start + candidate.num_rows), params, candidate.positions)
        for position, (token_id, q) in enumerate(zip(draft.token_ids, draft.q, strict=True), draft.base_len):
            ratio.drafted.append(token_id)
            ratio.bound.append(uniform(params.seed, position, Purpose.ACCEPT) * q.count_of(token_id) / Q_TOTAL)
            ratio.q_ids.append(q.token_ids)
            ratio.q_counts.append(q.counts)
        ratio.drafted.append(0)
        ratio.bound.append(np.inf)
        ratio.q_ids.append(())
        ratio.q_counts.append(())


def _padded(lists: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """[rows, Q_WIDTH], padded with zeros."""
    table = np.zeros((len(lists), Q_WIDTH), dtype=np.int64)
    for row, values in enumerate(lists):
        table[row, : len(values)] = values
    return table
