"""The target writes the corpus: many conversations at once, with the head's input at every token.

The hidden state is kept, not the logits: 576 numbers instead of 49,152, and the full distribution follows from them.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine import Engine, EngineSequence, Row
from outrider.engine.models.taps import HEAD_INPUT
from outrider.samples import Cipher
from outrider.training.conversation import ChatFormat, Conversation
from outrider.training.shards import Sample, count_samples, list_shards, read_corpus, save_shard, stored_tokens
from outrider.training.texts import AnsweredText, Message, Sampled, prompt_ids

_SHARD_TOKENS = 40_000
_TOP = 256
_TOP_P = 0.97
# Tokens of one step.
_STEP_TOKENS = 512
# Of prompts that a user brings: greedy first, because drafts are used so most often. A second greedy answer would be
# the same.
_PASSES = (0.0, 0.8, 0.8, 0.8)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """How much the target writes, and about what."""

    tokens: int = 1_000_000
    concurrency: int = 64
    """Conversations written at once."""
    seconds: float = 0.0
    """Ends the writing, with what is there; 0: no such end."""
    max_len: int = 1024
    """Tokens of one conversation, prompt and answers."""
    answer_tokens: int = 256
    """Most tokens of an answer to a prompt of `prompts`."""
    seed: int = 0
    prompts: tuple[tuple[Message, ...], ...] = ()
    """The target answers these, at most four times, in the place of conversations that it begins itself."""
    samples: tuple[AnsweredText | Sampled, ...] = ()
    """Answers that exist: the target only reads them, once."""
    taps: tuple[int, ...] = ()
    """Layers whose states are kept too, numbered as in the engine's Taps."""

    def __post_init__(self) -> None:
        for name in ("tokens", "concurrency", "max_len", "answer_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")
        if self.prompts and self.samples:
            raise ValueError("prompts: not together with samples")


@dataclass(slots=True, eq=False)
class _Writing:
    conversation: Conversation
    sequence: EngineSequence
    pending: list[int]
    width: int = 0
    """Of the head's input, which comes after the taps in `hidden`."""
    hidden: list[Tensor] = field(default_factory=list)

    def sample(self) -> Sample:
        hidden = torch.cat(self.hidden)
        # Tokens that the template adds at the end of a full conversation are never run, so they have no hidden states.
        ids = self.conversation.token_ids[: len(hidden) + 1]
        answers = torch.zeros(len(ids) - 1, dtype=torch.bool)
        for start, end in self.conversation.answer_spans:
            answers[start - 1 : end - 1] = True
        states, width = hidden[: len(ids) - 1], self.width
        taps = states[:, :-width].clone() if states.shape[1] > width else None
        return Sample(torch.tensor(ids, dtype=torch.int32), states[:, -width:].clone(), answers, taps)


def write_corpus(
    engine: Engine,
    tokenizer: Any,
    directory: Path,
    config: CorpusConfig,
    progress: Progress,
    cipher: Cipher | None = None,
) -> None:
    """Fills `directory` with shards until it holds config.tokens, or all that the prompts and samples give; continues
    where an earlier run stopped.

    What is written when something ends it, Ctrl-C included, is kept.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    done, num_texts = stored_tokens(directory, cipher), count_samples(directory, cipher)
    if done >= config.tokens:
        return
    number, until_s = len(list_shards(directory)), time.monotonic() + (config.seconds or math.inf)
    batch: list[Sample] = []
    try:
        written = (sample for shard in list_shards(directory) for sample in read_corpus(shard, cipher))
        for sample in _write(engine, tokenizer, config, number, written):
            batch.append(sample)
            size = sum(len(s.token_ids) for s in batch)
            total = _total(config, done + size, num_texts + len(batch))
            progress(min(done + size, total), total)
            if size >= min(_SHARD_TOKENS, config.tokens - done):
                save_shard(batch, directory, number, cipher)
                done, num_texts, number, batch = done + size, num_texts + len(batch), number + 1, []
            if done >= config.tokens or time.monotonic() > until_s:
                return
    finally:
        if batch:
            save_shard(batch, directory, number, cipher)


def _total(config: CorpusConfig, tokens: int, num_texts: int) -> int:
    """Tokens that the corpus will have at most, if the texts to come are as long as those that are written."""
    texts = len(config.samples) or len(_PASSES) * len(config.prompts)
    return min(config.tokens, max(tokens, tokens * texts // num_texts)) if texts else config.tokens


def _write(
    engine: Engine, tokenizer: Any, config: CorpusConfig, run: int, written: Iterable[Sample]
) -> Iterator[Sample]:
    # Another seed for a continued run: the same one would write the same conversations again.
    seed = config.seed * 1_000_003 + run
    max_len = min(config.max_len, engine.info.max_context_len)
    chat = ChatFormat.of(tokenizer)
    texts: Iterator[Conversation]
    if config.samples:
        texts = _unwritten((_text(chat, tokenizer, sample, max_len) for sample in config.samples), written)
    elif config.prompts:
        texts = _unwritten(_prompted(chat, tokenizer, config, max_len), written)
    else:
        texts = _begun(chat, tokenizer, seed, max_len)
    yield from _run(engine, texts, chat, config, seed)


def _unwritten(texts: Iterator[Conversation], earlier: Iterable[Sample]) -> Iterator[Conversation]:
    """Without those that an earlier run has finished. They are not the first ones: a short answer ends before others
    that began earlier."""
    prompts, whole = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for sample in earlier:
        prompts[tuple(sample.prompt)] += 1
        whole[tuple(sample.token_ids.tolist())] += 1
    for text in texts:
        # Of an answer that exists the tokens are known, and a prompt may have others.
        end, written = (None, whole) if text.finished else (text.answer_spans[0][0], prompts)
        known = tuple(text.token_ids[:end])
        if not written[known]:
            yield text
        written[known] = max(0, written[known] - 1)


def _begun(chat: ChatFormat, tokenizer: Any, seed: int, max_len: int) -> Iterator[Conversation]:
    rng = random.Random(seed)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    while True:
        yield Conversation.begin(chat, encode, rng, max_len)


def _prompted(chat: ChatFormat, tokenizer: Any, config: CorpusConfig, max_len: int) -> Iterator[Conversation]:
    limit = min(config.answer_tokens, max_len // 2)
    for temperature, prompt in itertools.product(_PASSES, config.prompts):
        yield Conversation.answering(chat, prompt_ids(tokenizer, prompt), max_len, limit, temperature)


def _text(chat: ChatFormat, tokenizer: Any, sample: AnsweredText | Sampled, max_len: int) -> Conversation:
    """A conversation that is complete: its tokens are run, and none is chosen."""
    if isinstance(sample, Sampled):
        prompt, answer = list(sample.prompt), list(sample.answer)
    else:
        prompt = prompt_ids(tokenizer, sample.messages)
        answer = [*tokenizer.encode(sample.answer, add_special_tokens=False), chat.end]
    answer = answer[: max_len // 2]
    text = Conversation.answering(chat, prompt, max_len, len(answer), 0.0)
    text.answer_spans = [(len(text.token_ids), len(text.token_ids) + len(answer))]
    text.token_ids.extend(answer)
    text.finished = True
    return text


def _run(
    engine: Engine, texts: Iterator[Conversation], chat: ChatFormat, config: CorpusConfig, seed: int
) -> Iterator[Sample]:
    noise = torch.Generator(engine.info.device).manual_seed(seed)
    writing: list[_Writing] = []
    while True:
        for text in itertools.islice(texts, config.concurrency - len(writing)):
            # The last token of a text that is complete decides nothing.
            pending = text.token_ids[:-1] if text.finished else list(text.token_ids)
            writing.append(_Writing(text, engine.kv.open([]), pending))
        if not writing:
            return
        _step(engine, writing, chat, noise, (*config.taps, HEAD_INPUT))
        for w in [w for w in writing if w.conversation.finished and not w.pending]:
            yield w.sample()
            engine.kv.close(w.sequence)
            writing.remove(w)


def _step(
    engine: Engine, writing: Sequence[_Writing], chat: ChatFormat, noise: torch.Generator, layers: tuple[int, ...]
) -> None:
    """Runs what fits into a step, those that decode first; whoever has run all its tokens chooses the next."""
    room, running = _STEP_TOKENS, []
    for w in sorted(writing, key=lambda w: len(w.pending)):
        if (count := min(len(w.pending), room)) > 0:
            running.append((w, count))
            room -= count
    choosing = [w for w, n in running if n == len(w.pending) and not w.conversation.finished]
    rows = [Row(w.sequence, w.pending[:n], int(w in choosing), num_tapped=n) for w, n in running]
    logits, states = engine.forward_tapped(rows, layers)
    # Copied: the next step may overwrite them.
    for (w, count), found in zip(running, torch.split(states.clone(), [n for _, n in running]), strict=True):
        w.hidden.append(found)
        w.width = found.shape[1] // len(layers)
        del w.pending[:count]
    if not choosing:
        return
    temperatures = torch.tensor([w.conversation.temperature for w in choosing], device=logits.device)
    for w, token_id in zip(choosing, _choose(logits.clone(), temperatures, chat.forbidden, noise), strict=True):
        added = w.conversation.accept(token_id)
        w.pending = [] if w.conversation.finished else list(added)


def _choose(logits: Tensor, temperatures: Tensor, forbidden: tuple[int, ...], noise: torch.Generator) -> list[int]:
    """One token per row of logits [rows, vocab]: greedy at temperature 0, else top-p sampled."""
    logits[:, list(forbidden)] = -torch.inf
    probs = torch.softmax(logits / temperatures.clamp_min(0.05)[:, None], -1)
    best, ids = probs.topk(min(_TOP, logits.shape[1]), -1)
    best = best * ((best.cumsum(-1) - best) < _TOP_P)
    sampled = ids.gather(1, torch.multinomial(best, 1, generator=noise))[:, 0]
    return torch.where(temperatures == 0, ids[:, 0], sampled).tolist()
