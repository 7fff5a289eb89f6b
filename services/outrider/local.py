"""Speculative decoding in one process, without a server: `Speculator(target).generate(prompts)`.

For several processes use `outrider up`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.comparison.best_way import best_way
from outrider.comparison.loaded import LoadedDrafts
from outrider.engine import EngineConfig, resolve
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from outrider.engine.loading.loader import load_engine
from outrider.sim.pair import Pair
from outrider.speculation import SamplingParams
from outrider.ways import SHIPPED, Shipped, file_of, keep, kept

AUTO = "auto"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Completion:
    """The result for one prompt."""

    text: str
    token_ids: list[int]
    """With the stop token at the end, if there is one; it is not in the text."""
    num_steps: int
    """Steps of the target; without speculation one per token."""
    num_accepted: int
    """Draft tokens that the target accepted."""


class Speculator:
    """A target and its draft, by name or path: loads both, takes text, gives text."""

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None = AUTO,
        *,
        dtype: str = "bfloat16",
        device: str = "cpu",
        max_sequences: int = 32,
        max_draft_tokens: int = 4,
    ) -> None:
        """`draft`: a model or a head. auto: what is fastest on this machine of what ships for the target, measured once
        and logged. None, and auto where nothing ships: tokens are drafted from the text so far alone. `device`: a torch
        device, such as cuda, of both models.

        Raises CheckpointError for a model that does not exist or cannot be read.
        """
        path = resolve(str(target))
        config = EngineConfig(dtype=dtype, device=device)
        names = [] if draft is None else [str(draft)]
        if draft == AUTO:
            names = _fastest(path, SHIPPED[str(target)], config) if str(target) in SHIPPED else []
        # First the target: on a GPU it takes nine tenths of what is free, and the draft of what it leaves.
        engine = load_engine(path, config)
        drafts = LoadedDrafts(engine, path, names, max_sequences, max_draft_tokens, prefix_cache=True)
        self._tokenizer: Any = load_tokenizer(path)
        self._pair = Pair(engine, None, max_sequences=max_sequences, sources=drafts.sources(names))

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        speculate: bool = True,
    ) -> list[Completion]:
        """One completion per prompt, in their order; greedy unless `sampling` is given.

        A string becomes a user's turn in the model's chat template, if it has one; token ids are used unchanged. The
        tokens equal those with `speculate=False`. Raises InvalidRequest for a prompt that does not fit.
        """
        token_ids = [self._encoded(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        answers = self._pair.answer(token_ids, max_new_tokens, speculate=speculate, params=sampling)
        return [
            Completion(
                self._tokenizer.decode(answer.token_ids, skip_special_tokens=True),
                answer.token_ids,
                answer.num_steps,
                answer.num_accepted,
            )
            for answer in answers
        ]

    def _encoded(self, prompt: str) -> list[int]:
        templated = self._tokenizer.chat_template is not None
        if templated:
            chat = [{"role": "user", "content": prompt}]
            prompt = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        # The template already has the model's special tokens.
        return list(self._tokenizer.encode(prompt, add_special_tokens=not templated))


def _fastest(target: Path, shipped: Shipped, config: EngineConfig) -> list[str]:
    file = file_of(target, [config.dtype, config.device])
    if (way := kept(file)) is None:
        threads = torch.get_num_threads()
        keep(file, way := best_way(target, shipped, config))
        torch.set_num_threads(threads)
    _log.info("%s", way.line)
    return [name for name in (way.head, way.draft) if name]
