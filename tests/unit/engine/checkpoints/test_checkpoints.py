"""What is not plain, sound weights is refused by name."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from outrider.engine import (
    CheckpointError,
    EngineConfig,
    Row,
    resolve,
    revision,
    tokenizer_fingerprint,
    weights_revision,
)
from outrider.engine.checkpoints.digests import file_digest
from outrider.engine.loading.draft_checkpoint import (
    build_draft_model,
    load_draft_model,
    read_embedding,
    read_head,
    save_draft_model,
)
from outrider.engine.loading.loader import load_engine
from outrider.testing.tiny import tiny_checkpoint
from safetensors.torch import load_file, save_file


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="smollm2-135m-instruct"):
        resolve("no-such-model")


def test_a_pickled_checkpoint_is_refused_by_its_name(copy: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*pickled"):
        resolve(copy)


def test_a_pickled_file_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="pickled"):
        resolve(tmp_path / "model.pt")


@pytest.mark.parametrize("damage", ["truncated", "header", "empty"])
def test_a_damaged_safetensors_file_is_refused_by_its_name(copy: Path, damage: str) -> None:
    file = copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes({"truncated": data[:-100], "header": b"\xff" * 8 + data[8:], "empty": b""}[damage])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        resolve(copy)


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 40, b"not a model at all"])
def test_a_damaged_gguf_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        resolve(tmp_path / "model.gguf")


def test_fingerprints_tell_tokenizers_and_weights_apart(tiny: Path, tmp_path: Path) -> None:
    same_tokenizer = tiny_checkpoint(tmp_path / "a", seed=1)
    other_tokenizer = tiny_checkpoint(tmp_path / "b", vocab_size=400)
    assert (
        tokenizer_fingerprint(tiny) == tokenizer_fingerprint(same_tokenizer) != tokenizer_fingerprint(other_tokenizer)
    )
    assert weights_revision(tiny) != weights_revision(same_tokenizer)


def test_a_revision_tells_weights_quantization_dtype_and_execution_apart(tiny: Path) -> None:
    def of(quantization: str = "none", **changes: str) -> str:
        return revision(tiny, replace(info, **changes), quantization)

    info = load_engine(tiny, EngineConfig(num_blocks=8, dtype="float32")).info
    assert of() == of()
    found = [of(), of("int8"), of(dtype="bfloat16"), of(execution="native-avx2"), of(execution="native-amx")]
    assert len(set(found)) == len(found)
    assert len({one.partition("/")[0] for one in found}) == 2


def test_a_files_hash_is_reckoned_once_and_anew_when_the_file_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "weights"
    file.write_bytes(bytes(2 << 20))
    first = file_digest(file)
    assert first == hashlib.sha256(bytes(2 << 20)).digest()
    [entry] = (tmp_path / "cache" / "digests").iterdir()
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700
    entry.write_text("11" * 32)
    assert file_digest(file) == bytes.fromhex("11" * 32)
    other = tmp_path / "other"
    other.write_bytes(b"1" + bytes((2 << 20) - 1))
    other.replace(file)
    assert file_digest(file) not in (first, bytes.fromhex("11" * 32))


@pytest.mark.parametrize("damage", ["", "no hash", "11"])
def test_a_damaged_entry_is_reckoned_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "weights"
    file.write_bytes(bytes(2 << 20))
    first = file_digest(file)
    [entry] = (tmp_path / "cache" / "digests").iterdir()
    entry.write_text(damage)
    assert file_digest(file) == first


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    file = tmp_path / "weights"
    file.write_bytes(bytes(2 << 20))
    assert file_digest(file) == hashlib.sha256(bytes(2 << 20)).digest()


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("lm_head.qweight", torch.zeros(4, 8, dtype=torch.int32)),
        ("lm_head.weight_packed", torch.zeros(8, 4, dtype=torch.int32)),
        ("lm_head.weight", torch.zeros(8, 4).to(torch.float8_e4m3fn)),
        ("lm_head.weight", torch.zeros(8, 4, dtype=torch.int8)),
    ],
)
def test_a_quantized_head_is_not_lent_to_drafts_and_the_embedding_not_taken_for_it(
    name: str, stored: torch.Tensor, tmp_path: Path
) -> None:
    save_file({"model.embed_tokens.weight": torch.ones(8, 4), name: stored}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}: quantized"):
        read_head(tmp_path)


def test_a_saved_draft_computes_what_the_student_did(tiny: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(tiny)
    token_map = torch.arange(3, 203, 2)
    torch.manual_seed(0)
    student = build_draft_model(config, read_embedding(tiny), token_map)
    fingerprint = tokenizer_fingerprint(tiny)
    save_draft_model(tmp_path / "draft", student, token_map, base=str(tiny), recipe={})
    engine = load_engine(tmp_path / "draft", EngineConfig(dtype="float32", num_blocks=8))
    assert engine.token_map is not None and engine.token_map.tolist() == token_map.tolist()
    assert tokenizer_fingerprint(tmp_path / "draft") == fingerprint
    student.set_attn_implementation("sdpa")
    ids = [5, 9, 200, 31]
    with torch.inference_mode():
        want = student(torch.tensor([ids])).logits[0, -1]
    got = engine.forward([Row(engine.kv.open(ids), ids, 1)])[0]
    # Eight bits a weight: close, not equal.
    assert got.shape == want.shape == (100,)
    assert torch.nn.functional.cosine_similarity(got, want, dim=0) > 0.999


def test_a_draft_that_is_saved_again_keeps_what_it_has_learnt_in_less_than_half_a_step(
    tiny: Path, tmp_path: Path
) -> None:
    config, token_map = transformers.LlamaConfig.from_pretrained(tiny), torch.arange(3, 203, 2)
    made = build_draft_model(config, read_embedding(tiny), token_map)
    save_draft_model(tmp_path / "first", made, token_map, base=str(tiny), recipe={})
    student, _ = load_draft_model(tmp_path / "first", torch.float32)
    weight = student.model.layers[0].mlp.up_proj.weight
    step = weight.abs().amax(1, keepdim=True) / 127
    began = weight.detach().clone()
    with torch.no_grad():
        # Not the largest one, which decides the step.
        weight.add_(torch.where(weight.abs() < 100 * step, 0.1 * step, 0.0))
    save_draft_model(tmp_path / "second", student, token_map, base=str(tiny), recipe={})
    again, _ = load_draft_model(tmp_path / "second", torch.float32)
    moved = (again.model.layers[0].mlp.up_proj.weight.detach() - began) / step.detach()
    assert float(moved.mean()) == pytest.approx(0.1, abs=0.02)
    # What has learnt nothing is as it was.
    same = again.model.layers[0].mlp.down_proj.weight, student.model.layers[0].mlp.down_proj.weight
    torch.testing.assert_close(*same, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "float8"), ("block_size", 0), ("num_blocks", 0), ("max_context_len", -1)]
)
def test_a_bad_engine_option_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


def change_tensors(file: Path, change: dict[str, torch.Tensor | None]) -> None:
    """None takes a tensor out."""
    stored = {**load_file(file), **change}
    save_file({name: value for name, value in stored.items() if value is not None}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model.norm.weight": None}, r"tensors missing: model\.norm\.weight"),
        ({"model.layers.7.extra": torch.zeros(3)}, r"tensors unexpected: model\.layers\.7\.extra"),
        ({"model.norm.weight": torch.zeros(5)}, r"another shape than the config asks for: model\.norm\.weight"),
    ],
    ids=["missing", "unexpected", "misshapen"],
)
def test_tensors_that_are_not_the_architectures_are_refused_by_name(
    copy: Path, change: dict[str, torch.Tensor | None], complaint: str
) -> None:
    change_tensors(copy / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=complaint):
        load_engine(copy, EngineConfig(num_blocks=8))


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
ENCODER_DECODER = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 384}


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("BertForMaskedLM", SMALL, "model_type bert: BertForMaskedLM does not generate text"),
        ("BertLMHeadModel", SMALL, "model_type bert: an encoder"),
        ("LlamaForSequenceClassification", SMALL, "LlamaForSequenceClassification does not generate text"),
        ("T5ForConditionalGeneration", ENCODER_DECODER, "model_type t5: an encoder with a decoder"),
        ("ModernBertForMaskedLM", {**SMALL, "pad_token_id": 0}, "model_type modernbert: does not generate text"),
        ("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 384}, "mamba: recurrent"),
        ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 1, "n_head": 2, "vocab_size": 384}, "bloom: its attention"),
    ],
)
def test_an_architecture_that_cannot_be_served_is_refused_by_name(
    tiny: Path, tmp_path: Path, name: str, settings: dict[str, int], complaint: str
) -> None:
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model_class(model_class.config_class(**settings)).save_pretrained(tmp_path / "model")
    shutil.copy(tiny / "tokenizer.json", tmp_path / "model")
    with pytest.raises(CheckpointError, match=complaint):
        load_engine(tmp_path / "model", EngineConfig(num_blocks=8))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"norm.weight": None}, "norm.weight"),
        ({"token_map": None}, "tensors missing: token_map"),
        ({"layers.0.mlp.up_proj.weight.scale": None}, r"tensors missing: layers\.0\.mlp\.up_proj\.weight\.scale"),
        ({"norm.weight": torch.zeros(5)}, "size mismatch for norm.weight"),
    ],
)
def test_a_draft_whose_tensors_do_not_fit_is_refused_by_name(
    tiny: Path, tmp_path: Path, change: dict[str, torch.Tensor | None], complaint: str
) -> None:
    token_map = torch.arange(3, 203, 2)
    student = build_draft_model(transformers.LlamaConfig.from_pretrained(tiny), read_embedding(tiny), token_map)
    draft = tmp_path / "draft"
    save_draft_model(draft, student, token_map, base=str(tiny), recipe={})
    change_tensors(draft / "draft.safetensors", change)
    with pytest.raises(CheckpointError, match=complaint):
        load_engine(draft, EngineConfig(num_blocks=8))


@pytest.mark.parametrize(
    ("device", "complaint"),
    [
        ("cuda:7", "device: cuda:7: "),
        ("bogus", "device: 'bogus' is not a torch device"),
        ("meta", "device: meta: models run"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(tiny: Path, device: str, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        load_engine(tiny, EngineConfig(device=device))


def test_a_home_that_cannot_be_written_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").touch()
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(CheckpointError, match=r"OUTRIDER_CACHE: .*/home/.* cannot be written"):
        resolve("smollm2-135m-instruct")


def change_tokenizer(path: Path, directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A checkpoint with another spelling of its tokenizer.json."""
    copy = Path(shutil.copytree(path, directory))
    spec = json.loads((copy / "tokenizer.json").read_text())
    change(spec)
    (copy / "tokenizer.json").write_text(json.dumps(spec))
    return copy


def merges_as_strings(spec: dict[str, Any]) -> None:
    spec["model"]["merges"] = ["a b", "c d"]


def merges_as_pairs(spec: dict[str, Any]) -> None:
    spec["model"]["merges"] = [["a", "b"], ["c", "d"]]


def added_only(spec: dict[str, Any]) -> None:
    for token in spec["added_tokens"]:
        del spec["model"]["vocab"][token["content"]]


def padded(spec: dict[str, Any]) -> None:
    spec["model"]["vocab"] |= {f"[PAD{i}]": i for i in range(384, 512)}
    spec["added_tokens"] += [{"id": i, "content": f"<|dummy_{i}|>"} for i in range(512, 520)]


@pytest.mark.parametrize("change", [merges_as_strings, merges_as_pairs, added_only, padded])
def test_equal_tokens_have_one_fingerprint_however_they_are_spelled(
    tiny: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    other = change_tokenizer(tiny, tmp_path / "other", change)
    assert tokenizer_fingerprint(other) == tokenizer_fingerprint(tiny)


def one_renamed(spec: dict[str, Any]) -> None:
    spec["model"]["vocab"]["<other>"] = spec["model"]["vocab"].pop("<extra_300>")


def two_swapped(spec: dict[str, Any]) -> None:
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


@pytest.mark.parametrize("change", [one_renamed, two_swapped])
def test_other_tokens_have_another(tiny: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    other = change_tokenizer(tiny, tmp_path / "other", change)
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(tiny)


def test_the_shipped_draft_pairs_with_its_target() -> None:
    target, draft = resolve("smollm2-135m-instruct"), resolve("smollm2-135m-draft")
    assert tokenizer_fingerprint(draft) == tokenizer_fingerprint(target)
