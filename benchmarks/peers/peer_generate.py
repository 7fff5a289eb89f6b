"""transformers' `generate` as a peer: greedy answers, plain or with an assistant model (assisted generation).

The assistant is a plain Llama whose head has zeros for unknown tokens. Here its head computes only the other rows, like
our own draft's, so that transformers does not pay for the storage format of its assistant.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.peers.serving import Measures, serve


class KnownTokensHead(nn.Module):
    """The non-zero rows of a head. Other tokens get the lowest possible logit, so they are never chosen."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._token_map = weight.any(1).nonzero()[:, 0]
        self._rows = nn.Parameter(weight[self._token_map].clone(), requires_grad=False)
        self._vocab_size = len(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] → [..., vocabulary]"""
        known = nn.functional.linear(hidden, self._rows)
        logits = torch.full((*hidden.shape[:-1], self._vocab_size), torch.finfo(known.dtype).min, dtype=known.dtype)
        return logits.index_copy_(-1, self._token_map, known)


class Generating:
    """One model, with an assistant or without."""

    def __init__(self, path: str, assistant: str = "", assistant_tokens: int = 0) -> None:
        self._model = _load(path)
        self._more: dict[str, Any] = {}
        if assistant:
            helper = _load(assistant)
            helper.lm_head = KnownTokensHead(helper.lm_head.weight)
            if assistant_tokens:
                helper.generation_config.num_assistant_tokens = assistant_tokens
            self._more = {"assistant_model": helper}
        self._forwards: list[float] = []
        self._model.register_forward_hook(lambda *_: self._forwards.append(time.perf_counter()))

    @torch.inference_mode()
    def answer(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
        """`steps` are forwards of the target model, including prefill."""
        settings = self._model.generation_config
        settings.eos_token_id = None if ignore_eos else self._model.config.eos_token_id
        self._forwards.clear()
        start = time.perf_counter()
        token_ids = torch.tensor([prompt])
        out = self._model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            **self._more,
        )
        answer = out[0, len(prompt) :].tolist()
        seconds = time.perf_counter() - start
        return {
            "token_ids": answer,
            "s": seconds,
            "first_s": self._forwards[0] - start,
            "steps": len(self._forwards),
        }


def _load(path: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval()


def load(path: str, assistant: str = "", assistant_tokens: str = "0") -> tuple[Measures, dict[str, Any]]:
    """For `serve`. `assistant_tokens`: most drafted tokens per round; 0 for transformers' own choice."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    peer = Generating(path, assistant, int(assistant_tokens))
    return {"answer": peer.answer}, {"version": f"{transformers.__version__}, torch {torch.__version__}"}


if __name__ == "__main__":
    serve(load)
