"""A client's logits options, with words as text: validated when created, then converted to a model's token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.errors import InvalidRequest
from outrider.gateway.tokenizer.model import CannotSplit, ModelTokenizer
from outrider.gateway.tools.structured import Grammatical
from outrider.options.logits import MAX_BAD_WORDS, LogitsOptions
from outrider.protocol import convert
from outrider.rpc.v1 import sequence_pb2

MAX_BAD_WORD_CHARS = 256


@dataclass(frozen=True, slots=True)
class LogitsChoice(LogitsOptions):
    """The default changes nothing."""

    words: Sequence[str] = ()
    """Bad words, as text."""
    structured: Grammatical | None = None
    exact: bool = False
    """Whether these are the `logits` that a receipt has."""

    def __post_init__(self) -> None:
        LogitsOptions.__post_init__(self)
        if len(self.words) > MAX_BAD_WORDS:
            raise InvalidRequest("bad_words", f"{len(self.words)} words; at most {MAX_BAD_WORDS} are allowed")
        for i, word in enumerate(self.words):
            if not 1 <= len(word.strip()) <= len(word) <= MAX_BAD_WORD_CHARS:
                message = f"a word has 1 to {MAX_BAD_WORD_CHARS} characters, not blanks alone"
                raise InvalidRequest(f"bad_words[{i}]", message)
        if self.structured is not None and self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", f"cannot be combined with {self.structured.field}")

    @property
    def num_chars(self) -> int:
        """Characters to tokenise."""
        return sum(map(len, self.words))

    def to_proto(
        self, tokenizer: ModelTokenizer, vocab_size: int, grammar: str = ""
    ) -> sequence_pb2.LogitsOptions | None:
        """None if no option is set. `grammar`: of `structured`.

        Raises InvalidRequest for an id that the model does not have.
        """
        if not self:
            return None
        try:
            spelled = [ids for word in self.words for ids in _spellings(tokenizer, word)]
        except CannotSplit as error:
            raise InvalidRequest("bad_words", str(error)) from error
        # Two words may be spelled alike.
        runs = tuple(dict.fromkeys([*self.bad_words, *spelled]))
        options = replace(self, words=(), bad_words=runs, grammar=grammar or self.grammar)
        options.check_vocabulary(vocab_size, "logits." if self.exact else "")
        return convert.logits_to_proto(options)

    def client_field(self, field: str | None) -> str | None:
        """The client's name for the field that a router or target calls `field`."""
        if self.exact:
            return field
        if field == "logits.grammar" and self.structured is not None:
            return self.structured.field
        return field and field.removeprefix("logits.")

    def __bool__(self) -> bool:
        return self != _NOTHING


_NOTHING = LogitsChoice()


def _spellings(tokenizer: ModelTokenizer, word: str) -> Iterator[tuple[int, ...]]:
    """The word's tokens at the beginning of a text, and after a space if its first token differs there.

    As in vLLM, a separate space token followed by the same tokens is no second spelling.
    """
    plain = tuple(tokenizer.encode_plain(word.lstrip()))
    spaced = tuple(tokenizer.encode_plain(" " + word.lstrip()))
    yield plain
    if spaced[0] != plain[0] and len(spaced) == len(plain):
        yield spaced
