"""OpenVINO GenAI as a peer, in this process: its continuous batching's own step, greedy sampling included.

It reads GGUF files but none in bfloat16, so the file is in float16, and weights and KV cache are set to run in
bfloat16. Prefix caching is off and every prompt is new, so that each prefill is complete.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from benchmarks.peers.serving import Measures, serve, timed_ms

_MAX_TOKENS = 1024


class OpenVino:
    """One pipeline, and the requests of the measurement at hand."""

    def __init__(self, path: str, threads: int) -> None:
        import openvino_genai as genai  # type: ignore[import-not-found]

        schedule = genai.SchedulerConfig()
        schedule.cache_size = 2  # GB
        schedule.max_num_seqs = 64
        schedule.max_num_batched_tokens = 2048
        schedule.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
            "INFERENCE_NUM_THREADS": threads,
            # This process's own affinity decides the core.
            "ENABLE_CPU_PINNING": False,
        }
        self._pipeline: Any = genai.ContinuousBatchingPipeline(path, schedule, "CPU", properties)
        self._open: list[Any] = []
        self._count = 0

    def open(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Prefills the prompts; `decode` continues from there."""
        self._open = [self._add(prompt, _MAX_TOKENS) for prompt in prompts]
        waiting = list(self._open)
        while waiting:
            self._pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Each step gives every open sequence one token."""
        for handle in self._open:
            while handle.can_read():
                handle.read()
        return {"ms": [timed_ms(self._step) for _ in range(steps)]}

    def close(self) -> dict[str, Any]:
        """Forgets the open sequences."""
        for handle in self._open:
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._open = []
        return {}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """From the request to its only token."""

        def first_token() -> None:
            # Without the handle the request would be dropped.
            handle = self._add(prompt, 1)
            while not handle.can_read():
                self._pipeline.step()

        return {"ms": [timed_ms(first_token)]}

    def _step(self) -> None:
        self._pipeline.step()
        given = sum(len(output.generated_ids) for handle in self._open for output in handle.read().values())
        if given != len(self._open):
            raise RuntimeError(f"a step gave {len(self._open)} sequences {given} tokens")

    def _add(self, prompt: list[int], max_tokens: int) -> Any:
        import openvino  # type: ignore[import-not-found]
        import openvino_genai as genai

        self._count += 1
        settings = genai.GenerationConfig()
        settings.max_new_tokens = max_tokens
        settings.ignore_eos = True
        settings.do_sample = False
        return self._pipeline.add_request(self._count, openvino.Tensor(np.array([prompt])), settings)


def load(path: str) -> tuple[Measures, dict[str, Any]]:
    """For `serve`. `path` is a GGUF file."""
    peer = OpenVino(path, int(os.environ["OMP_NUM_THREADS"]))
    import openvino_genai as genai

    about = {"version": f"OpenVINO GenAI {genai.__version__}"}
    return {name: getattr(peer, name) for name in ("open", "decode", "close", "prefill")}, about


if __name__ == "__main__":
    serve(load)
