"""A target whose texts are known: a step looks up what the target says, and takes as long as a measured step would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outrider.comparison.step_line import StepLine, quiet_clock
from outrider.engine import Engine, Row
from outrider.engine.kv.kv_cache_manager import KVCacheManager

# As much as a step of a model reads, so that a draft's weights are not in the CPU's caches after it either.
_SWEPT_BYTES = 32 << 20


class KnownTexts:
    """What the target says after each beginning of its texts, and its states there."""

    def __init__(self, texts: Sequence[Sequence[int]], states: Sequence[Tensor] = ()) -> None:
        """states: of each text, [tokens, layers · width]; none where no head reads them."""
        self._texts = texts
        self._states = states
        self._places: dict[int, tuple[int, int]] = {}
        """Hash of a beginning → (text, its length)."""
        for number, text in enumerate(texts):
            beginning = 0
            for length, token in enumerate(text, 1):
                beginning = grown(beginning, token)
                self._places.setdefault(beginning, (number, length))

    def token_after(self, beginning: int) -> int:
        """0 where no text goes on."""
        number, length = self._places.get(beginning, (0, len(self._texts[0])))
        return self._texts[number][length] if length < len(self._texts[number]) else 0

    def states_at(self, beginnings: Sequence[int]) -> Tensor:
        """[beginnings, layers · width], of the last token of each; zeros for what is in no text."""
        found = self._states[0].new_zeros(len(beginnings), self._states[0].shape[1])
        for row, beginning in enumerate(beginnings):
            if (place := self._places.get(beginning)) is not None:
                found[row] = self._states[place[0]][place[1] - 1]
        return found


def grown(beginning: int, token: int) -> int:
    """The hash of a beginning with one more token; that of nothing is 0."""
    return hash((beginning, token))


class ReplayEngine(Engine):
    """An engine without a model. Its clock runs on by the time of the steps that it does not run."""

    def __init__(self, engine: Engine, texts: KnownTexts, line: StepLine) -> None:
        self.info = engine.info
        self.kv = KVCacheManager(engine.info.num_blocks, engine.info.block_size, prefix_cache=False)
        self._known = texts
        self._line = line
        self._clock = quiet_clock(engine)
        self._ahead_s = 0.0
        self.steps_s = 0.0
        """What its steps would have taken."""
        self._logits = torch.zeros(0, engine.info.vocab_size)
        self._swept = torch.zeros(_SWEPT_BYTES // 4)

    def clock(self) -> float:
        return self._clock() + self._ahead_s

    def num_free_tokens(self, num_rows: int, num_tokens: int) -> int:
        return 0

    def forward_tapped(self, rows: Sequence[Row], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        started_s = self._clock()
        self.kv.allocate(rows)
        self.kv.take_unclean(), self.kv.take_moves()
        beginnings = [list(_beginnings(row)) for row in rows]
        self._swept.sum()
        states = torch.empty(0)
        if layers:
            tapped = [b for row, each in zip(rows, beginnings, strict=True) for b in each[len(each) - row.num_tapped :]]
            states = self._known.states_at(tapped)
        wanted = [b for row, each in zip(rows, beginnings, strict=True) for b in each[len(each) - row.num_logits :]]
        logits = self._certain([self._known.token_after(beginning) for beginning in wanted])
        self._advance(rows)
        step_s = self._step_s(rows)
        self.steps_s += step_s
        self._ahead_s += step_s - (self._clock() - started_s)
        return logits, states

    def _certain(self, token_ids: Sequence[int]) -> Tensor:
        """Logits [tokens, vocab] that leave no choice, at any temperature."""
        if len(token_ids) > len(self._logits):
            self._logits = torch.zeros(len(token_ids), self._logits.shape[1])
        found = self._logits[: len(token_ids)].zero_()
        found[torch.arange(len(token_ids)), list(token_ids)] = 1e6
        return found

    def _step_s(self, rows: Sequence[Row]) -> float:
        verified = [row for row in rows if row.num_logits == len(row.token_ids)]
        num_rows = sum(row.num_logits for row in verified)
        prompt_tokens = sum(len(row.token_ids) for row in rows) - num_rows
        return self._line.seconds(len(verified), num_rows, prompt_tokens)


def _beginnings(row: Row) -> Iterator[int]:
    """For each token of the row, the hash of all up to it."""
    beginning = 0
    for token in row.sequence.tokens:
        beginning = grown(beginning, token)
    chain, nodes = row.num_chain_tokens, dict[int, int]()
    for token in row.token_ids[:chain]:
        beginning = grown(beginning, token)
        yield beginning
    nodes[-1] = beginning
    for node, (token, parent) in enumerate(zip(row.token_ids[chain:], row.parents, strict=True)):
        nodes[node] = grown(nodes[parent], token)
        yield nodes[node]
