"""llama.cpp as a peer, through the C interface of its Python package: batches of several sequences.

Its default settings, with a KV cache in float16, except for threads and room for sequences. Only `llama_decode` and a
greedy choice are timed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.peers.serving import Measures, serve, timed_ms

_MAX_SEQUENCES, _MAX_TOKENS = 32, 1024


class LlamaCpp:
    """One model, one context, and the sequences of the measurement at hand."""

    def __init__(self, library: Any, path: str, threads: int) -> None:
        self._c = library
        self._c.llama_backend_init()
        self._model = self._c.llama_model_load_from_file(path.encode(), self._c.llama_model_default_params())
        settings = self._c.llama_context_default_params()
        settings.n_seq_max = _MAX_SEQUENCES
        settings.n_ctx = _MAX_SEQUENCES * _MAX_TOKENS
        settings.n_threads = settings.n_threads_batch = threads
        self._context = self._c.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp does not load {path}; see above")
        self._vocab_size = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(self._model))
        self._batch = self._c.llama_batch_init(_MAX_TOKENS, 0, 1)
        self._lengths: list[int] = []
        self._next: list[int] = []

    def open(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Prefills the prompts; `decode` continues from there."""
        self.close()
        self._next = [self._run({number: prompt})[0] for number, prompt in enumerate(prompts)]
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Each step gives every open sequence one token."""
        return {"ms": [timed_ms(self._step) for _ in range(steps)]}

    def close(self) -> dict[str, Any]:
        """Forgets the open sequences."""
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), False)
        self._lengths = [0] * _MAX_SEQUENCES
        self._next = []
        return {}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """The whole prompt in one call, which splits it into parts of the default size."""
        self.close()
        return {"ms": [timed_ms(lambda: self._run({0: prompt}))]}

    def _step(self) -> None:
        self._next = self._run({number: [token] for number, token in enumerate(self._next)})

    def _run(self, added: dict[int, Sequence[int]]) -> list[int]:
        """Appends tokens to sequences → the next token of each."""
        batch, at = self._batch, 0
        for number, token_ids in added.items():
            for token in token_ids:
                batch.token[at], batch.pos[at] = token, self._lengths[number]
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
                batch.logits[at] = False
                self._lengths[number] += 1
                at += 1
            batch.logits[at - 1] = True
        batch.n_tokens = at
        if failure := self._c.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {failure}")
        return self._choose(len(added))

    def _choose(self, rows: int) -> list[int]:
        logits = self._c.llama_get_logits(self._context)
        chosen: list[int] = np.ctypeslib.as_array(logits, (rows, self._vocab_size)).argmax(-1).tolist()
        return chosen


def load(path: str) -> tuple[Measures, dict[str, Any]]:
    """For `serve`. `path` is a GGUF file."""
    import llama_cpp  # type: ignore[import-not-found]

    peer = LlamaCpp(llama_cpp, path, int(os.environ["OMP_NUM_THREADS"]))
    about = {
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "built": llama_cpp.llama_print_system_info().decode(),
    }
    return {name: getattr(peer, name) for name in ("open", "decode", "close", "prefill")}, about


if __name__ == "__main__":
    serve(load)
