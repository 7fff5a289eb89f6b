"""Texts whose every token is known, with what each source would guess there. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.drafting.source import CloseReason, DraftSource
from outrider.engine import Row
from outrider.engine.kv.tree import depths
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.sim.engine import Guess
from outrider.tree import DraftTree

NUMBER_TOKENS = 2
"""Tokens before each prompt that name its text."""
_SURE = 1 - 1e-6


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, what the target says to it, and the guesses at each position after a beginning that is right."""

    prompt: Sequence[int]
    answer: Sequence[int]
    guesses: Sequence[Guess]
    """Of the draft model."""
    lookups: Mapping[str, Sequence[Guess]] = field(default_factory=dict)
    """Of other sources, by name: of those that are replayed and do not look anything up."""
    tenant: str = ""
    prediction: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Texts:
    """Numbered texts in one vocabulary."""

    texts: Sequence[Text]
    vocab_size: int

    def __post_init__(self) -> None:
        if not self.texts or len(self.texts) > self.vocab_size**NUMBER_TOKENS:
            raise ValueError(f"texts: {len(self.texts)} of them, at most {self.vocab_size**NUMBER_TOKENS}")

    def prompt(self, number: int) -> tuple[int, ...]:
        """With the tokens that name the text."""
        return (*divmod(number, self.vocab_size), *self.texts[number].prompt)

    def of(self, tokens: Sequence[int]) -> Text:
        """The text that begins with these tokens."""
        return self.texts[tokens[0] * self.vocab_size + tokens[1]]

    def place(self, text: Text, position: int) -> int:
        """Where in the answer a position of the sequence is; below 0 in the prompt."""
        return position - NUMBER_TOKENS - len(text.prompt)

    def said(self, row: Row, says: Callable[[Text, int], Guess]) -> Iterator[Guess]:
        """After each token of the row whose logits are wanted."""
        start, chain = row.sequence.cached_len, row.num_chain_tokens
        text = self.of([*row.sequence.tokens[:NUMBER_TOKENS], *row.token_ids[:NUMBER_TOKENS]])
        below = [chain + depth for depth in depths(row.parents)]
        for offset in [*range(chain), *below][len(row.token_ids) - row.num_logits :]:
            yield says(text, self.place(text, start + offset + 1))


def target_says(text: Text, place: int) -> Guess:
    """Its answer, without a doubt."""
    return ((text.answer[place], _SURE),) if 0 <= place < len(text.answer) else ()


def draft_says(text: Text, place: int) -> Guess:
    return text.guesses[place] if 0 <= place < len(text.guesses) else ()


@dataclass(slots=True)
class ReplayedLookups(DraftSource):
    """A source in the target's process that proposes what was recorded: as far as it proposed without a gap."""

    name: str
    texts: Texts
    _text: dict[SequenceKey, Text] = field(default_factory=dict)
    _limit: dict[SequenceKey, int] = field(default_factory=dict)
    _due: dict[SequenceKey, int] = field(default_factory=dict)
    """Committed lengths that were not answered yet."""

    def open(self, key: SequenceKey, spec: SequenceSpec, tokens: Sequence[int]) -> None:
        self._text[key], self._limit[key] = self.texts.of(spec.prompt), spec.speculation.max_draft_tokens

    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None:
        self._due[key] = base_len + len(tokens)

    def limit(self, key: SequenceKey, limits: Speculation) -> None:
        self._limit[key] = limits.max_draft_tokens

    def close(self, key: SequenceKey, reason: CloseReason) -> None:
        for known in (self._text, self._limit, self._due):
            known.pop(key, None)

    def poll(self) -> Iterator[tuple[SequenceKey, DraftTree]]:
        due, self._due = self._due, {}
        for key, length in due.items():
            text, most = self._text[key], self._limit[key]
            start = self.texts.place(text, length)
            found = list(self._run(text.lookups.get(self.name, ())[start : start + most]))
            if found:
                tokens, chances = zip(*found, strict=True)
                yield key, DraftTree(length, tokens, chances=chances, source=self.name)

    @staticmethod
    def _run(guesses: Sequence[Guess]) -> Iterator[tuple[int, float]]:
        for guess in guesses:
            if not guess:
                return
            yield guess[0]
