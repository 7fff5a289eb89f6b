"""Families of models, with windows and rotary embeddings in every form in which configs state them.

The logits are those of transformers, in float32: alone up to the last position served, beside a long neighbour, and
after a cached prefix; within windows and beyond them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.engine import CheckpointError, Engine, EngineConfig, Row
from outrider.engine.loading.loader import load_engine
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.unit.engine.test_supported_models import COMMON, made

WINDOW = 40
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}
SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": WINDOW}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
BY_LAYER = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}

FORMS: dict[str, tuple[str, dict[str, Any], int]] = {
    "no window": ("llama", {}, 256),
    "window without kinds of layers": ("mistral", {"sliding_window": WINDOW}, 256),
    "window of experts": ("mixtral", {"sliding_window": WINDOW, **MOE}, 256),
    "window of Phi 3": ("phi3", {"sliding_window": WINDOW, "partial_rotary_factor": 1.0}, 256),
    "window of StarCoder": ("starcoder2", {"sliding_window": WINDOW}, 256),
    "window of Qwen in all layers": (
        "qwen2",
        {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0},
        256,
    ),
    "window of SmolLM 3": (
        "smollm3",
        {"sliding_window": 17, "use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING]},
        256,
    ),
    "window that its class does not have": ("llama", {"sliding_window": WINDOW}, 256),
    "window of Qwen, off": ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": False}, 256),
    "window of Qwen": ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}, 256),
    "window of Qwen's experts": ("qwen3_moe", {"sliding_window": WINDOW, "use_sliding_window": True, **MOE}, 256),
    "window of Gemma 3": ("gemma3_text", {"sliding_window": WINDOW, "query_pre_attn_scalar": 16}, 256),
    "window by a pattern": ("cohere2", {"sliding_window": WINDOW, "sliding_window_pattern": 2}, 256),
    "window by kinds": ("olmo3", {"sliding_window": WINDOW, "layer_types": [FULL, SLIDING, FULL]}, 256),
    "kinds without a window": ("olmo3", {"sliding_window": WINDOW, "layer_types": [FULL] * 3}, 256),
    "window of ModernBERT's decoder": (
        "modernbert-decoder",
        {"local_attention": 16, "global_attn_every_n_layers": 2, "num_key_value_heads": 4},
        256,
    ),
    "chunks": ("llama4_text", {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 96, **MOE}, WINDOW),
    "learned positions": ("gpt2", {"num_key_value_heads": 4}, 256),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, 1024),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, 256),
    "yarn": ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, **ORIGINAL}}, 256),
    "yarn that lengthens": (
        "qwen2",
        {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, **ORIGINAL}},
        8 * WINDOW,
    ),
    "llama3": ("llama", {"rope_parameters": {"rope_theta": 1e4, **LLAMA3}}, 256),
    "longrope": ("llama", {"rope_parameters": {"rope_theta": 1e4, **LONGROPE, **ORIGINAL}}, WINDOW),
    "longrope of Phi 3": (
        "phi3",
        {"rope_parameters": {"rope_theta": 1e4, **LONGROPE, "partial_rotary_factor": 1.0}, **ORIGINAL},
        WINDOW,
    ),
    "rotary by kinds of layers": (
        "gemma3_text",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "rope_parameters": BY_LAYER},
        256,
    ),
}


@pytest.fixture(scope="module", params=FORMS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, PreTrainedModel]:
    kind, settings, expected = FORMS[request.param]
    path = made(kind, settings, tmp_path_factory.mktemp("family"))
    engine = load_engine(path, EngineConfig(dtype="float32", num_blocks=128))
    # Not fewer positions than need be.
    assert engine.info.max_context_len >= expected
    return engine, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def text(length: int, seed: int) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def by_transformers(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5)


def test_up_to_the_last_position_served_alone(loaded: tuple[Engine, PreTrainedModel]) -> None:
    engine, model = loaded
    token_ids = text(engine.info.max_context_len, 1)
    sequence = engine.kv.open(token_ids)
    assert same(engine.forward([Row(sequence, token_ids, len(token_ids))]), by_transformers(model, token_ids))
    engine.kv.close(sequence)


def test_beside_a_long_neighbour_and_after_a_cached_prefix(loaded: tuple[Engine, PreTrainedModel]) -> None:
    engine, model = loaded
    last = max(36, engine.info.max_context_len // 16 * 16)
    neighbour, token_ids = text(engine.info.max_context_len, 2), text(last, 3)
    wanted = by_transformers(model, token_ids)
    for length in (36, last):
        rows = [Row(engine.kv.open([]), ids, 3) for ids in (neighbour, token_ids[: length - 3])]
        assert same(engine.forward(rows)[3:], wanted[length - 6 : length - 3])
        engine.kv.publish(rows[1].sequence, length - 3)
        for row in rows:
            engine.kv.close(row.sequence)
        again = engine.kv.open(token_ids[:length])
        cached = again.cached_len
        assert cached == (length - 3) // 16 * 16
        rest = token_ids[cached:length]
        assert same(engine.forward([Row(again, rest, len(rest))]), wanted[cached:length])
        engine.kv.close(again)


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES = {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}


def test_the_text_part_of_a_model_that_takes_images_is_run_as_a_model_of_texts(tmp_path: Path) -> None:
    text_part = {**COMMON, "model_type": "gemma3_text", "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
    path = made("gemma3", {"text_config": text_part, "vision_config": {**VISION, **IMAGES}}, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.model.vision_tower is not None
    token_ids = text(100, 4)
    wanted = by_transformers(model, token_ids)
    for execution in ("fused", "transformers"):
        engine = load_engine(path, EngineConfig(dtype="float32", num_blocks=16, execution=execution))
        assert engine.info.execution == execution
        found = engine.forward([Row(engine.kv.open(token_ids), token_ids, len(token_ids))])
        assert same(found, wanted)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("gpt_oss", {**MOE, "sliding_window": 16}, r"attention sinks \(s_aux\)"),
        ("granite_swa", {"sliding_window": 16}, r"attention sinks \(s_aux\)"),
        ("deepseek_v3", {"kv_lora_rank": 16, "n_routed_experts": 4}, r"multi-head latent attention \(kv_lora_rank\)"),
        ("gpt_bigcode", {"num_key_value_heads": 2}, "1 heads x 16 of keys .* the cache holds 2 heads x 16"),
        ("diffllama", {}, "does not run once in each layer"),
        ("doge", {}, "computes a mask of its own"),
        (
            "gpt_neo",
            {"window_size": 9, "attention_types": [[["global", "local", "global"], 1]]},
            "its attention cannot be replaced",
        ),
        ("llama", {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "su is the old name of longrope"),
        ("olmo3", {"layer_types": ["indexed_attention"] * 3}, "layers of kind indexed_attention .*use --engine vllm"),
        ("llama", {"rope_parameters": {"rope_type": "bent", "rope_theta": 1e4}}, "rope_type 'bent' is not known"),
        ("gpt_oss", MOE, "use --engine vllm"),
        ("deepseek_v3", {"kv_lora_rank": 16, "n_routed_experts": 4}, "use --engine vllm"),
        ("gemma2", {"query_pre_attn_scalar": 16}, "caps scores .*use --engine vllm"),
        ("mamba", {}, "recurrent.*use --engine vllm"),
        ("doge", {}, "use --engine vllm"),
    ],
)
def test_what_is_not_served_is_refused_before_a_weight_is_read(
    kind: str, settings: dict[str, Any], reason: str, tiny: Path, tmp_path: Path
) -> None:
    AutoConfig.for_model(kind, **{**COMMON, **settings}).save_pretrained(tmp_path)
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(tiny / name)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{reason}"):
        load_engine(tmp_path, EngineConfig(dtype="float32"))
