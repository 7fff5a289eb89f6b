"""The most bytes of a text that one token stands for, against real tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider.gateway.tokenizer.model import ModelTokenizer, TooManyTokens, max_bytes_per_token
from outrider.gateway.tokenizer.rendering import BoundedTemplate
from outrider.testing.tiny import tiny_tokenizer
from outrider.token_bytes import TokenBytes
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

BYTE_LEVEL = sorted(pre_tokenizers.ByteLevel.alphabet())
# Letters whose normal forms are shorter, and what tokenizers treat in their own ways.
texts = st.text(st.sampled_from("abé 1▁\n<|>\u1100\u1161\u11a8\u03b1\u0313\u0300\u0345ﷺ\u00a0"), max_size=60)


def byte_level() -> Tokenizer:
    pairs = [("a", "a"), ("aa", "aa"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("Ġ", "a"), ("1", "1")]
    vocab = {piece: i for i, piece in enumerate([*BYTE_LEVEL, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127)), "▁", "▁▁", "▁a", "aa"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "▁"), ("▁", "a"), ("a", "a")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def normalised(form: Any) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = form
    return tokenizer


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "SentencePiece": sentencepiece,
    "NFC": lambda: normalised(normalizers.NFC()),
    "NFKC": lambda: normalised(normalizers.Sequence([normalizers.NFKC()])),
}


def bound(tokenizer: Tokenizer) -> int | None:
    return max_bytes_per_token(json.loads(tokenizer.to_str()), TokenBytes.of_tokenizer(tokenizer).table)


@pytest.mark.parametrize("kind", BOUNDED)
@settings(max_examples=150)
@given(text=texts)
def test_no_text_has_fewer_tokens_than_its_length_says(kind: str, text: str) -> None:
    tokenizer = BOUNDED[kind]()
    most = bound(tokenizer)
    assert most is not None
    assert len(text.encode()) <= most * len(tokenizer.encode(text).ids)


def test_the_bound_is_the_longest_token() -> None:
    assert bound(byte_level()) == len("<|end|>")
    assert bound(normalised(normalizers.NFC())) == 3 * len("<|end|>")


def stripping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|sep|>", rstrip=True)])
    return tokenizer


def words() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), tokenizer.pre_tokenizer])
    return tokenizer


def with_gaps() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [
        stripping,
        words,
        with_gaps,
        lambda: normalised(normalizers.Replace("aa", "a")),
        lambda: normalised(normalizers.Strip()),
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(make: Callable[[], Tokenizer]) -> None:
    assert bound(make()) is None


def test_a_text_is_refused_by_its_length_only_when_that_is_certain() -> None:
    tiny = tiny_tokenizer()
    tokens = TokenBytes.of_tokenizer(tiny.backend_tokenizer)
    most = bound(tiny.backend_tokenizer)
    assert most is not None
    tokenizer = ModelTokenizer((), tokens, tiny.backend_tokenizer, BoundedTemplate({}, {}), most)
    tokenizer.check_len("a" * 5 * most, 5)
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.check_len("a" * 5 * most + "a", 5)
    assert caught.value.at_least == 6
