"""A client's logits options, with words as text: validated when created, then converted to a model's token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.errors import InvalidRequest
from outrider.gateway.tokenizer.model import CannotSplit, ModelTokenizer
from outrider.gateway.tools.structured import Grammatical
from outrider.limits import MAX_UINT32
from outrider.options.logits import MAX_BAD_WORDS, LogitsOptions
from outrider.protocol import convert
from outrider.rpc.v1 import sequence_pb2

MAX_BAD_WORD_CHARS = 256


@dataclass(frozen=True, slots=True)
class LogitsChoice:
    """The same options as LogitsOptions, but with words as text. The default changes nothing."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    structured: Grammatical | None = None
    exact: sequence_pb2.LogitsOptions | None = None
    """In a model's token ids, as a receipt has them, in place of all others."""

    def __post_init__(self) -> None:
        # The messages have 32-bit floats and integers.
        for name in ("logit_bias", "allowed_token_ids"):
            for token_id in getattr(self, name):
                if not 0 <= token_id <= MAX_UINT32:
                    raise InvalidRequest(name, f"{token_id} is not a token id")
        if not 0 <= self.min_tokens <= MAX_UINT32:
            raise InvalidRequest("min_tokens", f"{self.min_tokens} is not allowed; it has to be at least 0")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest("bad_words", f"{len(self.bad_words)} words; at most {MAX_BAD_WORDS} are allowed")
        for i, word in enumerate(self.bad_words):
            if not 1 <= len(word.strip()) <= len(word) <= MAX_BAD_WORD_CHARS:
                message = f"a word has 1 to {MAX_BAD_WORD_CHARS} characters, not blanks alone"
                raise InvalidRequest(f"bad_words[{i}]", message)
        if self.structured is not None and self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", f"cannot be combined with {self.structured.field}")
        self._options([])

    @property
    def num_chars(self) -> int:
        """Characters to tokenise."""
        return sum(map(len, self.bad_words))

    def to_proto(
        self, tokenizer: ModelTokenizer, vocab_size: int, grammar: str = ""
    ) -> sequence_pb2.LogitsOptions | None:
        """None if no option is set. `grammar`: of `structured`.

        Raises InvalidRequest for an id that the model does not have.
        """
        if not self:
            return None
        if self.exact is not None:
            convert.logits_from_proto(self.exact).check_vocabulary(vocab_size, "logits.")
            return self.exact
        try:
            options = self._options([ids for word in self.bad_words for ids in _spellings(tokenizer, word)])
        except CannotSplit as error:
            raise InvalidRequest("bad_words", str(error)) from error
        options.check_vocabulary(vocab_size)
        if grammar:
            options = replace(options, grammar=grammar)
        return convert.logits_to_proto(options)

    def client_field(self, field: str | None) -> str | None:
        """The client's name for the field that a router or target calls `field`."""
        if self.exact is not None:
            return field
        if field == "logits.grammar" and self.structured is not None:
            return self.structured.field
        return field and field.removeprefix("logits.")

    def __bool__(self) -> bool:
        return self != _NOTHING

    def _options(self, bad_words: Sequence[tuple[int, ...]]) -> LogitsOptions:
        return LogitsOptions(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            allowed_token_ids=tuple(self.allowed_token_ids),
            # A word may be spelled in two ways.
            bad_words=tuple(dict.fromkeys(bad_words)),
            min_tokens=self.min_tokens,
        )


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
