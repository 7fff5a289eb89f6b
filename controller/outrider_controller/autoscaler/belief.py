"""What is believed of each pairing's saving: evidence that fades with rounds at work, drawn towards what is usual.

Evidence of a tenant fades only as newer evidence of the same tenant comes: who was away for a night is not forgotten.
Columns, not objects: ten thousand tenants are looked at every second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider_controller.autoscaler.evidence import Cell, Evidence, Pairing

Column = np.ndarray[Any, np.dtype[Any]]

HALF_LIFE_ROUNDS = 300.0
# Of a tenant with many requests that is a second. What comes at once makes at most so much forgotten.
_MIN_KEPT = 0.93
# What is usual at a target counts as much as so many rounds of a tenant's own.
_USUAL_ROUNDS = 20.0
# Before a target has shown anything at all.
_FIRST_SAVING, _FIRST_ROUNDS = 0.5, 50.0
# Rounds of one request are alike, so evidence is worth less than as many independent rounds.
_MIN_VARIANCE = 1.5
_ALIKE_ROUNDS = 4.0
# News so many standard errors away from what was believed make three quarters of that forgotten at once.
_SURPRISE, _KEPT_AFTER_A_SURPRISE = 4.0, 0.25
_FIRST_TOKENS = 2.0
Z_80 = 1.2816
"""Of a normal distribution: 80 % lies between minus and plus so many standard errors."""

_SUMS = ("rounds", "tokens", "saved", "saved_squared", "late", "verified", "accepted")


@dataclass(frozen=True, slots=True)
class Estimate:
    """One entry per pairing."""

    saving: Column
    """Of a round, in plain rounds."""
    error: Column
    """Its standard error."""
    tokens: Column
    """Committed by a round."""

    @property
    def lower(self) -> Column:
        return np.asarray(self.saving - Z_80 * self.error)

    @property
    def upper(self) -> Column:
        return np.asarray(self.saving + Z_80 * self.error)


class Beliefs:
    """Of every pairing that was ever seen or expected. Row i of every column belongs to `pairings[i]`."""

    def __init__(self) -> None:
        self.pairings: list[Pairing] = []
        self.cells: list[Cell] = []
        """In order of their first pairing. Only ever longer."""
        self._rows: dict[Pairing, int] = {}
        self._cell_numbers: dict[Cell, int] = {}
        self._groups: dict[tuple[str, str], int] = {}
        self._columns: dict[str, Column] = {name: np.zeros(64) for name in (*_SUMS, "seen")}
        self._cell_of: Column = np.zeros(64, dtype=np.int64)
        self._group_of: Column = np.zeros(64, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.pairings)

    def column(self, name: str) -> Column:
        """Faded sums, by a name of Evidence; `seen`: rounds ever, not faded."""
        return self._columns[name][: len(self)]

    @property
    def cell_of(self) -> Column:
        """Number of each pairing's cell."""
        return self._cell_of[: len(self)]

    @property
    def groups(self) -> list[tuple[str, str]]:
        """Targets with their drafts."""
        return list(self._groups)

    @property
    def group_of(self) -> Column:
        """Number of each pairing's target and draft in `groups`."""
        return self._group_of[: len(self)]

    def expect(self, pairings: Iterable[Pairing]) -> None:
        """Makes room for what may come, so that it is planned for."""
        for pairing in pairings:
            self._row(pairing)

    def learn(self, evidence: Mapping[Pairing, Evidence]) -> None:
        for pairing, news in evidence.items():
            if news.rounds <= 0:
                continue
            row = self._row(pairing)
            kept = max(_MIN_KEPT, 0.5 ** (news.rounds / HALF_LIFE_ROUNDS))
            if self._surprises(row, news):
                kept = min(kept, _KEPT_AFTER_A_SURPRISE)
            for name in _SUMS:
                column = self._columns[name]
                column[row] = kept * column[row] + getattr(news, name)
            self._columns["seen"][row] += news.rounds

    def _surprises(self, row: int, news: Evidence) -> bool:
        """Whether the text or the machine must have changed: what is new is far from what was believed."""
        rounds = self._columns["rounds"][row]
        if rounds < _USUAL_ROUNDS:
            return False
        believed = self._columns["saved"][row] / rounds
        variance = max(self._columns["saved_squared"][row] / rounds - believed * believed, _MIN_VARIANCE)
        error = np.sqrt(variance / rounds + variance * _ALIKE_ROUNDS / news.rounds)
        return bool(abs(news.saved / news.rounds - believed) > _SURPRISE * error)

    def estimate(self) -> Estimate:
        """Each pairing's own evidence, and that of all tenants with the same target and draft as far as it has none."""
        rounds, saved = self.column("rounds"), self.column("saved")
        groups = self.group_of
        count = len(self._groups)
        known = np.bincount(groups, weights=rounds, minlength=count)
        usual = np.bincount(groups, weights=saved, minlength=count) + _FIRST_ROUNDS * _FIRST_SAVING
        usual = (usual / (known + _FIRST_ROUNDS))[groups]
        saving = (saved + _USUAL_ROUNDS * usual) / (rounds + _USUAL_ROUNDS)
        own = np.maximum(rounds, 1.0)
        variance = np.maximum(self.column("saved_squared") / own - np.square(saved / own), _MIN_VARIANCE)
        tokens = (self.column("tokens") + _USUAL_ROUNDS * _FIRST_TOKENS) / (rounds + _USUAL_ROUNDS)
        return Estimate(saving, np.sqrt(variance / (rounds + _USUAL_ROUNDS)), np.maximum(tokens, 1.0))

    def of(self, pairing: Pairing) -> Sequence[float]:
        """What is known of one pairing, in order of `STATE`."""
        row = self._rows.get(pairing)
        return [0.0] * len(STATE) if row is None else [float(self._columns[name][row]) for name in STATE]

    def of_cell(self, cell: Cell) -> Iterator[tuple[Pairing, Sequence[float]]]:
        """Of every draft that the cell has shown something of."""
        for target, draft in self._groups:
            if target == cell.target and (values := self.of(pairing := Pairing(*cell, draft)))[-1]:
                yield pairing, values

    def without(self, tenants: Collection[str]) -> Beliefs:
        """What is left where those are forgotten."""
        left = Beliefs()
        left.restore((pairing, self.of(pairing)) for pairing in self.pairings if pairing.tenant not in tenants)
        return left

    def restore(self, state: Iterable[tuple[Pairing, Sequence[float]]]) -> None:
        """Takes what another process knew, in the place of what is known here of the same pairings."""
        for pairing, values in state:
            row = self._row(pairing)
            for name, value in zip(STATE, values, strict=True):
                self._columns[name][row] = value

    def _row(self, pairing: Pairing) -> int:
        row = self._rows.get(pairing)
        if row is None:
            row = self._rows[pairing] = len(self.pairings)
            self._grow(row + 1)
            self.pairings.append(pairing)
            self._cell_of[row] = self._cell_number(pairing.cell)
            self._group_of[row] = self._groups.setdefault((pairing.target, pairing.draft), len(self._groups))
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
