"""What a target says to some prompts, and what its draft model would guess at each position: real texts for a virtual
stack."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from outrider.comparison.texts import Question, make_texts
from outrider.comparison.texts import Text as Answered
from outrider.engine import Engine, EngineConfig, Row, resolve, weights_revision
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from outrider.engine.loading.loader import load_engine
from outrider.sim.engine import Guess
from outrider.user_cache import cache_directory
from outrider_controller.cli.output import note
from outrider_controller.whatif.texts import Text, Texts

from benchmarks.support.prompts import Prompt

_ALTERNATIVES = 4
_LEAST, _MOST = 0.001, 0.995
_FIRST_ID = 1


def known_texts(target: str, draft: str, prompts: Sequence[Prompt], max_tokens: int) -> Texts:
    """Token ids are numbered anew, so that a step of the virtual stack has few logits."""
    path = resolve(target)
    engine = load_engine(path, EngineConfig(prefix_cache=False))
    questions = [Question(prompt.category, ({"role": "user", "content": prompt.text},)) for prompt in prompts]
    kept = cache_directory() / "compare" / weights_revision(path)
    answered = make_texts(engine, load_tokenizer(path), questions, max_tokens, kept, note)
    drafter = load_engine(resolve(draft), EngineConfig(prefix_cache=False))
    note(f"{draft} reads {sum(len(text.tokens) for text in answered):,} tokens")
    guessed = [list(_guesses(drafter, text)) for text in answered]
    return _renumbered(answered, guessed)


@torch.inference_mode()
def _guesses(engine: Engine, text: Answered) -> Iterator[Guess]:
    """At each position of the answer, after the right beginning."""
    sequence, count = engine.kv.open([]), len(text.answer)
    logits = engine.forward([Row(sequence, text.tokens[:-1], count)])
    chances, at = logits.softmax(-1).topk(_ALTERNATIVES)
    ids = at if engine.token_map is None else engine.token_map[at]
    engine.kv.close(sequence)
    for tokens, values in zip(ids.tolist(), chances.tolist(), strict=True):
        found = [(token, min(value, _MOST)) for token, value in zip(tokens, values, strict=True)]
        yield [found[0], *(one for one in found[1:] if one[1] >= _LEAST)]


def _renumbered(answered: Sequence[Answered], guessed: Sequence[Sequence[Guess]]) -> Texts:
    numbers: dict[int, int] = {}

    def number(token: int) -> int:
        return numbers.setdefault(token, _FIRST_ID + len(numbers))

    texts = [
        Text(
            [number(token) for token in text.prompt],
            [number(token) for token in text.answer],
            [[(number(token), chance) for token, chance in guess] for guess in guesses],
        )
        for text, guesses in zip(answered, guessed, strict=True)
    ]
    return Texts(texts, _FIRST_ID + len(numbers))


def corrected(texts: Texts, acceptance: float, seed: int = 1) -> Texts:
    """As if the draft's first guess were right so often: some of its wrong ones are made right, each as sure as one of
    those that were right."""
    chance = random.Random(seed)
    right = [guess[0][1] for text in texts.texts for guess, token in _guessed(text) if guess[0][0] == token]
    share = len(right) / sum(len(text.answer) for text in texts.texts)
    made_right = max(0.0, (acceptance - share) / (1 - share))

    def correct(guess: Guess, token: int) -> Guess:
        if guess[0][0] == token or chance.random() >= made_right:
            return guess
        return [(token, chance.choice(right))]

    made = [replace(text, guesses=[correct(*pair) for pair in _guessed(text)]) for text in texts.texts]
    return Texts(made, texts.vocab_size)


def _guessed(text: Text) -> Iterator[tuple[Guess, int]]:
    return zip(text.guesses, text.answer, strict=True)
