"""Files that would keep a loader busy for ever are refused by name, before anything is made of them."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from outrider.engine import CheckpointError, resolve
from outrider.token_bytes import TokenBytes
from tokenizers import Tokenizer

U32, F32, STRING, ARRAY = 4, 6, 8, 9
MANY = 1 << 60


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def header(tensors: int, keys: int, *fields: bytes) -> bytes:
    return struct.pack("<IIQQ", 0x46554747, 3, tensors, keys) + b"".join(fields)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return string("a") + struct.pack("<IIQ", ARRAY, kind, count) + content


def tensor(name: str, *dims: int, stated: int | None = None) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims) if stated is None else stated, *dims)
    return string(name) + sizes + struct.pack("<IQ", 0, 0)


def nested(depth: int) -> bytes:
    return string("a") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", U32, 0)


HEADERS = {
    "an array without end": (header(0, 1, array(U32, MANY)), "elements in its arrays"),
    "arrays without end of which each is small": (
        header(0, 9, *(array(U32, 1 << 20).replace(b"a", b"%d" % n) + bytes(4 << 20) for n in range(9))),
        "elements in its arrays",
    ),
    "an array that is longer than the file": (header(0, 1, array(U32, 1 << 20)), "it goes on to byte"),
    "arrays in arrays": (header(0, 1, nested(100_000)), "arrays of arrays"),
    "an array of arrays without end": (header(0, 1, array(ARRAY, MANY)), "arrays of arrays"),
    "keys without end": (header(0, MANY), "keys; at most"),
    "a file of nothing but keys": (header(0, 1 << 20), "keys; at most"),
    "tensors without end": (header(MANY, 0), "tensors; at most"),
    "a key without end": (header(0, 1, struct.pack("<Q", MANY)), "not a sound GGUF file"),
    "a text without end": (header(0, 1, string("a") + struct.pack("<IQ", STRING, MANY)), "it goes on to byte"),
    "a tensor of dimensions without end": (header(1, 0, tensor("t", stated=0xFFFFFFFF)), "it goes on to byte"),
    "a tensor that is larger than the file": (header(1, 0, tensor("t", 1 << 40)) + bytes(64), "it goes on to byte"),
    "a size that overflows": (header(1, 0, tensor("t", 1 << 33, 1 << 33)) + bytes(64), "not a sound GGUF file"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_gguf_header_without_end_is_refused(tmp_path: Path, name: str) -> None:
    file, (data, said) = tmp_path / "model.gguf", HEADERS[name]
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=said) as raised:
        resolve(file)
    assert raised.value.file == str(file)


def written(file: Path, layers: int = 1, tokens: list[str] | None = None, **keys: Any) -> Path:
    writer = GGUFWriter(file, "llama")
    tokens = tokens or ["<unk>", "<s>", "</s>", "a", "b"]
    writer.add_block_count(layers)
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_feed_forward_length):
        add(16)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(keys.get("model", "llama"))
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    if "merges" in keys:
        writer.add_token_merges(keys["merges"])
    if "bos" in keys:
        writer.add_int64("tokenizer.ggml.bos_token_id", keys["bos"])
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 16), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "layers without end": ({"layers": 2_000_000_000}, "llama.block_count: 2000000000 is not from 1 to"),
    "a token that can be cut without end": ({"tokens": ["<unk>", "<s>", "</s>", "a" * 200_000]}, "too long: to cut"),
    "a merge of one part": ({"merges": ["ab"]}, "cannot be converted"),
    "a special token that is none": ({"bos": 4_000_000_000}, "bos_token_id: 4000000000 is none of 5 tokens"),
    "a special token before the first": ({"bos": -1}, "bos_token_id: -1 is none of 5 tokens"),
}


@pytest.mark.parametrize("name", METADATA)
def test_gguf_metadata_of_which_no_model_can_be_made_is_refused(tmp_path: Path, name: str) -> None:
    keys, said = METADATA[name]
    file = written(tmp_path / "model.gguf", **keys)
    with pytest.raises(CheckpointError, match=said) as raised:
        resolve(file)
    assert raised.value.file == str(file)


def deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def steps(kind: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(parts)}


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BETWEEN = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 5_000}
TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a token's id": (lambda spec: spec["model"]["vocab"].update(a=2**32 - 1), "the token id 4294967295; at most"),
    "an added token's id": (
        lambda spec: spec["added_tokens"].append({**spec["added_tokens"][0], "id": 2**31}),
        "the token id 2147483648; at most",
    ),
    "replacements that double a text": (
        lambda spec: spec.update(normalizer=steps("normalizers", *[DOUBLED] * 60)),
        "normalizer: its replacements make a text up to",
    ),
    "a replacement between all characters": (
        lambda spec: spec.update(normalizer=BETWEEN),
        "normalizer: its replacements make a text up to",
    ),
    "replacements of a decoder": (
        lambda spec: spec.update(decoder=steps("decoders", *[DOUBLED] * 60)),
        "decoder: its replacements make a text up to",
    ),
    "no model": (lambda spec: spec.update(model=None), "not a tokenizer"),
}


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_would_take_for_ever_is_refused(copy: Path, name: str) -> None:
    file, (change, said) = copy / "tokenizer.json", TOKENIZERS[name]
    spec = json.loads(file.read_text())
    change(spec)
    file.write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match=said) as raised:
        resolve(copy)
    assert raised.value.file == str(file)


def test_a_gateway_makes_no_table_of_a_tokenizer_whose_ids_have_no_end(tiny: Path) -> None:
    spec = json.loads((tiny / "tokenizer.json").read_text())
    spec["model"]["vocab"]["zz"] = 2**32 - 1
    with pytest.raises(ValueError, match="the token id 4294967295"):
        TokenBytes.of_tokenizer(Tokenizer.from_str(json.dumps(spec)))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("form", ["deep", "pipe", "device", "huge"])
def test_json_that_is_nested_without_end_or_no_file_is_refused(copy: Path, name: str, form: str) -> None:
    file = copy / name
    file.unlink(missing_ok=True)
    if form == "deep":
        file.write_text(deep(200_000))
    elif form == "pipe":
        os.mkfifo(file)
    elif form == "device":
        file.symlink_to("/dev/zero")
    else:
        file.touch()
        os.truncate(file, 1 << 40)
    said = {"deep": "nested too deeply", "huge": "bytes; at most"}.get(form, "not a file that ends")
    with pytest.raises(CheckpointError, match=said) as raised:
        resolve(copy)
    assert raised.value.file == str(file)


def test_more_layers_than_a_model_has_are_refused_and_pipes_are_no_weights(copy: Path, tmp_path: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(CheckpointError, match="num_hidden_layers: 1000000000; at most"):
        resolve(copy)
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "model.safetensors").unlink()
    os.mkfifo(copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a file that ends"):
        resolve(copy)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="not a file that ends"):
        resolve(tmp_path / "pipe.gguf")
