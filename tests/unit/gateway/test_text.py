"""Detokenising and stop strings, against the obvious slow way of doing each."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider.checkpoint_files import fault
from outrider.gateway.generation.output import Output
from outrider.gateway.tokenizer.text import Detokeniser, StopMatcher
from outrider.testing.tiny import tiny_checkpoint, tiny_tokenizer
from outrider.token_bytes import TokenBytes, UnsupportedDecoder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TOKENIZER = tiny_tokenizer()
TOKENS = TokenBytes.of_tokenizer(TOKENIZER.backend_tokenizer)
token_ids = st.lists(st.integers(0, 383), max_size=60)
# Few letters, so that stop strings overlap themselves, one another and the text.
letters = st.text("ab€", max_size=30)
stop_lists = st.lists(st.text("ab€", min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the text has to end: before the first stop string to complete, the longest of those."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths)
    return None


@given(token_ids)
def test_token_by_token_gives_the_text_the_tokenizer_gives_for_all_at_once(ids: list[int]) -> None:
    detokeniser = Detokeniser(TOKENS)
    text = "".join([*(detokeniser.push(i) for i in ids), detokeniser.flush()])
    assert text == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=40).filter(lambda text: "<|" not in text))  # The names of special tokens are no text.
def test_text_survives_encoding_and_streaming(text: str) -> None:
    detokeniser = Detokeniser(TOKENS)
    ids = TOKENIZER.backend_tokenizer.encode(text).ids
    assert "".join([*(detokeniser.push(i) for i in ids), detokeniser.flush()]) == text


def test_a_character_of_several_tokens_comes_out_whole_with_its_last() -> None:
    ids = TOKENIZER.backend_tokenizer.encode("😀").ids
    detokeniser = Detokeniser(TOKENS)
    assert len(ids) == 4
    assert [detokeniser.push(i) for i in ids] == ["", "", "", "😀"]


def test_a_character_that_is_never_finished_comes_out_as_the_replacement_character() -> None:
    detokeniser = Detokeniser(TOKENS)
    assert detokeniser.push(TOKENIZER.backend_tokenizer.encode("é").ids[0]) == ""
    assert detokeniser.flush() == "\ufffd"


def test_special_tokens_and_ids_beyond_the_vocabulary_have_no_text() -> None:
    detokeniser = Detokeniser(TOKENS)
    assert [detokeniser.push(i) for i in (0, 1, 2, 10**6)] == ["", "", "", ""]


def test_sentencepiece_pieces_become_spaces_and_bytes() -> None:
    spaces = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    tokens = TokenBytes.build(["<s>", "\u2581Hello", "<0xE2>", "<0x82>", "<0xAC>", None], decoder, specials=[0])
    detokeniser = Detokeniser(tokens)
    assert [detokeniser.push(i) for i in (0, 1, 2, 3, 4, 5, 1)] == ["", " Hello", "", "", "", "", "€ Hello"]


STEPS = {
    "bytes of a level": decoders.ByteLevel(),
    "bytes in hexadecimal": decoders.ByteFallback(),
    "joined": decoders.Fuse(),
    **{f"spaces, {scheme}": decoders.Metaspace(prepend_scheme=scheme) for scheme in ("always", "first", "never")},
    "first space": decoders.Strip(" ", 1, 0),
    "first letters": decoders.Strip("a", 2, 0),
    "last space": decoders.Strip(" ", 0, 1),
    "a space": decoders.Replace("\u2581", " "),
    "a letter": decoders.Replace("a", "zz"),
    "letters": decoders.Replace("he", "E"),
    "words": decoders.WordPiece(),
    "words as they are": decoders.WordPiece(cleanup=False),
    "ends of words": decoders.BPEDecoder(),
    "sounds": decoders.CTC(),
}
REFUSED = ("last space", "ends of words", "sounds")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [
    *("!", "a", "\u2581", "\u2581the", "b\u2581c", "\u2581\u2581x", "##ing", "##s", "do not", "n't", " .", "'s", "a b"),
    *(
        "\u0120hello",
        "\u00c3",
        "\u00a9",
        "\u010a",
        "<0x",
        "<0x41",
        "<0x4a>",
        "café",
        "日",
        "\t",
        "\ufffd",
        "x</w>",
        "|",
    ),
    *BYTES,
]


def with_decoder(decoder: decoders.Decoder | None) -> Tokenizer:
    made = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="a"))
    made.add_special_tokens(["<s>"])
    made.add_tokens(["<tool>"])
    if decoder is not None:
        made.decoder = decoder
    return made


def after_a_token(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids` in a text that one token, `!`, begins."""
    return tokenizer.decode([0, *ids])[len(tokenizer.decode([0])) :]


def streamed(tokens: TokenBytes, ids: list[int]) -> str:
    detokeniser = Detokeniser(tokens)
    before = detokeniser.push(0)
    return "".join([before, *map(detokeniser.push, ids), detokeniser.flush()])[len(before) :]


def some_ids(rng: random.Random, size: int) -> list[int]:
    """Any tokens, and characters in bytes, whole and broken."""
    ids = [rng.randrange(size) if rng.random() < 0.3 else rng.randrange(len(PIECES) - 256) for _ in range(8)]
    for char in rng.choices("\té日😀", k=3):
        data = char.encode()[: rng.randrange(1, 5)]
        at = rng.randrange(len(ids) + 1)
        ids[at:at] = [PIECES.index(BYTES[byte]) for byte in data]
    return ids


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_a_decoder_of_any_steps_is_streamed_as_the_library_decodes_or_refused(length: int) -> None:
    rng = random.Random(length)
    refused = set()
    every = list(itertools.product(STEPS, repeat=length))
    for names in rng.sample(every, min(400, len(every))):
        steps = [STEPS[name] for name in names]
        tokenizer = with_decoder(decoders.Sequence(steps) if steps else None)
        try:
            tokens = TokenBytes.of_tokenizer(tokenizer)
        except UnsupportedDecoder:
            refused.add(names)
            continue
        for _ in range(15):
            ids = some_ids(rng, tokenizer.get_vocab_size())
            assert streamed(tokens, ids) == after_a_token(tokenizer, ids), (names, ids)
    if length == 1:
        assert refused == {(name,) for name in REFUSED}


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("form", ["spaces", "bytes and spaces", "as in Llama"])
def test_texts_of_a_unigram_vocabulary_with_bytes_are_streamed_as_the_library_decodes(scheme: str, form: str) -> None:
    pieces = [(piece, 0.0) for piece in ("!", "<unk>", *BYTES)]
    pieces += [(piece, -float(len(piece))) for piece in ("\u2581", *"abcdehlost", "\u2581the", "hello", "\u2581a")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    spaces = decoders.Metaspace(prepend_scheme=scheme)
    of_llama = [STEPS["a space"], STEPS["bytes in hexadecimal"], STEPS["joined"], STEPS["first space"]]
    tokenizer.decoder = {
        "spaces": spaces,
        "bytes and spaces": decoders.Sequence([STEPS["bytes in hexadecimal"], spaces]),
        "as in Llama": decoders.Sequence(of_llama),
    }[form]
    tokens, rng = TokenBytes.of_tokenizer(tokenizer), random.Random(scheme)
    for _ in range(500):
        text = "".join(rng.choices(["the", " ", "  ", "hello", "\t", "\n", "é", "日本", "😀", "\u2581", "a"], k=12))
        ids = tokenizer.encode(text).ids
        assert streamed(tokens, ids) == after_a_token(tokenizer, ids)
        # Every cut: what is out by then, and held back, is the library's text of these tokens.
        for cut in range(0, len(ids), 5):
            assert streamed(tokens, ids[:cut]) == after_a_token(tokenizer, ids[:cut])


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedDecoder, match="BPEDecoder"):
        TokenBytes.build(["a"], {"type": "BPEDecoder"}, specials=[])
    steps = [decoders.Fuse(), decoders.Replace("ee", "E")]
    other = json.loads(decoders.Sequence(steps).__getstate__())
    with pytest.raises(UnsupportedDecoder, match="Replace of"):
        TokenBytes.build(["a"], other, specials=[])
    tiny_checkpoint(tmp_path)
    assert fault(tmp_path) is None
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"decoder": other}))
    assert "tokenizer.json: decoder: Replace of {'String': 'ee'}" in str(fault(tmp_path))


@given(letters, stop_lists)
def test_text_ends_before_the_first_stop_string_to_complete(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = "".join([*(matcher.push(char) for char in text), matcher.flush()])
    end = first_stop(text, stops)
    assert seen == text[:end]
    assert bool(matcher.stop) == (end is not None)
    if end is not None:
        assert matcher.stop in stops
        assert text[end:].startswith(matcher.stop)


@given(letters, stop_lists, st.integers(1, 7))
def test_what_comes_out_does_not_depend_on_how_the_text_was_cut(text: str, stops: list[str], size: int) -> None:
    by_char, by_chunk = StopMatcher(stops), StopMatcher(stops)
    for at in range(0, len(text), size):
        chunk = text[at : at + size]
        assert by_chunk.push(chunk) == "".join(by_char.push(char) for char in chunk)
        assert by_chunk.stop == by_char.stop


@given(letters, stop_lists)
def test_no_more_is_held_back_than_a_partial_match_requires(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end, char in enumerate(text, start=1):
        shown += matcher.push(char)
        if matcher.stop:
            return
        held = text[len(shown) : end]
        longest = max((n for n in range(end + 1) if any(s.startswith(text[end - n : end]) for s in stops)), default=0)
        assert len(held) == longest


def test_without_stop_strings_nothing_is_held_back() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == "anything"
    assert matcher.flush() == ""


def test_a_stop_string_is_found_across_tokens_and_inside_a_split_character() -> None:
    ids = TOKENIZER.backend_tokenizer.encode("ab€!c").ids
    output = Output(TOKENS, ["€!"], frozenset(), len(ids) + 1)
    piece = output.push(ids)
    assert (piece.content, output.finish_reason, output.matched_stop) == ("ab", "stop", "€!")


@settings(max_examples=50)
@given(token_ids, stop_lists)
def test_sixteen_stops_of_full_length_cost_no_correctness(ids: list[int], stops: list[str]) -> None:
    long_stops = [*stops, *("a" * 256 for _ in range(12))]
    output = Output(TOKENS, long_stops, frozenset(), len(ids) + 1)
    text = TOKENIZER.decode(ids, skip_special_tokens=True)
    piece = output.push(ids)
    whole = piece if output.finish_reason else output.end("length", piece)
    assert whole.content == text[: first_stop(text, long_stops)]
