"""An engine that computes each forward once and then recalls it, waiting as long as computing takes.

It lets one machine measure a draft and a target on two machines. On two, the draft's memory reads do not slow the
target's step; on one they do, by a quarter. A recalled forward reads almost nothing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from outrider.engine import Engine, EngineSequence, Row
from outrider.engine.attention.tree import path_to
from outrider.tree import common_len
from torch import Tensor

_TIMED_TOKENS = 16
_TIMED_CONTEXT = 200
_REPEATS = 15
_PREFILL_TOKENS = 512
# A sleep ends some ten microseconds late, so the end of a wait is spun.
_SPIN_S = 0.0001


class RecallingEngine(Engine):
    """Replaces `inner`, whose logits must not depend on the other rows of a step."""

    def __init__(self, inner: Engine) -> None:
        vars(self).update(vars(inner))
        self.num_recalled = self.num_computed = 0
        """Numbers of forwards."""
        self._known: dict[bytes, Tensor] = {}
        """Logits [width] after a text, by its token ids."""
        # The only sequence that is computed: it is rewound to its common prefix with the next text.
        self._computed = EngineSequence()
        self.forward_s = [0.0, *self._time_forwards()]
        """Seconds of a forward, by number of tokens."""

    def forward(self, rows: Sequence[Row]) -> Tensor:
        started_s = time.perf_counter()
        self.kv.allocate(rows)
        computed = [self._learn(row) for row in rows if row.num_logits]
        logits = [self._known[text] for row in rows for text in _texts(row)]
        self._advance(rows)
        if any(computed):
            self.num_computed += 1
        else:
            self.num_recalled += 1
            _wait_until(started_s + self._forward_s(sum(len(row.token_ids) for row in rows)))
        return torch.stack(logits) if logits else torch.empty(0)

    def _learn(self, row: Row) -> bool:
        """Computes unknown logits. Returns whether there were any."""
        unknown = [text for text in _texts(row) if text not in self._known]
        # The longest first: what is known of it may be all that is missing.
        for text in sorted(unknown, key=len, reverse=True):
            if text not in self._known:
                self._compute(array("I", text).tolist(), row.num_logits)
        return bool(unknown)

    def _compute(self, text: list[int], num_logits: int) -> None:
        """The logits of a text's last tokens."""
        computed, wanted = self._computed, min(num_logits, len(text))
        self.kv.rewind(computed, common_len(computed.tokens, text[: len(text) - wanted]))
        while len(text) - computed.cached_len > max(_PREFILL_TOKENS, wanted):
            super().forward([Row(computed, text[computed.cached_len :][:_PREFILL_TOKENS], 0)])
        logits = super().forward([Row(computed, text[computed.cached_len :], wanted)])
        self._known.update(zip(_prefixes(text, wanted), logits.clone(), strict=True))

    def _forward_s(self, num_tokens: int) -> float:
        timed = self.forward_s
        return timed[num_tokens] if num_tokens < len(timed) else timed[-1] * num_tokens / (len(timed) - 1)

    def _time_forwards(self) -> Iterator[float]:
        """Median seconds of a forward of 1, 2, … tokens, alone."""
        computed = self._computed
        super().forward([Row(computed, [1] * min(_TIMED_CONTEXT, self.info.max_context_len // 2), 0)])
        start = computed.cached_len
        for count in range(1, _TIMED_TOKENS + 1):
            took_s = []
            for _ in range(_REPEATS):
                began_s = time.perf_counter()
                super().forward([Row(computed, [1] * count, count)])
                took_s.append(time.perf_counter() - began_s)
                self.kv.rewind(computed, start)
            yield median(took_s)


def _texts(row: Row) -> Iterator[bytes]:
    """Token ids up to each position whose logits are wanted, along the path of a drafted node."""
    chain = [*row.sequence.tokens, *row.token_ids[: row.num_chain_tokens]]
    yield from _prefixes(chain, row.num_logits - len(row.parents))
    for node in range(len(row.parents)):
        path = path_to(row.parents, node)
        yield array("I", [*chain, *(row.token_ids[row.num_chain_tokens + at] for at in path)]).tobytes()


def _prefixes(text: Sequence[int], count: int) -> Iterator[bytes]:
    """The last `count` beginnings of a text, itself included, ascending."""
    tokens = array("I", text)
    for length in range(len(text) - count + 1, len(text) + 1):
        yield tokens[:length].tobytes()


def _wait_until(end_s: float) -> None:
    spare_s = end_s - time.perf_counter() - _SPIN_S
    if spare_s > 0:
        time.sleep(spare_s)
    while time.perf_counter() < end_s:
        pass
