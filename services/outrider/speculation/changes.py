"""What logits processors change in the rows of a step: biases, penalties, masks, bans, in this order.

On a CPU numpy does it, one candidate after another. For a GPU it is laid out in columns; `survey_kernel` applies them,
with equal results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import InvalidRequest, OutriderError, without_frames
from outrider.speculation.candidates import Candidate
from outrider.speculation.columns import Columns
from outrider.speculation.logits import Bias, LogitsProcessor, RowRefused, Seen

COLUMNS = (
    "changes",
    "penalties",
    "biased",
    "biases",
    "seen",
    "counts",
    "prompted",
    "drafted",
    "banned",
    "masks",
)
"""What is laid out, in the order in which `survey_kernel` takes it."""
_NO_IDS, _NO_NUMBERS = np.zeros(0, np.int64), np.zeros(0, np.float32)


@dataclass(slots=True)
class _Change:
    """Of the rows of one candidate. The default changes nothing."""

    num_rows: int
    bias: Bias = (_NO_IDS, _NO_NUMBERS)
    seen: Seen = (_NO_IDS, _NO_NUMBERS, np.zeros(0, np.bool_))
    """Also those that are only drafted."""
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    drafted: list[list[int]] = field(default_factory=list)
    """Of each row: the places among `seen` of the drafted tokens before it."""
    masks: list[bytes | None] = field(default_factory=list)
    """Of each row, up to one that is refused."""
    banned: list[list[int]] = field(default_factory=list)
    refused: RowRefused | None = None

    @classmethod
    def of(cls, candidate: Candidate) -> _Change:
        change, processor = cls(candidate.num_rows), candidate.processor
        if processor is None:
            return change
        if processor.bias is not None:
            change.bias = processor.bias
        if processor.seen is not None:
            change._count(processor, candidate)
        if processor.restricts:
            change._restrict(processor, candidate)
        return change

    def _count(self, processor: LogitsProcessor, candidate: Candidate) -> None:
        """Committed and drafted occurrences are counted together: two subtractions would round differently."""
        seen = processor.seen
        assert seen is not None
        new = [token_id for token_id in dict.fromkeys(candidate.draft.token_ids) if token_id not in seen.at]
        at = seen.at | {token_id: place for place, token_id in enumerate(new, start=len(seen.at))} if new else seen.at
        self.seen, self.penalties = seen.with_new(new), processor.penalties
        self.drafted = [[at[token_id] for token_id in prefix] for prefix in candidate.prefixes()]

    def _restrict(self, processor: LogitsProcessor, candidate: Candidate) -> None:
        for row, prefix in enumerate(candidate.prefixes()):
            try:
                mask = processor.mask(prefix)
                if mask is not None and mask.count(0) == len(mask):
                    raise InvalidRequest("logits.grammar", "allows no token of this model after the text so far")
            except OutriderError as error:
                self.refused = RowRefused(row, without_frames(error))
                return
            self.masks.append(mask)
            self.banned.append(processor.banned(prefix))

    def apply(self, values: NDArray[np.float32]) -> None:
        """values [num_rows, vocab]"""
        ids, added = self.bias
        values[:, ids] += added
        if len(self.seen[0]):
            self._penalise(values)
        for row, mask in zip(values, self.masks, strict=False):
            if mask is not None:
                allowed = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(row), bitorder="little")
                row[allowed == 0] = -np.inf
        for row, banned in zip(values, self.banned, strict=False):
            if banned:
                held = row[banned]
                row[banned] = -np.inf
                # What is allowed takes precedence over bans, so that a token can still be chosen.
                if row.max() == -np.inf:
                    row[banned] = held

    def _penalise(self, values: NDArray[np.float32]) -> None:
        ids, committed, prompted = self.seen
        counts = np.tile(committed, (self.num_rows, 1))
        for row, places in zip(counts, self.drafted, strict=True):
            np.add.at(row, places, 1)
        repetition, frequency, presence = np.array(self.penalties, np.float32)
        value, seen = values[:, ids], counts > 0
        repeated = np.where(value > 0, value / repetition, value * repetition)
        value = np.where(seen | prompted, repeated, value)
        values[:, ids] = value - (counts * frequency + seen * presence)


class Changes:
    """Those of one step."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        some = any(candidate.processor is not None for candidate in candidates)
        self._each = [_Change.of(candidate) for candidate in candidates] if some else []
        self.refused = {number: each.refused for number, each in enumerate(self._each) if each.refused is not None}
        """By number of the candidate. Of its rows only those before the refused one are changed as they should be."""

    def apply(self, logits: Tensor) -> None:
        """Changes float32 logits [rows, vocab] in place, on a CPU."""
        start = 0
        for each in self._each:
            each.apply(logits[start : start + each.num_rows].numpy())
            start += each.num_rows

    def lay_out(self, columns: Columns) -> None:
        """As `survey_kernel` has them."""
        each = self._each
        if not each:
            return
        counts = [change.num_rows for change in each]
        shared = np.array([(len(change.bias[0]), len(change.seen[0])) for change in each]).T
        drafted = [places for change in each for places in _filled(change.drafted, change.num_rows, [])]
        banned = [ids for change in each for ids in _filled(change.banned, change.num_rows, [])]
        masks = [mask for change in each for mask in _filled(change.masks, change.num_rows, None)]
        numbers, table = _joined(masks)
        own = np.array([[len(places) for places in drafted], [len(ids) for ids in banned]])
        of_rows: list[Any] = [_firsts(shared).repeat(counts, 1), shared.repeat(counts, 1), _firsts(own), own, [numbers]]
        columns.add(
            changes=np.concatenate(of_rows),
            penalties=np.array([change.penalties for change in each], np.float32).repeat(counts, 0).T,
            biased=np.concatenate([change.bias[0] for change in each]),
            biases=np.concatenate([change.bias[1] for change in each]),
            seen=np.concatenate([change.seen[0] for change in each]),
            counts=np.concatenate([change.seen[1] for change in each]),
            prompted=np.concatenate([change.seen[2] for change in each]).view(np.uint8),
            drafted=np.array([*chain.from_iterable(drafted)], np.int64),
            banned=np.array([*chain.from_iterable(banned)], np.int64),
            masks=table,
        )


def _filled(found: list[Any], num_rows: int, empty: object) -> list[Any]:
    return found + [empty] * (num_rows - len(found))


def _firsts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each begins among all."""
    return np.cumsum(lengths, axis=1) - lengths


def _joined(masks: Sequence[bytes | None]) -> tuple[list[int], NDArray[np.uint8]]:
    """The number of each row's mask, -1 for none; and each mask once, [masks, bytes]."""
    once = {id(mask): mask for mask in masks if mask is not None}
    numbers = {key: number for number, key in enumerate(once)}
    longest = max(map(len, once.values()), default=0)
    table = np.frombuffer(b"".join(mask.ljust(longest, b"\0") for mask in once.values()), np.uint8)
    return [numbers.get(id(mask), -1) for mask in masks], table.reshape(len(once), longest)


def process(logits: Tensor, candidates: Sequence[Candidate]) -> dict[int, RowRefused]:
    """Changes logits in place. Returns the refusals."""
    changes = Changes(candidates)
    changes.apply(logits)
    return changes.refused
