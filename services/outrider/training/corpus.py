"""The target writes the corpus: many conversations at once, with the head's input at every token.

The hidden state is kept, not the logits: 576 numbers instead of 49,152, and the full distribution follows from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.engine import CheckpointError, Engine, EngineSequence, Row
from outrider.training.conversation import ChatFormat, Conversation

_SHARD_TOKENS = 40_000
_TOP = 256
_TOP_P = 0.97

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """How much the target writes."""

    tokens: int = 1_000_000
    concurrency: int = 64
    """Conversations written at once."""
    max_len: int = 1024
    """Tokens of one conversation, prompt and answers."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "concurrency", "max_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation to learn from."""

    token_ids: Tensor
    """[tokens] int32."""
    hidden: Tensor
    """[tokens - 1, width]: row i is the input of the target's head when it chose token i + 1."""
    answers: Tensor
    """[tokens - 1] bool: whether token i + 1 belongs to an answer."""


@dataclass(slots=True)
class _Writing:
    conversation: Conversation
    sequence: EngineSequence
    pending: list[int]
    hidden: list[Tensor] = field(default_factory=list)

    def sample(self) -> Sample:
        hidden = torch.cat(self.hidden)
        # Tokens that the template adds at the end of a full conversation are never run, so they have no hidden states.
        ids = self.conversation.token_ids[: len(hidden) + 1]
        answers = torch.zeros(len(ids) - 1, dtype=torch.bool)
        for start, end in self.conversation.answer_spans:
            answers[start - 1 : end - 1] = True
        return Sample(torch.tensor(ids, dtype=torch.int32), hidden[: len(ids) - 1].clone(), answers)


def write_corpus(engine: Engine, tokenizer: Any, directory: Path, config: CorpusConfig, progress: Progress) -> None:
    """Fills `directory` with shards until it holds config.tokens; continues where an earlier run stopped.

    What is written when something ends it, Ctrl-C included, is kept.
    """
    directory.mkdir(parents=True, exist_ok=True)
    done = stored_tokens(directory)
    if done >= config.tokens:
        return
    number = len(_shards(directory))
    batch: list[Sample] = []
    try:
        # Another seed for a continued run: the same one would write the same conversations again.
        for sample in _write(engine, tokenizer, config, config.seed * 1_000_003 + number):
            batch.append(sample)
            size = sum(len(s.token_ids) for s in batch)
            progress(min(done + size, config.tokens), config.tokens)
            if size >= min(_SHARD_TOKENS, config.tokens - done):
                _save(batch, directory / f"shard_{number:04d}.safetensors")
                done, number, batch = done + size, number + 1, []
            if done >= config.tokens:
                return
    finally:
        if batch:
            _save(batch, directory / f"shard_{number:04d}.safetensors")


def stored_tokens(directory: Path) -> int:
    """Tokens of the corpus in a directory; 0 when it does not exist."""
    total = 0
    for shard in _shards(directory):
        with safe_open(shard, framework="pt") as stored:
            total += stored.get_slice("token_ids").get_shape()[0]
    return total


def _shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("shard_*.safetensors"))


def read_corpus(file: Path) -> list[Sample]:
    """The samples of one shard. Raises CheckpointError when its rows are not those of its tokens."""
    stored = load_file(file)
    num_rows = len(stored["token_ids"]) - len(stored["lengths"])
    if not num_rows == len(stored["hidden"]) == len(stored["answers"]):
        raise CheckpointError(str(file), f"{len(stored['hidden'])} hidden states for {num_rows} tokens; delete it")
    samples = []
    start = 0
    for number, length in enumerate(stored["lengths"].tolist()):
        # Each sample has one hidden row fewer than tokens.
        rows = slice(start - number, start - number + length - 1)
        ids = stored["token_ids"][start : start + length]
        samples.append(Sample(ids, stored["hidden"][rows], stored["answers"][rows]))
        start += length
    return samples


def _save(samples: list[Sample], file: Path) -> None:
    tensors = {
        "token_ids": torch.cat([s.token_ids for s in samples]),
        "lengths": torch.tensor([len(s.token_ids) for s in samples]),
        "hidden": torch.cat([s.hidden for s in samples]),
        "answers": torch.cat([s.answers for s in samples]),
    }
    scratch = file.with_suffix(".partial")
    save_file(tensors, scratch)
    scratch.rename(file)


def _write(engine: Engine, tokenizer: Any, config: CorpusConfig, seed: int) -> Iterator[Sample]:
    rng = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    chat = ChatFormat.of(tokenizer)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    max_len = min(config.max_len, engine.info.max_context_len)

    def begin() -> _Writing:
        conversation = Conversation.begin(chat, encode, rng, max_len)
        return _Writing(conversation, engine.kv.open([]), list(conversation.token_ids))

    writing = [begin() for _ in range(config.concurrency)]
    while True:
        rows = [Row(w.sequence, w.pending, len(w.pending)) for w in writing]
        logits, hidden = engine.forward_with_hidden(rows)
        ends = torch.tensor([len(w.pending) for w in writing]).cumsum(0)
        temperatures = torch.tensor([w.conversation.temperature for w in writing])
        chosen = _choose(logits[ends - 1], temperatures, chat.forbidden, noise)
        for number, w in enumerate(writing):
            end = int(ends[number])
            w.hidden.append(hidden[end - len(w.pending) : end])
            w.pending = list(w.conversation.accept(chosen[number]))
            if w.conversation.finished:
                yield w.sample()
                engine.kv.close(w.sequence)
                writing[number] = begin()


def _choose(logits: Tensor, temperatures: Tensor, forbidden: tuple[int, ...], noise: torch.Generator) -> list[int]:
    """One token per row of logits [rows, vocab]: greedy at temperature 0, else top-p sampled."""
    logits[:, list(forbidden)] = -torch.inf
    probs = torch.softmax(logits / temperatures.clamp_min(0.05)[:, None], -1)
    best, ids = probs.topk(min(_TOP, logits.shape[1]), -1)
    best = best * ((best.cumsum(-1) - best) < _TOP_P)
    sampled = ids.gather(1, torch.multinomial(best, 1, generator=noise))[:, 0]
    return torch.where(temperatures == 0, ids[:, 0], sampled).tolist()
