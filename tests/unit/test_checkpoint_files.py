"""What is wrong with a checkpoint's files is one line, and is said before anything reads weights."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from outrider.checkpoint_files import end_tokens, engine_fault, fault, sampling_defaults
from outrider.engine import CheckpointError, EngineConfig, Row, resolve, weights_revision
from outrider.engine.loading.draft_checkpoint import read_embedding
from outrider.engine.loading.loader import load_engine
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, GenerationConfig

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def grouped(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel", **weights}}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}


INT8 = grouped()


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def refused(path: Path) -> str:
    """The line, which both a supervisor and the engine give."""
    found = str(fault(path) or engine_fault(path))
    with pytest.raises(CheckpointError) as raised:
        load_engine(path, EngineConfig(dtype="float32", num_blocks=8))
    assert str(raised.value) == found
    assert "\n" not in found
    return found


def test_a_sound_checkpoint_has_no_fault(tiny: Path) -> None:
    assert fault(tiny) is None
    assert fault(resolve("smollm2-135m-draft")) is None


OTHERS = [
    "mtp.safetensors",
    "adapter_model.safetensors",
    "medusa_lm_head.safetensors",
    "consolidated.safetensors",
    "model-00001-of-00001.safetensors",
    "tiny-Q4.gguf",
]


def sharded(path: Path) -> None:
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    names = load_file(path / "model-00001-of-00001.safetensors")
    shards = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


@pytest.mark.parametrize("index", [False, True])
def test_other_files_with_weights_are_left_alone_with_one_line(
    copy: Path, tiny: Path, index: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outrider.engine.loading.loader")
    if index:
        sharded(copy)
    revision = weights_revision(copy)
    embedding = read_embedding(copy)
    others = sorted(set(OTHERS) - {file.name for file in copy.iterdir()})
    for name in others[1:]:
        # A sound file would not show that it was read.
        (copy / name).write_bytes(b"no weights")
    save_file({"mtp.embed_tokens.weight": torch.zeros(3, 3)}, copy / others[0])
    assert fault(copy) is None and engine_fault(copy) is None
    engine = load_engine(copy, EngineConfig(dtype="float32", num_blocks=8))
    [line] = [line for line in caplog.messages if "left alone" in line]
    assert line.endswith(": " + ", ".join(others))
    prompt = [40, 41, 42]
    found = engine.forward([Row(engine.kv.open(prompt), prompt, 3)])
    plain = load_engine(tiny, EngineConfig(dtype="float32", num_blocks=8))
    assert torch.equal(found, plain.forward([Row(plain.kv.open(prompt), prompt, 3)]))
    assert weights_revision(copy) == revision
    assert torch.equal(read_embedding(copy), embedding)


def test_an_adapter_that_transformers_would_apply_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "adapter_config.json").write_text("{}")
    assert engine_fault(copy) is None
    monkeypatch.setattr("outrider.checkpoint_files.find_spec", lambda name: name == "peft" or None)
    assert "adapter_config.json: transformers would apply it, as peft is installed" in str(engine_fault(copy))


def test_shards_beside_a_whole_file_are_weights_twice(copy: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    sharded(copy)
    shutil.copy(copy / shard, copy / "model.safetensors")
    assert f"model.safetensors: weights twice: {shard} has them too" in refused(copy)
    (copy / "model.safetensors").unlink()
    assert fault(copy) is None
    (copy / shard).rename(copy / "model-00002-of-00002.safetensors")
    assert f"{shard}: missing, and model.safetensors.index.json names it" in refused(copy)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["model.safetensors"]}])
def test_an_index_that_names_no_weights_is_a_fault(copy: Path, index: dict[str, Any]) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refused(copy).endswith("model.safetensors.index.json: weight_map: names no weights")


@pytest.mark.parametrize("window", [-1, -4096])
def test_a_window_of_no_positions_is_named(copy: Path, window: int) -> None:
    kind = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    change(copy / "config.json", **kind, sliding_window=window)
    with pytest.raises(CheckpointError, match=f"config.json: sliding_window: {window} positions are no window"):
        load_engine(copy, EngineConfig(dtype="float32", num_blocks=8))


@pytest.mark.parametrize("value", [-1e-6, 0.0, math.nan, math.inf, True, "1e-6"])
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_a_number_that_no_model_can_have_is_refused_by_its_field(copy: Path, name: str, value: Any) -> None:
    change(copy / "config.json", **{name: value}, rope_parameters=None)
    assert refused(copy).endswith(f"config.json: {name}: {value!r} is not a number above 0")


@pytest.mark.parametrize("value", [-4, 0, 2.5, math.nan, True])
@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads", "hidden_size", "num_hidden_layers"])
def test_a_size_that_no_model_can_have_is_refused_by_its_field(copy: Path, name: str, value: Any) -> None:
    change(copy / "config.json", **{name: value})
    assert refused(copy).endswith(f"config.json: {name}: {value!r} is not a whole number above 0")


def test_without_tokenizer_json_the_way_to_one_is_told(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    assert refused(copy).endswith("tokenizer.json: missing")
    (copy / "tokenizer.model").touch()
    assert "missing; transformers' save_pretrained writes it of tokenizer.model" in refused(copy)


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        ({"quant_method": "aqlm"}, "weights in aqlm need aqlm, which is not installed"),
        ({"quant_method": "gptq", "bits": 3}, "bits: gptq with 3 is not read, only with 2, 4 or 8"),
        ({"quant_method": "awq", "version": "gemv"}, "awq of version gemv with 4 bits is not read"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"group_0": {}}},
            "config_groups: group_0: format marlin-24 of compressed-tensors is not read",
        ),
        (GPTQ | {"dynamic": {r"+:.*down.*": {"bits": 8}}}, "dynamic: +:.*down.*: bits: 8 is not read where the others"),
        (GPTQ | {"dynamic": {".*": {"bits": 2, "group_size": 32}}}, "dynamic: .*: bits: 2 is not read"),
        (
            GPTQ | {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}},
            "extra_config: model.layers.0.mlp.up_proj",
        ),
        (GPTQ | {"dynamic": ["a"]}, "is not in the form of gptq"),
        ({"quant_method": "gptq"}, "bits: gptq with None is not read"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: marlin of gptq is not read"),
        (GPTQ | {"format": "bitblas"}, "format: bitblas of gptq is not read"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format: True"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype: int16 of gptq is not read"),
        (GPTQ | {"rotation": "hadamard"}, "rotation: hadamard"),
        ({"quant_method": "awq", "w_bit": 3}, "awq of version gemm with 3 bits is not read"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point: awq without zeros is not read"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "backend: awq of llm-awq is not read"),
        ({"quant_method": "awq", "format": "gemv_fast"}, "awq of version gemv_fast"),
        (
            INT8 | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            "kv_cache_scheme: is not read; take plain weights",
        ),
        (INT8 | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config: is not read"),
        (INT8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: is not read"),
        (INT8 | {"config_groups": {"W8A8": ["Linear"]}}, "config_groups: W8A8: says no more than ['Linear']"),
        (grouped(num_bits=3), "config_groups: group_0: num_bits: 3 is not read, only 4 and 8"),
        (grouped(num_bits=4, type="float"), "config_groups: group_0: num_bits: floats of 4 bits"),
        (grouped(num_bits=8, strategy="tensor_group"), "config_groups: group_0: strategy: tensor_group is not read"),
        ({"quant_method": "exl3"}, "quant_method 'exl3' is not known"),
        ({"bits": 4}, "quant_method None is not known"),
        ("int4", "quant_method None is not known"),
    ],
)
def test_quantized_weights_that_cannot_be_read_are_named(
    copy: Path, stated: Any, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(copy / "config.json", quantization_config=stated)
    for reader in ("packed_weights.read", "AutoModelForCausalLM.from_pretrained"):
        monkeypatch.setattr(
            f"outrider.engine.loading.loader.{reader}", Mock(side_effect=AssertionError("weights read"))
        )
    assert f"config.json: quantization_config: {complaint}" in refused(copy)
    # vLLM reads what it knows.
    assert resolve(copy) == copy


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "k_proj.output_scale", "attn.kv_scale"])
def test_scales_of_keys_and_values_are_named_whatever_the_config_says(copy: Path, name: str) -> None:
    tensors = load_file(copy / "model.safetensors")
    named = f"model.layers.0.self_attn.{name}"
    save_file({**tensors, named: torch.ones(1)}, copy / "model.safetensors", metadata={"format": "pt"})
    assert f"{named}: scales of keys and values are not read; take plain weights, or use --engine vllm" in refused(copy)


def test_quantized_weights_of_which_the_config_says_nothing_are_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.qweight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    line = "quantization_config: missing, though model.layers.0.mlp.up_proj.qweight is of quantized weights"
    assert line in refused(copy)
    (copy / "quantize_config.json").write_text("{}")
    assert "quantize_config.json may say it: write that there" in refused(copy)
    change(copy / "config.json", compression_config={"quant_method": "compressed-tensors"})
    assert "compression_config: the old name of quantization_config" in refused(copy)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "model_type deepseek_v3: multi-head latent attention"),
        ({"model_type": "gpt_oss"}, "model_type gpt_oss: its attention has attention sinks"),
    ],
)
def test_an_attention_that_is_known_by_its_name_is_refused_early(
    copy: Path, fields: dict[str, Any], complaint: str
) -> None:
    change(copy / "config.json", **fields)
    assert complaint in refused(copy)


@pytest.mark.parametrize(
    ("ends", "complaint"),
    [
        ([2, 384], "eos_token_id: 384 is outside the vocabulary of 384 tokens"),
        (-1, "eos_token_id: -1 is outside the vocabulary"),
        ("</s>", "eos_token_id: '</s>' is not a token id"),
        ([1.5], "eos_token_id: [1.5] is not a token id"),
    ],
)
def test_an_end_that_is_no_token_is_named(copy: Path, ends: Any, complaint: str) -> None:
    change(copy / "generation_config.json", eos_token_id=ends)
    assert complaint in refused(copy)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"temperature": -1}, "temperature: -1 is not a number from 0 to 100"),
        ({"top_p": 0}, "top_p: 0 is not a number"),
        ({"top_k": 2.5}, "top_k: 2.5 is not a number"),
        ({"min_p": "0.1"}, "min_p: '0.1' is not a number from 0 to 1"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty: nan is not a number from 0.1 to 10"),
        ({"max_new_tokens": True}, "max_new_tokens: True is not a number"),
    ],
)
def test_a_default_of_sampling_that_no_request_may_have_is_named(
    copy: Path, fields: dict[str, Any], complaint: str
) -> None:
    change(copy / "generation_config.json", **fields)
    assert f"generation_config.json: {complaint}" in refused(copy)


@pytest.mark.parametrize(("ends", "found"), [(2, (2,)), ([2, 1], (2, 1)), (None, (7,))])
def test_ends_come_from_the_first_file_that_has_them(copy: Path, ends: Any, found: tuple[int, ...]) -> None:
    change(copy / "config.json", eos_token_id=7)
    change(copy / "generation_config.json", eos_token_id=ends)
    assert end_tokens(copy) == found


@pytest.mark.parametrize("ends", [None, []])
def test_ends_are_those_of_the_part_about_texts_where_no_other_has_them(copy: Path, ends: Any) -> None:
    config = Gemma3Config(text_config={"eos_token_id": [5, 6]}, eos_token_id=None)
    (copy / "config.json").write_text(json.dumps(config.to_dict()))
    change(copy / "generation_config.json", eos_token_id=ends)
    assert list(end_tokens(copy)) == GenerationConfig.from_model_config(config).eos_token_id == [5, 6]


def test_a_default_that_is_an_integer_may_be_written_as_a_float(copy: Path) -> None:
    change(copy / "generation_config.json", top_k=20.0, max_new_tokens=2e3)
    stated = sampling_defaults(copy)
    assert (stated["top_k"], stated["max_tokens"]) == (20, 2000)
    assert all(isinstance(stated[name], int) for name in ("top_k", "max_tokens"))


@pytest.mark.parametrize("content", ["{", "[]", "7"])
def test_a_config_that_is_no_object_is_named(copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content)
    assert "config.json: " in refused(copy)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_a_bare_repository_is_asked_back(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"did you mean hf://{name}\?"):
        resolve(name)


def test_another_unknown_name_is_not() -> None:
    with pytest.raises(CheckpointError) as raised:
        resolve("a/b/c")
    assert "did you mean" not in str(raised.value)
