"""Our engine as a peer: decode and prefill, and for ours only: verification, the memory's limit, prefixes.

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
        self._config = EngineConfig(dtype="bfloat16", num_blocks=num_blocks, prefix_cache=True, native_variant=variant)
        self._engine = load_engine(path, self._config)
        self._sequences: list[EngineSequence] = []
        self._next: list[int] = []
        self._salts = 0

    def open(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Prefills the prompts; `decode` continues from there."""
        self._sequences = [self._engine.kv.open(prompt, self._salt()) for prompt in prompts]
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
        sequence = self._engine.kv.open(prompt, self._salt())
        ms = timed_ms(lambda: self._prefill(sequence, prompt))
        self._engine.kv.close(sequence)
        return {"ms": [ms]}

    def verify(self, prompt: list[int], positions: int, repeats: int) -> dict[str, Any]:
        """Steps of one position and of several, in turns, after the same context."""
        sequence = self._engine.kv.open(prompt, self._salt())
        self._prefill(sequence, prompt)
        one: list[float] = []
        many: list[float] = []
        for _ in range(repeats):
            one.append(timed_ms(lambda: self._run(sequence, prompt[:1], 1)))
            self._engine.kv.rewind(sequence, len(prompt))
            many.append(timed_ms(lambda: self._run(sequence, prompt[:positions], positions)))
            self._engine.kv.rewind(sequence, len(prompt))
        self._engine.kv.close(sequence)
        return {"one_ms": one, "many_ms": many}

    def limit(self, prompt: list[int], weight_bytes: int, repeats: int) -> dict[str, Any]:
        """A decode step, and reading as many bytes as the step reads weights, in turns.

        The read is one thread's int64 sum of a buffer of that size, far larger than the caches.
        """
        buffer = torch.ones(weight_bytes // 8, dtype=torch.int64)
        sequence = self._engine.kv.open(prompt, self._salt())
        self._prefill(sequence, prompt)
        step: list[float] = []
        read: list[float] = []
        for _ in range(repeats):
            step.append(timed_ms(lambda: self._run(sequence, prompt[:1], 1)))
            self._engine.kv.rewind(sequence, len(prompt))
            read.append(timed_ms(buffer.sum))
        self._engine.kv.close(sequence)
        return {"step_ms": step, "read_ms": read, "bytes": buffer.nbytes}

    def prefix(self, shared: list[int], suffixes: list[list[int]]) -> dict[str, Any]:
        """Time to first token of two prompts with the same beginning: the first fills the cache, the second hits."""
        salt = self._salt()
        miss, hit = (self._first_token_ms([*shared, *suffix], salt) for suffix in suffixes[:2])
        return {"miss_ms": [miss], "hit_ms": [hit]}

    def _first_token_ms(self, prompt: list[int], salt: bytes) -> float:
        opened: list[EngineSequence] = []

        def first_token() -> None:
            opened.append(self._engine.kv.open(prompt, salt))
            self._prefill(opened[0], prompt)
            self._engine.kv.publish(opened[0], len(prompt))

        ms = timed_ms(first_token)
        self._engine.kv.close(opened[0])
        return ms

    def _prefill(self, sequence: EngineSequence, prompt: list[int]) -> int:
        """Returns the next token."""
        while len(prompt) - sequence.cached_len > self._config.max_batch_tokens:
            start = sequence.cached_len
            self._engine.forward([Row(sequence, prompt[start : start + self._config.max_batch_tokens], 0)])
        return self._run(sequence, prompt[sequence.cached_len :], 1)[-1]

    def _run(self, sequence: EngineSequence, token_ids: list[int], num_logits: int) -> list[int]:
        return self._choose([Row(sequence, token_ids, num_logits)])

    def _step(self) -> None:
        rows = [Row(s, [token], 1) for s, token in zip(self._sequences, self._next, strict=True)]
        self._next = self._choose(rows)

    def _choose(self, rows: list[Row]) -> list[int]:
        chosen: list[int] = self._engine.forward(rows).argmax(-1).tolist()
        return chosen

    def _salt(self) -> bytes:
        """A new salt, so that measurements do not share prefixes."""
        self._salts += 1
        return b"%d" % self._salts


def load(path: str, variant: str = "auto", num_blocks: str = "1024") -> tuple[Measures, dict[str, Any]]:
    """For `serve`. `variant`: of the kernels."""
    torch.set_num_threads(1)
    ours = Ours(path, variant, int(num_blocks))
    names = ("open", "decode", "close", "prefill", "verify", "limit", "prefix")
    return {name: getattr(ours, name) for name in names}, {"version": f"torch {torch.__version__}"}


if __name__ == "__main__":
    serve(load)
