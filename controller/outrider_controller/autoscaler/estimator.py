"""The estimated saving of each tenant's drafts: decayed evidence, shrunk towards the mean of all tenants.

A tenant's evidence decays with its own rounds, not with time: after an idle night it still counts. Stored as columns,
not objects: ten thousand tenants are planned every second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider_controller.autoscaler import tuning
from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey

Column = np.ndarray[Any, np.dtype[Any]]

Z_80 = 1.2816
"""80 % of a normal distribution lies within this many standard errors."""

_SUMS = ("rounds", "tokens", "saved", "saved_squared", "late", "verified", "accepted")


@dataclass(frozen=True, slots=True)
class Estimate:
    """One entry per evidence key."""

    saving: Column
    """Saving of a round, in tokens."""
    error: Column
    """Standard error of `saving`."""
    tokens: Column
    """Tokens committed per round."""

    @property
    def lower(self) -> Column:
        return np.asarray(self.saving - Z_80 * self.error)

    @property
    def upper(self) -> Column:
        return np.asarray(self.saving + Z_80 * self.error)


class SavingEstimator:
    """Estimates for every key that was ever seen or expected. Row i of every column belongs to `keys[i]`."""

    def __init__(self) -> None:
        self.keys: list[EvidenceKey] = []
        self.cells: list[Cell] = []
        """In order of their first key. Only grows."""
        self._rows: dict[EvidenceKey, int] = {}
        self._cell_numbers: dict[Cell, int] = {}
        self._groups: dict[tuple[str, str], int] = {}
        self._columns: dict[str, Column] = {name: np.zeros(64) for name in (*_SUMS, "seen")}
        self._cell_of: Column = np.zeros(64, dtype=np.int64)
        self._group_of: Column = np.zeros(64, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.keys)

    def column(self, name: str) -> Column:
        """Decayed sums of a field of Evidence; `seen`: all rounds ever, without decay."""
        return self._columns[name][: len(self)]

    @property
    def cell_of(self) -> Column:
        """Number of each key's cell."""
        return self._cell_of[: len(self)]

    @property
    def groups(self) -> list[tuple[str, str]]:
        """Targets with their drafts."""
        return list(self._groups)

    @property
    def group_of(self) -> Column:
        """Number of each key's target and draft in `groups`."""
        return self._group_of[: len(self)]

    def expect(self, keys: Iterable[EvidenceKey]) -> None:
        """Adds rows for keys that may come, so that they are planned for."""
        for key in keys:
            self._row(key)

    def learn(self, evidence: Mapping[EvidenceKey, Evidence]) -> None:
        for key, news in evidence.items():
            if news.rounds <= 0:
                continue
            row = self._row(key)
            kept = 0.5 ** (news.rounds / tuning.HALF_LIFE_ROUNDS)
            for name in _SUMS:
                column = self._columns[name]
                column[row] = kept * column[row] + getattr(news, name)
            self._columns["seen"][row] += news.rounds

    def estimate(self) -> Estimate:
        """Per key: its own evidence, shrunk towards that of all tenants with the same target and draft."""
        rounds, saved = self.column("rounds"), self.column("saved")
        groups = self.group_of
        count = len(self._groups)
        known = np.bincount(groups, weights=rounds, minlength=count)
        usual = np.bincount(groups, weights=saved, minlength=count) + tuning.FIRST_ROUNDS * tuning.FIRST_SAVING
        usual = (usual / (known + tuning.FIRST_ROUNDS))[groups]
        saving = (saved + tuning.FIRST_ROUNDS * usual) / (rounds + tuning.FIRST_ROUNDS)
        own = np.maximum(rounds, 1.0)
        variance = np.maximum(self.column("saved_squared") / own - np.square(saved / own), tuning.MIN_VARIANCE)
        tokens = (self.column("tokens") + tuning.FIRST_ROUNDS) / (rounds + tuning.FIRST_ROUNDS)
        return Estimate(saving, np.sqrt(variance / (rounds + tuning.FIRST_ROUNDS)), np.maximum(tokens, 1.0))

    def of(self, key: EvidenceKey) -> Sequence[float]:
        """The sums of one key, in the order of `STATE`."""
        row = self._rows.get(key)
        return [0.0] * len(STATE) if row is None else [float(self._columns[name][row]) for name in STATE]

    def of_cell(self, cell: Cell) -> Iterator[tuple[EvidenceKey, Sequence[float]]]:
        """The sums of each draft for which the cell has evidence."""
        for target, draft in self._groups:
            if target == cell.target and (values := self.of(key := EvidenceKey(*cell, draft)))[-1]:
                yield key, values

    def without(self, tenants: Collection[str]) -> SavingEstimator:
        """A copy without these tenants."""
        left = SavingEstimator()
        left.restore((key, self.of(key)) for key in self.keys if key.tenant not in tenants)
        return left

    def restore(self, state: Iterable[tuple[EvidenceKey, Sequence[float]]]) -> None:
        """Takes another process's sums, which replace those of the same keys here."""
        for key, values in state:
            row = self._row(key)
            for name, value in zip(STATE, values, strict=True):
                self._columns[name][row] = value

    def _row(self, key: EvidenceKey) -> int:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self.keys)
            self._grow(row + 1)
            self.keys.append(key)
            self._cell_of[row] = self._cell_number(key.cell)
            self._group_of[row] = self._groups.setdefault((key.target, key.draft), len(self._groups))
        return row

    def _cell_number(self, cell: Cell) -> int:
        number = self._cell_numbers.get(cell)
        if number is None:
            number = self._cell_numbers[cell] = len(self.cells)
            self.cells.append(cell)
        return number

    def _grow(self, size: int) -> None:
        if size <= len(self._cell_of):
            return
        self._columns = {name: _doubled(column) for name, column in self._columns.items()}
        self._cell_of, self._group_of = _doubled(self._cell_of), _doubled(self._group_of)


STATE = (*_SUMS, "seen")


def _doubled(column: Column) -> Column:
    return np.concatenate([column, np.zeros_like(column)])
