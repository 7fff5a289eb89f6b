"""A GGUF file gives the ids of the tokenizer.json from which it was made, as `tokenizers` reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter
from outrider.engine import CheckpointError, resolve
from outrider.engine.checkpoints.gguf_tokenizer import GgufTokenizer
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from tokenizers import Tokenizer, decoders, processors

from tests.unit.engine.llama_gguf import write_gguf
from tests.unit.token_kinds import BYTES, KINDS, texts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(file: Path, own: Tokenizer, architecture: str, **settings: Any) -> Path:
    """The metadata of a GGUF file, as llama.cpp's converter writes it of `own`; `settings` are further fields."""
    writer = GGUFWriter(file, architecture)
    spec = json.loads(own.to_str())
    added = {token["id"]: token for token in spec["added_tokens"]}
    tokens = [own.id_to_token(i) for i in range(own.get_vocab_size())]
    kind = "llama" if spec["model"]["byte_fallback"] else "gpt2"
    types = [type_of(token, added.get(i)) for i, token in enumerate(tokens)]
    # Gemma's converter writes runs of spaces as they are in a text.
    runs = [i for i, kind_of_token in enumerate(types) if kind == "llama" and kind_of_token == USER_DEFINED]
    spelled = [token.replace("▁", " ") if i in runs else token for i, token in enumerate(tokens)]
    writer.add_tokenizer_model(kind)
    writer.add_token_list(spelled)
    writer.add_token_types(types)
    if kind == "gpt2":
        writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
    else:
        writer.add_token_scores([float(-i) for i in range(len(tokens))])
    writer.add_bos_token_id(own.token_to_id("<s>") or own.token_to_id("<|im_start|>"))
    writer.add_eos_token_id(own.token_to_id("</s>") or own.token_to_id("<|im_end|>"))
    for name, value in settings.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value) if isinstance(value, bool) else writer.add_string(
            f"tokenizer.ggml.{name}", value
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def read(file: Path) -> GgufTokenizer:
    return GgufTokenizer.read(file, GGUFReader(file))


def type_of(token: str, added: dict[str, Any] | None) -> int:
    if token == "<unk>":
        return UNKNOWN
    if added is not None:
        return CONTROL if added["special"] else USER_DEFINED
    return BYTE if token in BYTES else NORMAL


@pytest.mark.parametrize(
    ("kind", "architecture", "settings"),
    [
        ("gpt2", "gpt2", {"pre": "gpt-2"}),
        ("digits", "llama", {"pre": "smollm", "add_space_prefix": False, "add_bos_token": False}),
        ("digits", "starcoder2", {"pre": "starcoder"}),
        ("qwen2", "qwen2", {"pre": "qwen2", "add_bos_token": False}),
        ("llama3", "llama", {"pre": "llama-bpe"}),
        ("llama3", "llama", {"pre": "llama-v3", "add_bos_token": True}),
        ("llama2", "llama", {}),
        ("llama2", "llama", {"pre": "default", "add_space_prefix": True, "add_bos_token": True}),
        ("without prefix", "llama", {"add_space_prefix": False}),
        ("gemma", "gemma", {"add_space_prefix": False}),
        ("gemma with runs", "gemma3", {"add_space_prefix": False}),
    ],
)
def test_the_ids_are_those_of_the_model_that_was_converted(
    tmp_path: Path, kind: str, architecture: str, settings: dict[str, Any]
) -> None:
    own = KINDS[kind][0]()
    built = read(write(tmp_path / "model.gguf", own, architecture, **settings)).build()
    for text in texts():
        assert built.encode(text).ids == own.encode(text).ids, repr(text)
        assert built.encode(text, add_special_tokens=False).ids == own.encode(text, add_special_tokens=False).ids


def test_flags_of_the_file_decide_what_surrounds_a_text(tmp_path: Path) -> None:
    own = KINDS["digits"][0]()
    file = write(tmp_path / "model.gguf", own, "llama", pre="smollm", add_bos_token=True, add_eos_token=True)
    ids = [own.token_to_id("<|im_start|>"), *own.encode("a 1").ids, own.token_to_id("<|im_end|>")]
    assert read(file).build().encode("a 1").ids == ids


@pytest.mark.parametrize(("name", "value"), [("pre", "kimi-k2"), ("pre", "no-such"), ("model", "bert")])
def test_what_is_not_known_is_refused_by_its_name(tmp_path: Path, name: str, value: str) -> None:
    fields = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": [], "tokenizer.ggml.model": "gpt2"}
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.{name}: '{value}'"):
        GgufTokenizer(tmp_path / "some.gguf", {**fields, f"tokenizer.ggml.{name}": value}).build()


def test_a_refused_file_leaves_nothing_and_reads_no_weights(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre: 'superbpe'"):
        resolve(write_gguf(tiny, tmp_path / "some.gguf", pre="superbpe"))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_converted_file_has_the_ids_the_names_and_every_end_of_a_turn(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    made = resolve(write_gguf(tiny, tmp_path / "some.gguf", pre="smollm", eot=0))
    own = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    written = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert all(written.encode(text).ids == own.encode(text).ids for text in texts(300) if text.isascii())
    assert load_tokenizer(made).eos_token == "<|im_end|>"
    assert json.loads((made / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def test_a_first_space_that_was_added_is_taken_away_again(tmp_path: Path) -> None:
    built = read(write(tmp_path / "model.gguf", KINDS["llama2"][0](), "llama")).build()
    assert built.decode(built.encode("hello the world").ids) == "hello the world"
    assert isinstance(built.decoder, decoders.Decoder)
    assert isinstance(built.post_processor, processors.PostProcessor)
