"""The bytes of a vocabulary's tokens. A token is a run of bytes, not of characters. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# As `tokenizers` cleans up the pieces of a WordPiece.
_CLEANED_UP = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")),
    *((" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)

Spelling = Callable[[str], str]
MAX_TOKEN_ID = (1 << 22) - 1
"""Tables have a place for each id up to the highest."""


class UnsupportedDecoder(ValueError):
    """The tokenizer has a decoder that cannot be streamed here."""


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies (Radford et al. 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in printable)
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    """The bytes of a piece. One with a character outside the alphabet is an added token, encoded as plain UTF-8."""
    if all(char in _BYTE_ALPHABET for char in piece):
        return bytes(_BYTE_ALPHABET[char] for char in piece)
    return piece.encode()


@dataclass(slots=True)
class _Steps:
    """The decoder of a tokenizer.json, step by step, as far as a text can be streamed through it.

    An answer continues a prompt: what a step does to the first token of a text alone, it does to no token of an answer.
    """

    before: list[Spelling]
    """Of each token."""
    after: list[Spelling]
    """Of each token, and of each run of bytes."""
    byte_level: bool = False
    byte_fallback: bool = False
    joined: bool = False
    """The tokens are one text by now: a step may only change single characters."""

    @classmethod
    def of(cls, decoder: Mapping[str, Any] | None) -> _Steps:
        """Raises UnsupportedDecoder that names the step."""
        found = cls([], [])
        if decoder is None:
            found.before.append(lambda piece: f" {piece}")
        else:
            for step in flat_steps(decoder):
                found._add(step)
        return found

    def _add(self, step: Mapping[str, Any]) -> None:
        match step:
            case {"type": "Fuse"}:
                self.joined = True
            case {"type": "ByteLevel"} if not (self.joined or self.byte_fallback):
                self.byte_level = self.joined = True
            case {"type": "ByteFallback"} if not (self.joined or self.byte_fallback):
                self.byte_fallback = True
            case {"type": "Strip", "stop": 0} if self.joined:
                pass
            case {"type": "Strip", "content": char, "start": start, "stop": 0}:
                self._apply(lambda piece: piece[_leading(piece, char, start) :])
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if old and self._takes(old):
                self._apply(lambda piece: piece.replace(old, new))
            # In a text that is one token already, it would take the spaces for that token's.
            case {"type": "Metaspace", "replacement": mark} if not self.joined or step.get("prepend_scheme") == "never":
                self._apply(lambda piece: piece.replace(mark, " "))
            case {"type": "WordPiece", "prefix": prefix} if not (self.joined or self.byte_fallback):
                self._apply(lambda piece: _continued(piece, prefix, cleanup=step.get("cleanup", True)))
            case _:
                raise UnsupportedDecoder(f"decoder: {_named(step)}, at its place, cannot be streamed")

    def _takes(self, old: str) -> bool:
        return not self.byte_level and (len(old) == 1 or not self.joined)

    def _apply(self, spelling: Spelling) -> None:
        (self.after if self.byte_fallback else self.before).append(spelling)


def flat_steps(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of a decoder or a normalizer."""
    if part.get("type") == "Sequence":
        inner = part.get("decoders") or part.get("normalizers") or ()
        return [step for one in inner for step in flat_steps(one)]
    return [part]


def _named(step: Mapping[str, Any]) -> str:
    more = f" of {step.get('pattern')}" if step.get("type") == "Replace" else ""
    return f"{step.get('type')}{more}"


def _leading(piece: str, char: str, most: int) -> int:
    return min(most, len(piece) - len(piece.lstrip(char)))


def _continued(piece: str, prefix: str, *, cleanup: bool) -> str:
    text = piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"
    for old, new in _CLEANED_UP if cleanup else ():
        text = text.replace(old, new)
    return text


def _spelt(piece: str, spellings: Iterable[Spelling]) -> str:
    for spelling in spellings:
        piece = spelling(piece)
    return piece


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of every token of one vocabulary. Tokens that are not text (specials, padding rows) have none."""

    table: tuple[bytes, ...]
    runs: frozenset[int] = frozenset()
    """Tokens of one byte each. Those that follow one another are characters only if all of them together are."""
    silent: frozenset[int] = frozenset()
    """Tokens that are left out of a text, and do not end a run."""
    _after: tuple[Spelling, ...] = ()

    @classmethod
    def build(cls, pieces: Sequence[str | None], decoder: dict[str, Any] | None, specials: Iterable[int]) -> TokenBytes:
        """From the vocabulary's pieces by id and the `decoder` section of tokenizer.json. Raises UnsupportedDecoder."""
        steps = _Steps.of(decoder)
        silent = frozenset([*specials, *(i for i, piece in enumerate(pieces) if piece is None)])
        table, runs = list[bytes](), set[int]()
        for token_id, piece in enumerate(pieces):
            text = "" if token_id in silent or piece is None else _spelt(piece, steps.before)
            if steps.byte_level:
                table.append(_byte_level(text))
            elif steps.byte_fallback and (byte := _BYTE_PIECE.fullmatch(text)):
                runs.add(token_id)
                table.append(bytes([int(byte[1], 16)]))
            else:
                table.append(_spelt(text, steps.after).encode())
        return cls(tuple(table), frozenset(runs), silent, tuple(steps.after))

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer) -> TokenBytes:
        """As build, of a loaded tokenizer. Raises UnsupportedDecoder."""
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        # Added tokens may leave gaps in the ids, so the highest id bounds the table and not the count.
        highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=size - 1)
        if highest > MAX_TOKEN_ID:
            raise ValueError(f"the token id {highest}; at most {MAX_TOKEN_ID} is read")
        specials = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        pieces = [tokenizer.id_to_token(i) for i in range(highest + 1)]
        return cls.build(pieces, json.loads(tokenizer.to_str())["decoder"], specials)

    def with_names(self, names: Mapping[int | None, str]) -> TokenBytes:
        """A copy with names as the text of these tokens. Ids of None are left out."""
        silent = {i: name.encode() for i, name in names.items() if i is not None and not self.of(i)}
        table = tuple(silent.get(i, piece) for i, piece in enumerate(self.table))
        return replace(self, table=table, silent=self.silent - silent.keys()) if silent else self

    def of_run(self, data: bytes) -> str:
        """The text of a whole run: one wrong byte makes all of them U+FFFD, as in `tokenizers`."""
        try:
            return _spelt(data.decode(), self._after)
        except UnicodeDecodeError:
            return "\ufffd" * len(data)

    def of(self, token_id: int) -> bytes:
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""
