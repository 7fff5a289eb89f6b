"""Detokenising and stop strings, against the obvious slow way of doing each."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider.gateway.generation.output import Output
from outrider.gateway.tokenizer.text import Detokeniser, StopMatcher
from outrider.testing.tiny import tiny_tokenizer
from outrider.token_bytes import TokenBytes, UnsupportedDecoder
from tokenizers import decoders

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
    assert [detokeniser.push(i) for i in range(6)] == ["", " Hello", "", "", "€", ""]


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedDecoder, match="WordPiece"):
        TokenBytes.build(["a"], {"type": "WordPiece"}, specials=[])
    steps = [decoders.Replace("\u2581", " "), decoders.Replace("e", "E"), decoders.Fuse()]
    other = json.loads(decoders.Sequence(steps).__getstate__())
    with pytest.raises(UnsupportedDecoder, match="Replace of"):
        TokenBytes.build(["a"], other, specials=[])


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
    assert (piece.text, piece.finish_reason, output.matched_stop) == ("ab", "stop", "€!")


@settings(max_examples=50)
@given(token_ids, stop_lists)
def test_sixteen_stops_of_full_length_cost_no_correctness(ids: list[int], stops: list[str]) -> None:
    long_stops = [*stops, *("a" * 256 for _ in range(12))]
    output = Output(TOKENS, long_stops, frozenset(), len(ids) + 1)
    text = TOKENIZER.decode(ids, skip_special_tokens=True)
    piece = output.push(ids)
    whole = piece if piece.finish_reason else output.end("length", piece)
    assert whole.text == text[: first_stop(text, long_stops)]
