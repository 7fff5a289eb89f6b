"""One conversation that the target writes: first the user's turn, then the answer. A state machine over token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.training.openings import LONG, SHORT, choose

# Answers to long prompts copy from them, and a small draft predicts those worst.
_LONG_SHARE = 0.4
_SYSTEM_SHARE = 0.9
_SECOND_TURN_SHARE = 0.35
# Mostly greedy, because drafts are used so most often, and greedy text differs from sampled text.
_ANSWER_TEMPERATURES = (0.0, 0.0, 0.0, 0.5, 0.8)
_USER_TEMPERATURES = (1.0, 1.0, 0.8)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A chat template, split into the token ids around the turns."""

    system: tuple[int, ...]
    """The template's default text before the first user turn; may be empty."""
    user: tuple[int, ...]
    answer: tuple[int, ...]
    """Ends a user turn and opens an answer."""
    next_user: tuple[int, ...]
    """Ends an answer and opens the next user turn."""
    end: int
    """The token that ends a turn."""
    forbidden: tuple[int, ...]
    """Special tokens that may not be sampled inside a turn."""

    @classmethod
    def of(cls, tokenizer: Any) -> ChatFormat:
        """Reads it off a tokenizer's own chat template. Without one it only has the end and the forbidden tokens."""
        end = int(tokenizer.eos_token_id)
        forbidden = tuple(i for i in tokenizer.all_special_ids if i != end)
        if tokenizer.chat_template is None:
            return cls((), (), (), (), end, forbidden)
        mark = "\u241f"
        one = _render(tokenizer, [{"role": "user", "content": mark}], True)
        before, after = one.split(mark)
        messages = [{"role": r, "content": mark} for r in ("user", "assistant", "user")]
        two = _render(tokenizer, messages, False)
        between = two.split(mark)[2]

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        # The user header also opens the second user turn, after the end of the answer.
        header = between[len(tokenizer.eos_token) :].lstrip("\n")
        system = before[: len(before) - len(header)] if before.endswith(header) else ""
        user = header if system or before == header else before
        return cls(encode(system), encode(user), encode(after), encode(between), end, forbidden)


def _render(tokenizer: Any, messages: list[dict[str, str]], generate: bool) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    return text


@dataclass(slots=True)
class Conversation:
    """The tokens written so far, and the state of the current turn."""

    chat: ChatFormat
    encode: Any
    rng: random.Random
    max_len: int
    token_ids: list[int] = field(default_factory=list)
    answer_spans: list[tuple[int, int]] = field(default_factory=list)
    """[start, end) of each answer in token_ids, including its end token."""
    temperature: float = 1.0
    finished: bool = False
    _answering: bool = False
    _turn_tokens: int = 0
    _turn_limit: int = 0
    _answer_limit: int = 0
    _ending: str = ""
    _turns: int = 0

    @classmethod
    def begin(cls, chat: ChatFormat, encode: Any, rng: random.Random, max_len: int) -> Conversation:
        long = rng.random() < _LONG_SHARE
        kind = choose(LONG if long else SHORT, rng)
        self = cls(chat, encode, rng, max_len)
        system = chat.system if rng.random() < _SYSTEM_SHARE else ()
        self.token_ids = [*system, *chat.user, *encode(rng.choice(kind.openings))]
        self.temperature = rng.choice(_USER_TEMPERATURES)
        self._turn_limit = rng.randint(*kind.user_tokens)
        self._answer_limit = rng.randint(64, 224) if long else rng.randint(96, 288)
        self._ending = rng.choice(kind.endings)
        return self

    @classmethod
    def answering(
        cls, chat: ChatFormat, prompt: Sequence[int], max_len: int, limit: int, temperature: float
    ) -> Conversation:
        """One that only has an answer left, of at most `limit` tokens. A prompt without room for one is cut at its
        start."""
        self = cls(chat, None, random.Random(0), max_len)
        self.token_ids = list(prompt)[-max(1, max_len - limit) :]
        self.answer_spans = [(len(self.token_ids), len(self.token_ids))]
        self._answer_limit, self._turns = limit, 1
        self._begin_turn(answering=True, limit=limit, temperature=temperature)
        return self

    def accept(self, token_id: int) -> Sequence[int]:
        """Takes the sampled token; returns the tokens to run next (it and those that the template adds)."""
        self._turn_tokens += 1
        added = self._after_answer(token_id) if self._answering else self._after_user(token_id)
        self.token_ids.extend(added)
        if len(self.token_ids) >= self.max_len:
            self._finish()
        return added

    def _after_user(self, token_id: int) -> list[int]:
        ended = token_id == self.chat.end
        if not ended and self._turn_tokens < self._turn_limit:
            return [token_id]
        added = [] if ended else [token_id, *(self.encode(self._ending) if self._ending else [])]
        added.extend(self.chat.answer)
        self._begin_turn(answering=True, limit=self._answer_limit, temperature=self.rng.choice(_ANSWER_TEMPERATURES))
        self.answer_spans.append((len(self.token_ids) + len(added), len(self.token_ids) + len(added)))
        return added

    def _after_answer(self, token_id: int) -> list[int]:
        start, _ = self.answer_spans[-1]
        self.answer_spans[-1] = (start, len(self.token_ids) + 1)
        ended = token_id == self.chat.end
        if not ended and self._turn_tokens < self._answer_limit:
            return [token_id]
        if not ended or self._turns or self.rng.random() > _SECOND_TURN_SHARE:
            self.finished = True
            return [token_id]
        self._turns += 1
        self._ending = ""
        self._begin_turn(answering=False, limit=60, temperature=0.9)
        return list(self.chat.next_user)

    def _begin_turn(self, *, answering: bool, limit: int, temperature: float) -> None:
        self._answering = answering
        self._turn_tokens = 0
        self._turn_limit = limit
        self.temperature = temperature

    def _finish(self) -> None:
        self.finished = True
        del self.token_ids[self.max_len :]
        self.answer_spans = [(a, min(b, self.max_len)) for a, b in self.answer_spans if a < self.max_len]
