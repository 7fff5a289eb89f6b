"""`outrider distill`: the target writes a corpus, a student learns it, and the draft is written with its recipe."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.engine import EngineConfig, resolve, weights_revision
from outrider.engine.draft_checkpoint import read_head, save_draft_model, write_recipe
from outrider.engine.loader import load_engine
from outrider.engine.tokenizer import load_tokenizer
from outrider.training import acceptance
from outrider.training.corpus import CorpusConfig, Sample, read_corpus, write_corpus
from outrider.training.student import (
    Scores,
    StudentConfig,
    build_student,
    commonest_tokens,
    compute_dtype,
    hidden_states,
    learn,
)
from outrider.training.teacher import check_teacher

# Samples per pool. A pool is sorted by length, so that a batch has little padding.
_BUCKET = 256
# What the finished draft is measured on: at most so many prompts, each answered with so many tokens.
_PROMPTS, _ANSWER_TOKENS = 64, 64

Progress = Callable[[str, int, int, str], None]
"""Called with (stage, done, total, note)."""


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """One distillation, start to end."""

    out: Path
    """Directory of the finished draft."""
    work: Path
    """Directory of the corpus; kept, so that a second run continues from it."""
    target: str = "smollm2-135m-instruct"
    in_use: str = ""
    """Another draft of the target, measured beside the new one; empty for none."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    train_tokens: int = 5_000_000
    """Tokens to train on; a token counts once in every pass over the corpus."""
    batch_tokens: int = 4096
    learning_rate: float = 1.2e-3
    warmup_steps: int = 60
    threads: int = 0
    """torch's threads; 0 leaves its default."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train_tokens < 1 or self.batch_tokens < 1:
            raise ValueError("train_tokens, batch_tokens: must be at least 1")
        if not 0 < self.learning_rate < 1:
            raise ValueError("learning_rate: must be in (0, 1)")


@dataclass(frozen=True, slots=True)
class DistillReport:
    """Results, measured on held-out conversations."""

    acceptance: float
    """Share of first drafted tokens that the target accepts at temperature 0, by the real verifier."""
    acceptance_sampled: float
    """The same at temperature 0.8."""
    acceptance_in_use: float | None
    acceptance_in_use_sampled: float | None
    """Both of the draft in use, on the same prompts; None without one."""
    held_out_loss: float
    steps: int
    train_tokens: int
    corpus_tokens: int
    seconds: float
    bytes: int


def run(config: DistillConfig, progress: Progress) -> DistillReport:
    """Runs all stages; returns the measured results."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    target = resolve(config.target)
    _write(config, target, progress)
    held_out, samples = _split(config.work)
    token_map = commonest_tokens(samples, len(read_head(target)), config.student.head_tokens)
    started = time.monotonic()
    training = _Training(config, target, token_map)
    steps, learned = training.run(samples, progress)
    measured: dict[str, Any] = {
        "held_out_loss": round(training.evaluate(held_out).mean_loss, 4),
        "steps": steps,
        "train_tokens": learned,
        "corpus_tokens": sum(len(s.token_ids) for s in [*samples, *held_out]),
        "seconds": round(time.monotonic() - started, 1),
    }
    recipe = {"target_revision": weights_revision(target), "config": _plain(asdict(config)), "measured": measured}
    save_draft_model(config.out, training.model, token_map, base=config.target, recipe=recipe)
    measured |= _acceptance(config, target, held_out, progress)
    write_recipe(config.out, recipe)
    size = sum(file.stat().st_size for file in config.out.iterdir())
    return DistillReport(bytes=size, **measured)


def _acceptance(
    config: DistillConfig, target: Path, held_out: list[Sample], progress: Progress
) -> dict[str, float | None]:
    """Of the draft as it was written, and of the one in use."""
    engine = load_engine(target, EngineConfig(prefix_cache=False))
    longest = engine.info.max_context_len - _ANSWER_TOKENS
    prompts = acceptance.held_out_prompts(held_out, _PROMPTS, longest)
    drafts = {"": config.out} | ({"_in_use": resolve(config.in_use)} if config.in_use else {})
    # Answered at two temperatures.
    share = 2 * _ANSWER_TOKENS * len(prompts)
    measured: dict[str, float | None] = {"acceptance_in_use": None, "acceptance_in_use_sampled": None}
    for number, (name, draft) in enumerate(drafts.items()):
        progress("measure", share * number, share * len(drafts), f"what is accepted of {draft.name}")
        found = acceptance.measure(engine, draft, prompts, _ANSWER_TOKENS)
        measured |= {f"acceptance{name}": found.greedy, f"acceptance{name}_sampled": found.sampled}
    return measured


def _write(config: DistillConfig, target: Path, progress: Progress) -> None:
    blocks = config.corpus.concurrency * -(-config.corpus.max_len // 16)
    engine = load_engine(target, EngineConfig(num_blocks=blocks, prefix_cache=False))
    check_teacher(engine, read_head(target), target)
    tokenizer = load_tokenizer(target)
    write_corpus(engine, tokenizer, config.work, config.corpus, lambda done, total: progress("corpus", done, total, ""))


def _split(directory: Path) -> tuple[list[Sample], list[Sample]]:
    """Held-out samples (every 20th) and the rest."""
    samples = [s for shard in sorted(directory.glob("shard_*.safetensors")) for s in read_corpus(shard)]
    held_out = samples[::20]
    return held_out, [s for number, s in enumerate(samples) if number % 20]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        # Paths are no part of the recipe.
        return {key: _plain(item) for key, item in value.items() if not isinstance(item, Path)}
    return list(value) if isinstance(value, tuple) else value


class _Training:
    """The student, its optimizer, and the loop."""

    def __init__(self, config: DistillConfig, target: Path, token_map: torch.Tensor) -> None:
        self.model = build_student(target, config.student, token_map)
        self._config = config
        self._full_head = read_head(target).to(compute_dtype())
        self._head = self._full_head[token_map].contiguous()
        learnable = [p for p in self.model.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in learnable if p.dim() == 2], "weight_decay": 0.01},
            {"params": [p for p in learnable if p.dim() != 2], "weight_decay": 0.0},
        ]
        self._learnable = learnable
        self._optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))

    def run(self, samples: list[Sample], progress: Progress) -> tuple[int, int]:
        """Returns the number of steps and of tokens trained on."""
        steps = learned = 0
        for batch in _batches(samples, self._config):
            if learned >= self._config.train_tokens:
                break
            scores = self._step(batch, steps, learned / self._config.train_tokens)
            steps += 1
            learned += sum(len(s.hidden) for s in batch)
            note = f"loss {scores.mean_loss:.2f}, agreement {scores.agreement:.2f}"
            progress("train", min(learned, self._config.train_tokens), self._config.train_tokens, note)
        return steps, learned

    def evaluate(self, samples: list[Sample]) -> Scores:
        total = Scores()
        self.model.eval()
        with torch.no_grad():
            ordered = sorted(samples, key=lambda s: len(s.hidden))
            for start in range(0, len(ordered), 16):
                batch = ordered[start : start + 16]
                total.add(learn(hidden_states(self.model, batch), batch, self._head, self._full_head))
        return total

    def _step(self, batch: list[Sample], step: int, share_done: float) -> Scores:
        warmup = min(1.0, (step + 1) / self._config.warmup_steps)
        decay = 0.04 + 0.96 * 0.5 * (1 + math.cos(math.pi * share_done))
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * warmup * decay
        self.model.train()
        scores = learn(hidden_states(self.model, batch), batch, self._head)
        torch.nn.utils.clip_grad_norm_(self._learnable, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return scores


def _batches(samples: list[Sample], config: DistillConfig) -> Iterator[list[Sample]]:
    """Endless batches of about config.batch_tokens, each of samples of similar length, in random order."""
    rng = random.Random(config.seed)
    while True:
        order = rng.sample(samples, len(samples))
        batches: list[list[Sample]] = []
        for start in range(0, len(order), _BUCKET):
            batch: list[Sample] = []
            for sample in sorted(order[start : start + _BUCKET], key=lambda s: len(s.hidden)):
                if batch and (len(batch) + 1) * len(sample.hidden) > config.batch_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(sample)
            batches.append(batch)
        rng.shuffle(batches)
        yield from batches
