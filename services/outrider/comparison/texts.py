"""The texts that drafts are compared on: the target's own answers, written once and kept, or answers that exist."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine import Engine
from outrider.samples import Cipher
from outrider.sim.pair import Pair
from outrider.training.shards import Corpus, list_shards
from outrider.training.texts import Message, answered_of, prompt_ids, prompt_of, read_lines

_CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class Question:
    """A line of a file of prompts, or of samples."""

    category: str
    messages: tuple[Message, ...]
    answer: str = ""
    """Of a sample."""
    prediction: str = ""
    """The output that a client would expect."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the target says to it, as token ids."""

    category: str
    prompt: list[int]
    answer: list[int]
    prediction: list[int]

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer]


def read_questions(file: Path, *, answered: bool) -> list[Question]:
    """Lines as `outrider distill` reads them, optionally with `category` and `prediction`. Raises ValueError that names
    file, line and field."""

    def read(row: dict[str, Any]) -> Question:
        for name in ("category", "prediction"):
            if not isinstance(row.get(name, ""), str):
                raise ValueError(f"{name}: must be a text")
        found = answered_of(row) if answered else None
        messages = prompt_of(row) if found is None else found.messages
        answer = "" if found is None else found.answer
        return Question(row.get("category") or "all", messages, answer, row.get("prediction", ""))

    return read_lines(file, read)


def kept_back(corpus: Path, vocab_size: int, most: int, cipher: Cipher | None = None) -> list[Text]:
    """What `outrider distill` has kept back of a corpus, answers of at most `most` tokens. Raises CheckpointError, and
    ValueError where there is no corpus."""
    if not list_shards(corpus):
        raise ValueError(f"{corpus}: no corpus of outrider distill")
    found = [(sample.prompt, sample.token_ids.tolist()) for sample in Corpus(corpus, vocab_size, cipher).held_out]
    return [Text("all", prompt, tokens[len(prompt) :][:most], []) for prompt, tokens in found]


def make_texts(
    engine: Engine, tokenizer: Any, questions: Sequence[Question], most: int, kept: Path, report: Callable[[str], None]
) -> list[Text]:
    """Answers of at most `most` tokens. Those that the target writes are kept in a file of the directory `kept`."""
    longest = engine.info.max_context_len - most
    prompts = [prompt_ids(tokenizer, question.messages)[-longest:] for question in questions]
    if all(question.answer for question in questions):
        end = engine.info.eos_token_ids[:1]
        answers = [[*_ids(tokenizer, question.answer), *end][:most] for question in questions]
    else:
        answers = _written(engine, prompts, most, kept, report)
    predictions = [_ids(tokenizer, question.prediction) for question in questions]
    parts = zip(questions, prompts, answers, predictions, strict=True)
    return [Text(question.category, *of_it) for question, *of_it in parts]


def told_apart(texts: Sequence[Text]) -> list[Text]:
    """Without the answers that go on otherwise than one to the same prompt before them: a replay has nothing but a
    beginning to know a text by."""
    found, following = [], dict[int, int]()
    for text in texts:
        after = list(zip(itertools.accumulate(text.tokens, grown, initial=0), text.tokens, strict=False))
        if all(following.get(beginning, token) == token for beginning, token in after[len(text.prompt) :]):
            found.append(text)
            for beginning, token in after:
                following.setdefault(beginning, token)
    return found


def grown(beginning: int, token: int) -> int:
    """The hash of a beginning with one more token; that of nothing is 0."""
    return hash((beginning, token))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _written(
    engine: Engine, prompts: list[list[int]], most: int, kept: Path, report: Callable[[str], None]
) -> list[list[int]]:
    file = kept / f"{hashlib.sha256(json.dumps([prompts, most]).encode()).hexdigest()[:16]}.json"
    if file.is_file():
        found: list[list[int]] = json.loads(file.read_text())
        return found
    report(f"the target answers {len(prompts)} prompts with at most {most} tokens each, once: {file}")
    answers = Pair(engine, None, max_sequences=_CONCURRENCY).answer(prompts, most, speculate=False)
    kept.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([answer.token_ids for answer in answers]))
    return [answer.token_ids for answer in answers]
