"""The bytes of a vocabulary's tokens. A token is a run of bytes, not of characters. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = ({"String": "\u2581"}, " ")
"""What the Replace of a SentencePiece decoder replaces, and by what."""
_SENTENCEPIECE_STEPS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


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


def _sentencepiece(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()


def _steps(decoder: dict[str, Any]) -> list[str]:
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    kind = str(decoder.get("type"))
    replaced = (decoder.get("pattern"), decoder.get("content"))
    return [f"Replace of {replaced[0]}" if kind == "Replace" and replaced != _SPACE else kind]


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of every token of one vocabulary. Tokens that are not text (specials, padding rows) have none."""

    table: tuple[bytes, ...]

    @classmethod
    def build(cls, pieces: Sequence[str | None], decoder: dict[str, Any] | None, specials: Iterable[int]) -> TokenBytes:
        """From the vocabulary's pieces by id and the `decoder` section of tokenizer.json.

        A `Strip` of the first space is skipped, because an answer continues a prompt and does not begin a text.
        """
        steps = set(_steps(decoder or {}))
        if steps == {"ByteLevel"}:
            spell = _byte_level
        elif steps <= _SENTENCEPIECE_STEPS and steps & {"Replace", "Metaspace"}:
            spell = _sentencepiece
        else:
            raise UnsupportedDecoder(f"decoder {sorted(steps)} is neither byte-level nor SentencePiece")
        silent = frozenset(specials)
        return cls(tuple(b"" if i in silent or p is None else spell(p) for i, p in enumerate(pieces)))

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer) -> TokenBytes:
        """As build, of a loaded tokenizer. Raises UnsupportedDecoder."""
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        # Added tokens may leave gaps in the ids, so the highest id bounds the table and not the count.
        highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=size - 1)
        specials = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        pieces = [tokenizer.id_to_token(i) for i in range(highest + 1)]
        return cls.build(pieces, json.loads(tokenizer.to_str())["decoder"], specials)

    def with_names(self, names: Mapping[int | None, str]) -> TokenBytes:
        """A copy with names as the text of these tokens. Ids of None are left out."""
        silent = {i: name.encode() for i, name in names.items() if i is not None and not self.of(i)}
        return TokenBytes(tuple(silent.get(i, piece) for i, piece in enumerate(self.table))) if silent else self

    def of(self, token_id: int) -> bytes:
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""
