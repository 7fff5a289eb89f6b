"""vLLM on a CPU as a peer, in this process: its engine's own step, scheduler and greedy sampling included.

Prefix caching is off and every prompt is new, so that each prefill is complete. Whole answers may use speculation, with
n-grams or with a draft model.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.serving import Measures, serve, timed_ms

_MAX_TOKENS = 1024
_MAX_SEQUENCES = 64


class Vllm:
    """One engine, and the requests of the measurement at hand."""

    def __init__(self, path: str, eager: bool, speculation: dict[str, Any] | None = None, **more: Any) -> None:
        """`more`: arguments of vLLM's engine."""
        from vllm import LLM

        self._engine: Any = LLM(
            path,
            dtype="bfloat16",
            enforce_eager=eager,
            enable_prefix_caching=False,
            max_model_len=2048,
            max_num_seqs=_MAX_SEQUENCES,
            disable_log_stats=True,
            speculative_config=speculation,
            **more,
        ).llm_engine
        self._requests: list[str] = []
        self._count = 0

    def open(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Prefills the prompts; `decode` continues from there."""
        self._requests = [self._add(prompt, _MAX_TOKENS) for prompt in prompts]
        waiting = set(self._requests)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Each step gives every open sequence one token."""
        ms: list[float] = []
        for _ in range(steps):
            start = time.perf_counter()
            outputs = self._engine.step()
            ms.append((time.perf_counter() - start) * 1e3)
            if len(outputs) != len(self._requests):
                raise RuntimeError(f"a step gave {len(outputs)} of {len(self._requests)} sequences a token")
        return {"ms": ms}

    def close(self) -> dict[str, Any]:
        """Forgets the open sequences."""
        self._engine.abort_request(self._requests)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._requests = []
        return {}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """From the request to its only token."""

        def first_token() -> None:
            self._add(prompt, 1)
            while self._engine.has_unfinished_requests():
                self._engine.step()

        return {"ms": [timed_ms(first_token)]}

    def answer(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
        """`steps` counts engine steps that gave tokens."""
        start = time.perf_counter()
        self._add(prompt, max_tokens, ignore_eos)
        token_ids: list[int] = []
        first_s, steps = 0.0, 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                token_ids = list(output.outputs[0].token_ids)
                first_s = first_s or time.perf_counter() - start
                steps += 1
        return {"token_ids": token_ids, "s": time.perf_counter() - start, "first_s": first_s, "steps": steps}

    def _add(self, prompt: list[int], max_tokens: int, ignore_eos: bool = True) -> str:
        from vllm import SamplingParams

        self._count += 1
        name = str(self._count)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name


def speculative_config(kind: str, tokens: int, draft: str) -> dict[str, Any]:
    """vLLM's setting. Its n-grams match as many tokens as ours, two at least."""
    if kind == "ngram":
        lookup = {"prompt_lookup_max": 8, "prompt_lookup_min": 2}
        return {"method": "ngram", "num_speculative_tokens": tokens, **lookup}
    if kind == "plugin":
        return {"method": "ngram_gpu", "num_speculative_tokens": tokens}
    return {"method": "draft_model", "model": draft, "num_speculative_tokens": tokens}


def _plugin(tokens: int, draft: str) -> dict[str, Any]:
    """What our scheduler needs besides speculation."""
    config = {"outrider": {"drafts": [draft], "lookups": ["ngram"], "max_draft_tokens": tokens}}
    ours = {"scheduler_cls": "outrider.vllm.plugin.Scheduler", "worker_cls": "outrider.vllm.worker.Worker"}
    return {**ours, "additional_config": config}


def load(path: str, mode: str, kind: str = "", tokens: str = "0", draft: str = "") -> tuple[Measures, dict[str, Any]]:
    """For `serve`. `mode` is eager or compiled; `kind` is ngram, draft, plugin (with a draft worker at the address
    `draft`), or empty for no speculation.

    vLLM sets its threads itself: one for each core it is bound to.
    """
    speculation = speculative_config(kind, int(tokens), draft) if kind else None
    peer = Vllm(path, mode == "eager", speculation, **(_plugin(int(tokens), draft) if kind == "plugin" else {}))
    import torch
    import vllm

    described = f"{mode}, {kind} {tokens}" if kind else mode
    about = {"version": f"{vllm.__version__} ({described}), torch {torch.__version__}"}
    return {name: getattr(peer, name) for name in ("open", "decode", "close", "prefill", "answer")}, about


if __name__ == "__main__":
    serve(load)
