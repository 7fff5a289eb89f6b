"""The training loop: batches in, a learner's weights out; goes on from its last checkpoint."""

from __future__ import annotations

import hashlib
import io
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.samples import Cipher
from outrider.training.shards import Corpus, Sample, read_private, write_private
from outrider.training.student import Scores

_CHECKPOINT_S = 60.0

Progress = Callable[[int, int, str], None]
"""Called with (tokens done, total, note)."""


class Learner(Protocol):
    """What is trained: a draft model or a head."""

    kind: str
    module: nn.Module
    learnable: list[Tensor]

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Compares it with the target; back-propagates where gradients are on."""
        ...

    def save(self, out: Path, base: str, recipe: dict[str, Any]) -> None:
        """Writes the finished draft, with recipe.json."""
        ...


@dataclass(frozen=True, slots=True)
class LoopConfig:
    train_tokens: int = 5_000_000
    """Tokens to train on; a token counts once in every pass over the corpus."""
    seconds: float = 0.0
    """Ends the training earlier, at the rate at which it would have ended; 0: no such end."""
    batch_tokens: int = 4096
    learning_rate: float = 1.2e-3
    warmup_steps: int = 60
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train_tokens < 1 or self.batch_tokens < 1:
            raise ValueError("train_tokens, batch_tokens: must be at least 1")
        if not 0 < self.learning_rate < 1:
            raise ValueError("learning_rate: must be in (0, 1)")

    @property
    def warmup(self) -> int:
        """Steps. Of a short training a quarter, or it would end before it learns at its rate."""
        return max(1, min(self.warmup_steps, self.train_tokens // (4 * self.batch_tokens)))


class Training:
    """A learner, its optimizer, and how far they are."""

    def __init__(
        self,
        learner: Learner,
        config: LoopConfig,
        checkpoint: Path,
        same: Any,
        corpus_tokens: int = 0,
        cipher: Cipher | None = None,
    ) -> None:
        """`same`: what must be equal for an earlier checkpoint to be gone on from; any JSON. `corpus_tokens`: of what
        it will learn from; where it is more than at the end of an earlier training, another one begins."""
        self.steps = self.learned = 0
        self._began_s = time.monotonic()
        self._learner = learner
        self._config = config
        groups = [
            {"params": [p for p in learner.learnable if p.dim() == 2], "weight_decay": 0.01},
            {"params": [p for p in learner.learnable if p.dim() != 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
        self._file, self._cipher, self._corpus_tokens = checkpoint, cipher, corpus_tokens
        self._key = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()
        self._go_on()

    def run(self, corpus: Corpus, progress: Progress) -> None:
        """Until train_tokens are learned, or the time is over. What is learned when something ends it, Ctrl-C included,
        is kept."""
        total, saved_s = self._config.train_tokens, time.monotonic()
        self._began_s = saved_s
        batches = self._batches(corpus)
        try:
            while self._share_done() < 1:
                batch = next(batches)
                scores = self._step(batch)
                self.steps += 1
                self.learned += sum(len(s.hidden) for s in batch)
                progress(min(self.learned, total), total, f"loss {scores.mean_loss:.2f}")
                if time.monotonic() - saved_s > _CHECKPOINT_S:
                    self._save()
                    saved_s = time.monotonic()
        finally:
            self._save()

    def evaluate(self, samples: Sequence[Sample]) -> Scores:
        total = Scores()
        self._learner.module.eval()
        with torch.no_grad():
            ordered = sorted(samples, key=lambda s: len(s.hidden))
            for start in range(0, len(ordered), 16):
                total.add(self._learner.score(ordered[start : start + 16]))
        return total

    def _step(self, batch: list[Sample]) -> Scores:
        warmup = min(1.0, (self.steps + 1) / self._config.warmup)
        decay = 0.04 + 0.96 * 0.5 * (1 + math.cos(math.pi * min(1.0, self._share_done())))
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * warmup * decay
        self._learner.module.train()
        scores = self._learner.score(batch)
        torch.nn.utils.clip_grad_norm_(self._learner.learnable, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return scores

    def _share_done(self) -> float:
        """Of the tokens, or of the time."""
        by_tokens = self.learned / self._config.train_tokens
        seconds = self._config.seconds
        return max(by_tokens, (time.monotonic() - self._began_s) / seconds) if seconds else by_tokens

    def _batches(self, corpus: Corpus) -> Iterator[list[Sample]]:
        """Endless batches of about batch_tokens, each of samples of similar length, in random order."""
        # Other batches than those before the checkpoint.
        rng = random.Random(self._config.seed + self.steps)
        for samples in corpus.passes(rng):
            batches: list[list[Sample]] = []
            batch: list[Sample] = []
            for sample in sorted(samples, key=lambda s: len(s.hidden)):
                if batch and (len(batch) + 1) * len(sample.hidden) > self._config.batch_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(sample)
            batches.append(batch)
            rng.shuffle(batches)
            yield from batches

    def _go_on(self) -> None:
        if not self._file.is_file():
            return
        # Tensors and numbers only: nothing of it is run.
        data = io.BytesIO(read_private(self._file, self._cipher))
        stored = torch.load(data, weights_only=True, map_location="cpu")
        ended = stored["learned"] >= self._config.train_tokens
        if stored["key"] != self._key or (ended and stored.get("corpus_tokens") != self._corpus_tokens):
            return
        with torch.no_grad():
            for ours, value in zip(self._learner.learnable, stored["learnable"], strict=True):
                ours.copy_(value)
        self._optimizer.load_state_dict(stored["optimizer"])
        self.steps, self.learned = stored["steps"], stored["learned"]

    def _save(self) -> None:
        learnable = [p.detach().cpu() for p in self._learner.learnable]
        state = {"key": self._key, "learnable": learnable, "optimizer": self._optimizer.state_dict()}
        data = io.BytesIO()
        done = {"steps": self.steps, "learned": self.learned, "corpus_tokens": self._corpus_tokens}
        torch.save(state | done, data)
        write_private(self._file, data.getvalue(), self._cipher)
