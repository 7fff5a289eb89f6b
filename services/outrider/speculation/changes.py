"""What logits processors change in a step, for all rows at once: laid out on the host, applied where the logits are.

Each change is that of `logits.py`, at the entries that it names, in the same order: biases, penalties, allowed tokens,
grammars, bans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import InvalidRequest, OutriderError, without_frames
from outrider.speculation.candidates import Candidate
from outrider.speculation.columns import Columns
from outrider.speculation.logits import LogitsProcessor, RowRefused
from outrider.tree import DraftTree


@dataclass(slots=True)
class _Spread:
    """Entries of rows, where all rows of one candidate have the same tokens. Sent once, spread over the rows there."""

    name: str
    spans: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Of each candidate: its first row, its number of rows, its number of entries, and where these begin among those
    that are sent."""
    parts: list[tuple[NDArray[Any], ...]] = field(default_factory=list)
    num_sent: int = 0
    total: int = 0
    """Entries of all rows."""

    def add(self, rows: range, *columns: NDArray[Any]) -> None:
        """`columns`: the tokens, and a number for each of them in each further one."""
        length = len(columns[0])
        self.spans.append((rows.start, len(rows), length, self.num_sent))
        self.parts.append(columns)
        self.num_sent += length
        self.total += length * len(rows)

    def lay_out(self, columns: Columns) -> None:
        if not self.spans:
            return
        spans = np.array(self.spans).T
        counts = spans[1]
        starts, _, lengths, firsts = np.repeat(spans, counts, axis=1)
        place = np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
        # Added to an entry's number among those of all rows, it gives its place among those that are sent.
        shift = firsts - (np.cumsum(lengths) - lengths)
        columns.add(**{f"{self.name}.rows": np.stack([starts + place, lengths, shift])})
        for number, column in enumerate(zip(*self.parts, strict=True)):
            columns.add(**{f"{self.name}.{number}": np.concatenate(column)})

    def spread(self, sent: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Of each entry: the number of its row among `rows`, its row of logits, and its columns."""
        rows, lengths, shift = sent[f"{self.name}.rows"]
        which = torch.repeat_interleave(lengths, output_size=self.total)
        at = torch.arange(self.total, device=rows.device) + shift[which]
        found = [sent[f"{self.name}.{number}"][at] for number in range(len(self.parts[0]))]
        return which, rows[which], found


class Changes:
    """Those of one step."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.refused: dict[int, RowRefused] = {}
        """By number of the candidate. Of its rows only those before the refused one are changed as they should be."""
        self._biases, self._counts, self._kept = _Spread("biases"), _Spread("counts"), _Spread("kept")
        self._penalties: list[tuple[float, float, float]] = []
        """Of each candidate with counts."""
        self._drafted: list[int] = []
        """Entries of counts, one for each time that a drafted token comes before the row."""
        self._masks: list[tuple[int, bytes]] = []
        self._banned: list[tuple[int, int, int]] = []
        """(number of the row among those with bans, row, token)"""
        self._rows_with_bans: list[int] = []
        start = 0
        for number, candidate in enumerate(candidates):
            if candidate.processor is not None:
                self._add(number, start, candidate, candidate.processor)
            start += candidate.num_rows

    def _add(self, number: int, start: int, candidate: Candidate, processor: LogitsProcessor) -> None:
        rows = range(start, start + candidate.num_rows)
        if processor.bias is not None:
            self._biases.add(rows, *processor.bias)
        if processor.seen is not None:
            self._count(rows, processor, candidate.draft)
        if processor.allowed_ids is not None:
            self._kept.add(rows, processor.allowed_ids)
        if not processor.restricts:
            return
        for place, (row, prefix) in enumerate(zip(rows, candidate.prefixes(), strict=True)):
            try:
                mask = processor.mask(prefix)
            except OutriderError as error:
                self.refused[number] = RowRefused(place, without_frames(error))
                return
            if mask is not None:
                if mask.count(0) == len(mask):
                    nothing = InvalidRequest("logits.grammar", "allows no token of this model after the text so far")
                    self.refused[number] = RowRefused(place, nothing)
                    return
                self._masks.append((row, mask))
            if banned := processor.banned(prefix):
                self._banned += [(len(self._rows_with_bans), row, token_id) for token_id in banned]
                self._rows_with_bans.append(row)

    def _count(self, rows: range, processor: LogitsProcessor, draft: DraftTree) -> None:
        """Committed and drafted occurrences are counted together: two subtractions would round differently."""
        seen, entry = processor.seen, self._counts.total
        assert seen is not None
        new = [token_id for token_id in dict.fromkeys(draft.token_ids) if token_id not in seen.at]
        at = seen.at | {token_id: place for place, token_id in enumerate(new, start=len(seen.at))} if new else seen.at
        places, length = [at[token_id] for token_id in draft.token_ids], len(at)
        self._drafted += [entry + row * length + places[node] for row, node in _drafted_before(draft)]
        self._counts.add(rows, *seen.with_new(new))
        self._penalties.append(processor.penalties)

    def lay_out(self, columns: Columns) -> None:
        for spread in (self._biases, self._counts, self._kept):
            spread.lay_out(columns)
        if self._penalties:
            num_rows = [count for _, count, _, _ in self._counts.spans]
            penalties = np.repeat(np.array(self._penalties, dtype=np.float32), num_rows, axis=0).T
            columns.add(penalties=penalties, drafted=np.array(self._drafted, int))
        if self._masks:
            columns.add(
                masked=np.array([row for row, _ in self._masks]),
                masks=np.array([np.frombuffer(mask, dtype=np.uint8) for _, mask in self._masks]),
            )
        if self._banned:
            columns.add(banned=np.array(self._banned).T, bans=np.array(self._rows_with_bans))

    def apply(self, logits: Tensor, sent: Mapping[str, Tensor]) -> None:
        """Changes logits [rows, vocab] in place."""
        if not any((self._biases.spans, self._counts.spans, self._kept.spans, self._masks, self._banned)):
            return
        # An engine's logits may be inference tensors, which can only be changed in this mode.
        with torch.inference_mode():
            if self._biases.spans:
                _, rows, (ids, values) = self._biases.spread(sent)
                logits[rows, ids] += values
            if self._counts.spans:
                self._penalise(logits, sent)
            if self._kept.spans:
                _, rows, (ids,) = self._kept.spread(sent)
                held = logits[rows, ids]
                logits.index_fill_(0, sent["kept.rows"][0], -torch.inf)
                logits[rows, ids] = held
            if self._masks:
                forbidden = ~_unpacked(sent["masks"], logits.shape[1])
                logits[sent["masked"]] = logits[sent["masked"]].masked_fill_(forbidden, -torch.inf)
            if self._banned:
                _ban(logits, sent["bans"], *sent["banned"])

    def _penalise(self, logits: Tensor, sent: Mapping[str, Tensor]) -> None:
        which, rows, (ids, counts, prompted) = self._counts.spread(sent)
        drafted = sent["drafted"]
        counts.index_add_(0, drafted, torch.ones_like(drafted, dtype=counts.dtype))
        repetition, frequency, presence = sent["penalties"][:, which]
        value, seen = logits[rows, ids], counts > 0
        repeated = torch.where(value > 0, value / repetition, value * repetition)
        value = torch.where(seen | prompted, repeated, value)
        logits[rows, ids] = value - (counts * frequency + seen * presence)


def _drafted_before(draft: DraftTree) -> Sequence[tuple[int, int]]:
    """(row, node) for each drafted token before each row."""
    if draft.parents:
        return [(node + 1, before) for node in range(len(draft)) for before in draft.path(node)]
    return _drafted_before_in_chain(len(draft))


@lru_cache(256)
def _drafted_before_in_chain(length: int) -> Sequence[tuple[int, int]]:
    return [(row, node) for row in range(1, length + 1) for node in range(row)]


def process(logits: Tensor, candidates: Sequence[Candidate]) -> dict[int, RowRefused]:
    """Changes logits in place. Returns the refusals."""
    changes, columns = Changes(candidates), Columns()
    changes.lay_out(columns)
    changes.apply(logits, columns.send(logits.device))
    return changes.refused


def _unpacked(masks: Tensor, width: int) -> Tensor:
    """bool [rows, width] of uint8 [rows, bytes]: the lowest bit comes first. What they do not cover is 0."""
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    bits = ((masks[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :width]
    return torch.nn.functional.pad(bits, (0, width - bits.shape[1]))


def _ban(logits: Tensor, with_bans: Tensor, which: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Bans these tokens, unless none would be left in a row: masks then take precedence over bans, and a token can
    still be chosen."""
    held = logits[rows, ids]
    # Not the number itself: to a GPU that is one more copy, and a wait.
    logits[rows, ids] = torch.full_like(held, -torch.inf)
    dead = logits[with_bans].amax(-1) == -torch.inf
    logits[rows, ids] = torch.where(dead[which], held, -torch.inf)
