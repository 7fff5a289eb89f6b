"""Stock transformers as a peer: AutoModelForCausalLM, its scaled-dot-product attention, its DynamicCache.

Only its forward and a greedy choice are timed, without `generate`.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.peers.serving import Measures, serve, timed_ms


class Stock:
    """One model, and the batch of the measurement at hand. Its prompts are equally long, so there is no padding."""

    def __init__(self, path: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        )
        self._model.eval()
        self._cache: Any = None
        self._next = torch.empty(0, 1, dtype=torch.int64)

    def open(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Prefills the prompts; `decode` continues from there."""
        self._cache = DynamicCache(config=self._model.config)
        self._next = self._choose(torch.tensor(prompts))
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Each step gives every open sequence one token."""
        return {"ms": [timed_ms(self._step) for _ in range(steps)]}

    def close(self) -> dict[str, Any]:
        """Forgets the open sequences."""
        self._cache = None
        return {}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """The whole prompt, in one forward."""
        self._cache = DynamicCache(config=self._model.config)
        token_ids = torch.tensor([prompt])
        return {"ms": [timed_ms(lambda: self._choose(token_ids))]}

    def _step(self) -> None:
        self._next = self._choose(self._next)

    @torch.inference_mode()
    def _choose(self, token_ids: Tensor) -> Tensor:
        """Greedy next tokens → [sequences, 1]."""
        out = self._model(token_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        chosen: Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        chosen.tolist()
        return chosen


def load(path: str) -> tuple[Measures, dict[str, Any]]:
    """For `serve`."""
    torch.set_num_threads(1)
    stock = Stock(path)
    about = {"version": f"{transformers.__version__}, torch {torch.__version__}"}
    return {name: getattr(stock, name) for name in ("open", "decode", "close", "prefill")}, about


if __name__ == "__main__":
    serve(load)
