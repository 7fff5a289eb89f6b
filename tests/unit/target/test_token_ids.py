"""The ids of a text are those of the checkpoint's own tokenizer.json, as the library `tokenizers` reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outrider.engine import CheckpointError
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.target.grammars.tokenizer import read_tokenizer
from tokenizers import Tokenizer

from tests.unit.token_kinds import KINDS, texts, write


@pytest.fixture(params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(request.param, tmp_path)


def test_a_gateway_and_this_process_encode_as_tokenizer_json_says(checkpoint: Path) -> None:
    own = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    served, here = ModelTokenizer.parse(read_tokenizer(checkpoint)), load_tokenizer(checkpoint)
    for text in texts():
        with_special, plain = own.encode(text).ids, own.encode(text, add_special_tokens=False).ids
        assert served.encode(text) == with_special, repr(text)
        assert served.encode_plain(text) == plain, repr(text)
    for text in texts(200):
        assert here.encode(text) == own.encode(text).ids, repr(text)


def test_line_ends_before_a_digit_are_one_token(tmp_path: Path) -> None:
    served = ModelTokenizer.parse(read_tokenizer(write("digits", tmp_path)))
    assert [served.spell(i) for i in served.encode("Steps:\n\n1. do")].count("\n\n") == 1


def test_tokens_that_only_the_config_names_get_no_ids(tmp_path: Path) -> None:
    file = write("digits", tmp_path) / "tokenizer_config.json"
    added = {"9000": {"content": "Steps", "special": True, "normalized": False, "lstrip": False, "rstrip": False}}
    settings = {**json.loads(file.read_text()), "eos_token": "<end>", "unk_token": "<?>", "added_tokens_decoder": added}
    file.write_text(json.dumps(settings))
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    served = ModelTokenizer.parse(read_tokenizer(tmp_path))
    assert served.encode("Steps <end><?>") == own.encode("Steps <end><?>").ids
    assert served.eos_token_ids == ()


def test_truncation_in_the_file_shortens_no_prompt(tmp_path: Path) -> None:
    file = write("digits", tmp_path) / "tokenizer.json"
    own = Tokenizer.from_file(str(file))
    whole = own.encode("one two three four").ids
    own.enable_truncation(2)
    own.enable_padding(length=40)
    own.save(str(file))
    assert ModelTokenizer.parse(read_tokenizer(tmp_path)).encode("one two three four") == whole


def test_a_checkpoint_without_the_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        load_tokenizer(tmp_path)
