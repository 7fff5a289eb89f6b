"""Our engine as a peer: decode and prefill.

Every timed step ends in a greedy choice, like the other peers'. Uses the engine directly, without workers or network.
"""

from __future__ import annotations

from typing import Any

import torch
from outrider.engine import EngineConfig, EngineSequence, Row
from outrider.engine.loading.loader import load_engine

from benchmarks.peers.serving import Measures, serve, timed_ms


class Ours:
    """One engine, and the sequences of the measurement at hand."""

    def __init__(self, path: str, variant: str, num_blocks: int) -> None:
        self._config = EngineConfig(dtype="bfloat16", num_blocks=num_blocks, prefix_cache=False, native_variant=variant)
        self._engine = load_engine(path, self._config)
        self._sequences: list[EngineSequence] = []
        self._next: list[int] = []

    def open(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Prefills the prompts; `decode` continues from there."""
        self._sequences = [self._engine.kv.open(prompt) for prompt in prompts]
        self._next = [self._prefill(s, p) for s, p in zip(self._sequences, prompts, strict=True)]
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Each step gives every open sequence one token."""
        return {"ms": [timed_ms(self._step) for _ in range(steps)]}

    def close(self) -> dict[str, Any]:
        """Forgets the open sequences."""
        for sequence in self._sequences:
            self._engine.kv.close(sequence)
        self._sequences = []
        return {}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """An uncached prompt, in chunks of the target worker's size."""
        sequence = self._engine.kv.open(prompt)
        ms = timed_ms(lambda: self._prefill(sequence, prompt))
        self._engine.kv.close(sequence)
        return {"ms": [ms]}

    def _prefill(self, sequence: EngineSequence, prompt: list[int]) -> int:
        """Returns the next token."""
        while len(prompt) - sequence.cached_len > self._config.max_batch_tokens:
            start = sequence.cached_len
            self._engine.forward([Row(sequence, prompt[start : start + self._config.max_batch_tokens], 0)])
        return self._choose([Row(sequence, prompt[sequence.cached_len :], 1)])[-1]

    def _step(self) -> None:
        rows = [Row(s, [token], 1) for s, token in zip(self._sequences, self._next, strict=True)]
        self._next = self._choose(rows)

    def _choose(self, rows: list[Row]) -> list[int]:
        chosen: list[int] = self._engine.forward(rows).argmax(-1).tolist()
        return chosen


def load(path: str, variant: str = "auto", num_blocks: str = "1024") -> tuple[Measures, dict[str, Any]]:
    """For `serve`. `variant`: of the kernels."""
    torch.set_num_threads(1)
    ours = Ours(path, variant, int(num_blocks))
    names = ("open", "decode", "close", "prefill")
    return {name: getattr(ours, name) for name in names}, {"version": f"torch {torch.__version__}"}


if __name__ == "__main__":
    serve(load)
